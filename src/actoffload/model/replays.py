"""Which calls of groups are replayed in backward: the programs of each group, and why a call has none.

`[Note: kinds]`  Calls of a group that agree in all that can be seen are of one kind, and follow the same program: their
arguments, and the modules, weights, numbers, flags and functions of the group.  Global variables, attributes of classes
and what closures refer to are in no key.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from math import inf
from numbers import Number
from operator import attrgetter, is_
from statistics import median
from types import MethodType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.jit import ScriptModule
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from .._text import fold, fold_names
from .._torch.modules import Follower, is_compiled, opaque, registered
from .._torch.tensors import (
    NO_BACKWARD,
    address,
    backward_id,
    in_transform,
    leaves,
    saved_tensor_hooks,
    storage_address,
    tree_flatten,
    tree_unflatten,
)
from ..device.base import Backend, current_stream
from ..engine.eligibility import StorageRef
from ..engine.hooks import Packer, unpack
from ..planner import OperatorCost
from ..replay.call import FollowingCall, TracedCall
from ..replay.policy import Policy
from ..replay.program import Program
from ..replay.proof import Alarm, Times, measure
from ..replay.trace import FunctionCall, same
from ..replay.tracer import Tracer
from .follow import KEPT, FollowedModule

AROUND = "because they are called under saved-tensor hooks of the program, such as those of torch.utils.checkpoint"
INSIDE = "because kept modules are inside of them"
STATISTICS = "because compiled code would update running statistics twice"
CAPTURED = "because their first calls are captured into a CUDA graph, in which nothing can be compared"
TRANSFORM = "because they are called inside of a transform of torch.func"

TIMED = 3  # groups that do the same whose operators are timed
KINDS = 8  # of calls of a group that are remembered
DIFFERENT = 2  # calls that differ from their program, after which calls of this kind are always traced


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of a group that do the same, as far as their arguments and the attributes of its modules say."""

    attributes: Attributes
    key: Any  # what arguments and autocast say
    programs: dict[Policy, Program] = field(default_factory=dict)
    different: int = 0


RunningCall: TypeAlias = FollowingCall | TracedCall


class Replays:
    """What is known of the groups among the followed modules of a model; values of less than `min_bytes` stay."""

    def __init__(self, modules: Sequence[FollowedModule], backend: Backend, min_bytes: int) -> None:
        self._backend, self._min_bytes = backend, min_bytes
        self._kinds: defaultdict[int, list[_Kind]] = defaultdict(list)  # by group: of its calls, the latest one first
        kept = {each.ref() for each in modules if each.role is KEPT}
        # Groups with kept modules inside.
        self._around = {each.group for each in modules if not kept.isdisjoint([*each.module.modules()][1:])}
        self.refused: dict[str, str] = {}  # by the name of a group: why it is not replayed though it should be
        self._passes = 0
        self._count = sum(followed.group >= 0 for followed in modules)  # of groups, which are numbered from 0
        self.alarm = Alarm(backend)
        self.proven_bytes = 0  # that were compared in all bits

    def forward_begins(self) -> None:
        """Note that a forward of the model begins; raise a `RuntimeError` if an earlier backward made other values."""
        self._passes += 1
        self.alarm.look()

    def begin(
        self,
        followed: FollowedModule,
        policy: Policy,
        packer: Packer,
        args: Any,
        kwargs: Any,
        operators: OperatorTimes | None,
    ) -> RunningCall | Callable[..., Any] | None:
        """Begin a call of a group; None if it is not replayed.

        Of a group with compiled code, which is one operator, a wrapper is returned that runs it again as a whole.
        `operators` takes what the first calls show.
        """
        self.alarm.look()
        group, module = followed.group, followed.module
        self.refused.pop(followed.name, None)
        obstacle = self._obstacle(followed)
        if obstacle:
            self.refused[followed.name] = obstacle
            return None
        kinds = self._kinds[group]
        attributes = next((each.attributes for each in kinds if each.attributes.holds), None) or Attributes(module)
        compiled = followed.compiled or attributes.is_compiled
        tensors: list[torch.Tensor] = []
        arguments = None if compiled else _describe((args, kwargs), tensors, {})
        device = self._backend.type
        key = arguments, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        kind = next((each for each in kinds if each.attributes is attributes and each.key == key), None)
        kind = kind or _Kind(attributes, key)
        if not kinds or kinds[0] is not kind:
            others = [each for each in kinds if each is not kind]
            # [guard: weights that were replaced]
            others = [each for each in others if each.attributes.has_members_of(attributes)]
            kinds[:] = [kind, *others[: KINDS - 1]]
        if compiled:
            if attributes.has_statistics:  # running statistics of compiled code
                self.refused[followed.name] = STATISTICS
                return None
            if operators is None:
                return partial(_run_again, None)
            sizes = operators.saved[group] = []
            return partial(_run_again, partial(_count_saved, sizes, module, self._min_bytes))
        capturing = self._backend.capturing()
        if capturing:
            policy = replace(policy, redraws=False)
        program = kind.programs.get(policy)
        if program is None and kind.programs:
            proven = next(iter(kind.programs.values()))
            program = kind.programs[policy] = Program(proven.trace, policy, self._min_bytes, proven.banned)
        if capturing and program is None:  # proof while a graph is captured
            self.refused[followed.name] = CAPTURED
            return None
        timer = None
        if operators is not None and group not in operators.groups and not capturing:
            timer = partial(operators.measure, group)
        name = f"'{followed.name}' ({type(module).__name__})"
        common = attributes.modules, tensors, packer, self.alarm, name
        if program is not None and timer is None:
            following = FollowingCall(program, *common, compares_all=group == self._passes % self._count)
            following.kind = kind
            return following
        tracer = Tracer(module, tensors, policy, lambda: current_stream(self._backend))
        call = TracedCall(tracer, policy, self._min_bytes, timer, *common)
        call.kind = kind
        tracer.begin()
        return call

    def finish(self, call: RunningCall, output: Any) -> None:
        """End a call of a group that has returned."""
        kind = call.kind
        call.finish(output)
        if not call.agrees:  # calls that differ though their arguments do not: the next one is traced
            kind.different += 1
            kind.programs.clear()
        elif isinstance(call, TracedCall):
            self.proven_bytes += call.proven_bytes
            if call.program.trace.steady and kind.different < DIFFERENT:
                kind.programs = {call.program.policy: call.program}

    def _obstacle(self, followed: FollowedModule) -> str:
        """Return why a call of a group that begins now cannot be replayed; empty if it can."""
        hooks = saved_tensor_hooks()
        if hooks is None or hooks[1] is not unpack:  # group that the program checkpoints
            return AROUND
        if in_transform(vmap=True):  # group inside of vmap
            return TRANSFORM
        return INSIDE if followed.group in self._around else ""

    def refusals(self) -> str:
        """Return which groups are not replayed though they should be, and why, in sentences; empty if all are."""
        alike = fold(self.refused.items(), lambda refused: refused[1])
        return " ".join(f"Not recomputed, {each[0][1]}: {fold_names(name for name, _ in each)}." for each in alike)


# Compiled code


def _run_again(counted: Callable[..., Any] | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call compiled code, and run it again in backward as a whole; `counted`, if given, calls it."""
    function = function if counted is None else partial(counted, function)
    leaves, tree = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(list(leaves), tree)
        return function(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False)


def _count_saved(
    sizes: list[int], module: Module, min_bytes: int, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function of a module, and note the bytes of the storages that autograd would hold of its forward.

    It runs again in backward, so `torch.utils.checkpoint` drops what it saves.  Weights, arguments and storages of less
    than `min_bytes` do not count.
    """
    hooks = saved_tensor_hooks()
    if hooks is None or backward_id() != NO_BACKWARD:
        return function(*args, **kwargs)
    seen = {*map(storage_address, (*module.parameters(), *module.buffers(), *leaves((args, kwargs))))}
    held = list[StorageRef]()  # no other storage gets the address of one that is dropped

    def pack(tensor: torch.Tensor) -> Any:
        key = storage_address(tensor)
        if key not in seen:
            memory = tensor.untyped_storage()
            seen.add(key)
            held.append(StorageRef(memory))
            sizes.extend([memory.nbytes()] if memory.nbytes() >= min_bytes else [])
        return hooks[0](tensor)

    with saved_tensors_hooks(opaque(pack), hooks[1]):
        return function(*args, **kwargs)


for _function in (_run_again, _count_saved):
    opaque(_function, compile_callees=True)


# Keys of calls

_PLAIN = Number, Enum, str, bytes, range, slice, type(None), torch.dtype, torch.device
_OFTEN = frozenset((int, bool, str, type(None), torch.dtype))  # those of most calls
LARGEST = 1024  # elements of an array of NumPy that is compared
_INTERNAL = frozenset(vars(Module())) - {"training"}

_needs_gradient = attrgetter("requires_grad")


class Attributes:
    """What the call of a module depends on beside its arguments: modules, weights, numbers, flags and functions."""

    def __init__(self, module: Module) -> None:
        # The forward of a followed module leads here: a strong reference to it would be a cycle.
        self._root, self._inside = weakref.ref(module), [inner for inner in module.modules() if inner is not module]
        modules = self.modules
        self.is_compiled = any(is_compiled(inner) or isinstance(inner, ScriptModule) for inner in modules)
        self.has_statistics = any(getattr(inner, "running_mean", None) is not None for inner in modules)
        own, inside = _attributes(module), [_attributes(inner) for inner in self._inside]
        values = [value for each in (own, *inside) for value in each.values()]
        settings = {id(found): found for value in values if (found := _settings_in(value))}
        tables: list[Any] = [table for inner in modules for table in registered(inner)]
        tables += [table for inner in modules for table in (inner._forward_pre_hooks, inner._forward_hooks)]
        # Looked up in each call, so without a loop in Python: LoRA has 80 modules in a block.
        self._own = list(own)
        places: list[tuple[Any, str]] = [
            (vars(inner), name) for inner, names in zip(self._inside, inside, strict=True) for name in names
        ]
        places += [(each, name) for each in settings.values() for name, value in each.items() if _is_plain(value)]
        places += [(table, name) for table in tables for name in table]
        self._holders, self._names = [holder for holder, _ in places], [name for _, name in places]
        self._sized: list[Sized] = [*map(vars, self._inside), *tables]
        self._lists = [value for value in values if type(value) is list]
        self._weights = list(module.parameters())
        self._values, self._now = self._find(), self._look()
        self._members = [member for inner in modules for table in registered(inner) for member in table.values()]

    @property
    def modules(self) -> list[Module]:
        """The module and those inside of it."""
        root = self._root()
        assert root is not None
        return [root, *self._inside]

    def _find(self) -> list[Any]:
        return [*map(vars(self._root()).get, self._own), *map(dict.get, self._holders, self._names)]

    def _look(self) -> tuple[list[Any], ...]:
        sizes = [len(vars(self._root())), *map(len, self._sized)]
        return sizes, list(map(tuple, self._lists)), list(map(_needs_gradient, self._weights))

    @property
    def holds(self) -> bool:
        """Whether nothing has changed."""
        now, before = self._find(), self._values
        same = all(map(is_, now, before)) or all(map(_is_equal, now, before))
        return same and self._look() == self._now

    def has_members_of(self, other: Attributes) -> bool:
        """Return whether it has the same modules, weights and buffers; otherwise it keeps those of others alive."""
        return list(map(id, self._members)) == list(map(id, other._members))


def _attributes(module: Module) -> dict[str, Any]:
    """Return the attributes of a module on which its call may depend: plain ones, functions and settings."""
    found = ((name, value) for name, value in vars(module).items() if name not in _INTERNAL)
    theirs = ((name, value) for name, value in found if not isinstance(getattr(value, "__self__", None), Follower))
    return {name: value for name, value in theirs if _is_plain(value) or _is_function(value) or _settings_in(value)}


def _is_equal(now: Any, before: Any) -> bool:
    """Return whether an attribute is the same, or as plain as before and of the same bits, as 0.0 and -0.0 are not."""
    return now is before or (
        _is_plain(now) and _is_plain(before) and _describe(now, [], {}) == _describe(before, [], {})
    )


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a flag or text, or consists of such."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (type(value).__module__ == "numpy" and value.shape == ())


def _is_function(value: Any) -> bool:
    return callable(value) and not torch.is_tensor(value)


def _settings_of(value: Any) -> dict[str, Any] | None:
    """Return a dictionary, or the attributes of an object that holds settings, as a configuration does; else None."""
    if type(value) is dict:
        return value
    kind = type(value)
    holds_settings = is_dataclass(kind) or issubclass(kind, (Namespace, SimpleNamespace)) or hasattr(kind, "to_dict")
    return vars(value) if holds_settings and hasattr(value, "__dict__") else None


def _settings_in(attribute: Any) -> dict[str, Any] | None:
    """Return the settings that an attribute holds; None if it has none, or tensors, as notes of a forward have."""
    found = _settings_of(attribute)
    if found is None or next(leaves(found), None) is not None:  # [guard: tensors that a forward notes]
        return None
    return found if any(map(_is_plain, found.values())) else None


def _reference(value: Any) -> Any:
    """Return a weak reference to a value, or the value if there are none to its kind."""
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value)
    except TypeError:
        return value


def _describe(given: Any, tensors: list[torch.Tensor], first: dict[int, tuple[int, int]]) -> Any:
    """Return what programs depend on of an argument, to be compared with another; add its tensors to `tensors`.

    `first` has the number and offset in bytes of the first tensor on each storage.
    """
    kind: Any = type(given)
    if kind in _OFTEN:
        return kind, given
    if isinstance(given, torch.Tensor):
        tensors.append(given)
        if given.layout is not torch.strided or given.is_nested:
            return kind, given.layout, given.dtype, given.requires_grad
        before = offset = 0
        if kind is torch.Tensor:
            offset = int(given.storage_offset()) * given.itemsize
            before, start = first.setdefault(address(given.untyped_storage()), (len(tensors), offset))
            offset -= start
        bits = given.is_conj(), given.is_neg()
        return kind, given.size(), given.stride(), given.dtype, given.requires_grad, bits, before, offset
    if isinstance(given, _PLAIN):  # 0.0 and -0.0 are equal, and NaN is to nothing
        return kind, repr(given) if isinstance(given, (Number, slice)) else given
    if isinstance(given, (list, tuple)):
        return kind, *[_describe(each, tensors, first) for each in given]
    if isinstance(given, Mapping):
        return kind, *[(name, _describe(each, tensors, first)) for name, each in given.items()]
    if is_dataclass(given) and not isinstance(given, type):
        return kind, *[_describe(getattr(given, each.name), tensors, first) for each in fields(given)]
    if kind.__module__ == "numpy" and getattr(given, "size", inf) <= LARGEST:
        return kind, given.shape, str(given.dtype), given.tobytes()
    if _is_function(given):
        return kind, _reference(given)
    settings = _settings_of(given) or {}
    return kind, *[(name, value) for name, value in settings.items() if isinstance(value, _PLAIN)]


# Times of operators


def _work_of(program: Program) -> Hashable:
    """Return what a program does: its operators, and the bytes of what they make."""
    values = program.trace.values
    return tuple((step.node.name, *(values[value].nbytes for _, value in step.made)) for step in program.steps.values())


class OperatorTimes:
    """The operators of groups, as they were timed when their programs were proven."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[int, tuple[Program, Times]] = {}
        self.saved: dict[int, list[int]] = {}  # by compiled group: bytes of the storages that it saves as it is

    @property
    def groups(self) -> frozenset[int]:
        """The groups whose operators were timed, or that are compiled and show what they save."""
        return frozenset(self._known.keys() | self.saved.keys())

    def measure(self, group: int, program: Program, source: Any, beginning: Any) -> None:
        """Time the operators of the program of a group, unless those of enough groups that do the same were timed."""
        alike = sum(_work_of(known) == _work_of(program) for known, _ in self._known.values())
        times = measure(program, source, beginning, self._backend) if alike < TIMED else []
        self._known[group] = program, times

    def costs(self) -> dict[int, list[OperatorCost]]:
        """Return the operators of each group in the order in which they run.

        Groups with the same operators and sizes take the same time: the median of those that were timed.
        """
        found: dict[int, list[OperatorCost]] = {}
        for groups in fold(self._known, lambda group: _work_of(self._known[group][0])):
            timed = [times for group in groups if (times := self._known[group][1])]
            if timed:
                pairs_of_steps = zip(*timed, strict=True)
                seconds = [median(self._backend.elapsed(*pair) for pair in pairs) for pairs in pairs_of_steps]
                found.update(dict.fromkeys(groups, _operator_costs(self._known[groups[0]][0], seconds)))
        return found


def _operator_costs(program: Program, seconds: Sequence[float]) -> list[OperatorCost]:
    """Return the operators of a program, of which each takes some seconds."""
    values, sources = program.trace.values, program.sources
    runs = program.runs()
    place = {node: k for k, node in enumerate(program.steps)}
    costs = []
    for (node, step), own in zip(program.steps.items(), seconds, strict=True):
        made, read = [value for _, value in step.made], [value for value in node.reads if value not in sources]
        dropped = program.dropped.intersection(made)
        makers = {value: place[origin] for value in read if (origin := values[value].origin) in place}
        sizes = tuple(
            values[value].nbytes
            for value in made
            if value in program.saves and values[value].nbytes >= program.min_bytes
        )
        kept = 0
        of_weights = node.reads and all(value in program.weights for value in node.reads)
        if of_weights or node.operator is same:
            kept, sizes = sum(sizes), ()
        costs.append(
            OperatorCost(
                node.name,
                max(own, 0.0),
                sizes,
                reads=tuple(sorted({*makers.values()})),
                needed=bool(dropped),
                returned=sum(values[value].nbytes for value in made if value in program.trace.returned),
                unsaved=tuple(sorted({maker for value, maker in makers.items() if value not in program.saves})),
                segment=node.segment,
                kept=kept,
                gradient=0 if isinstance(node.operator, FunctionCall) else max(sizes, default=0),
                twice=sum(values[value].nbytes for value in dropped) if runs[node] > 1 else 0,
            )
        )
    return costs
