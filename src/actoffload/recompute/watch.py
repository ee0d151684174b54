"""Whether the calls of a module may be recomputed: what one call does that a second one must not do again.

A module is watched in its first call, which is not recomputed.  Calls of modules of the same structure, with the same
flags, are assumed to do the same.  A call that does something else after all is an error when it is recomputed, if
parameters, buffers, inputs or the operators that run show it: `State.check` raises that of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter, SyncBatchNorm

from .._torch.autograd import saved_tensor_hooks
from .._torch.compiling import opaque
from .._torch.modules import is_compiled, registered
from .._torch.tensors import DispatchMode, current_dispatch_mode, is_capturing, storage_address, tree_leaves
from .arguments import HOLDERS, PLAIN, Snapshot, objects_among, values_held, values_inside
from .policy import addresses_written, draws, note_drawing, writes
from .state import version
from .structure import inside, is_data
from .trace import nodes_between

__all__ = ["GENERATORS", "OBJECTS", "Mode", "Watch", "remove_modes"]

T = TypeVar("T")

AGAIN = 3
"""Calls in a row that are watched, where each adds something that the next one finds, such as a buffer."""

COLLECTIVES = frozenset(("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"))
"""Namespaces of the operators of `torch.distributed`."""

CHANGES = "because they change parameters in their forward, or running statistics that cannot be restored"
ATTRIBUTES = "because they change tensors or lists in their forward that are attributes of modules and no buffers"
RANKS = "because they contain torch.nn.SyncBatchNorm, which communicates with other ranks"
INPUTS = "because they write to their inputs"
OBJECTS = "because they change objects that are passed to them, such as a cache of keys and values (use_cache)"
OUTSIDE = "because they write to tensors that are no parameters, buffers or inputs of theirs"
DROPOUT = "because cuDNN and MIOpen keep the random numbers of the dropout between recurrent layers to themselves"
HOOKS = "because the program checkpoints a part of them, or has saved-tensor hooks of its own there"
NOISE = "because autograd saves the noise of torch.nn.RReLU before it is drawn, and recomputation stops there"
GENERATORS = "because they may draw random numbers from a generator of the program"

PYTORCH = frozenset(("", "aten", "prim", "prims", "profiler", "inductor", "quantized", "mkldnn", "higher_order"))
"""Namespaces of operators whose tags say whether they draw random numbers."""

REENTRANT = "CheckpointFunction"
"""Beginning of the names of the autograd nodes of reentrant checkpointing, also of that of other libraries."""


_Base: Any = object if DispatchMode is None else DispatchMode


class Mode(_Base):  # type: ignore[misc]
    """A context that sees every operation, beside compiled code, which stays compiled, and higher-order operators."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without the wrapper of `torch.compiler.disable`, which takes microseconds for each operator."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such."""
        return True


def remove_modes() -> None:
    """Remove the modes of this thread whose own removal an interrupt prevented."""
    while isinstance(mode := current_dispatch_mode(), Mode):
        _Base.__exit__(mode, None, None, None)


_NORMS = {
    getattr(torch.ops.aten, name).default for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}
"""Operators (input, weight, bias, running mean, running variance, training, ...)."""


_RNNS = {
    getattr(torch.ops.aten, name).default: places
    for name, places in (("_cudnn_rnn", slice(11, 13)), ("miopen_rnn", slice(10, 12)))
}
"""Recurrent layers, with the places of the dropout and of whether they train among the arguments.

The state of the generator of their dropout is a tensor that PyTorch keeps for each device (``RNN.cpp`` of ATen).
"""


class _Seen(Mode):
    """Sees whether operators run under other saved-tensor hooks than those at its start, or with a generator.

    It also notes which of some tensors they read, by identity.
    """

    def __init__(self, tensors: Collection[int]) -> None:
        super().__init__()
        self._tensors, self.read = tensors, set[int]()
        self._hooks, self._packs = saved_tensor_hooks(), False
        self.reason = ""
        self.draws = self.communicates = False
        self.written: set[int] = set()  # addresses of storages, also of those whose version counters do not show it
        self.made: set[int] = set()  # addresses of storages that operators returned
        self.statistics: list[Tensor] = []  # running statistics that were updated, which no version counter shows

    def seeing(self) -> AbstractContextManager[Any]:
        """Return a context in which the hooks that are installed run unseen: they copy what autograd saves."""
        hooks = saved_tensor_hooks()
        if hooks is None:
            return nullcontext()
        pack, unpack = hooks

        def packing(tensor: Tensor) -> Any:
            self._packs = True
            try:
                return pack(tensor)
            finally:
                self._packs = False

        self._hooks = packing, unpack
        return saved_tensors_hooks(packing, unpack)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._packs:  # [guard: copies of what autograd saves]
            return operator(*args, **(kwargs or {}))
        hooks = saved_tensor_hooks()
        # [guard: saved-tensor hooks inside of a group]
        if hooks is not None and (self._hooks is None or hooks[0] is not self._hooks[0]):
            self.reason = HOOKS
        if self._tensors:
            self.read.update(id(of) for of in tree_leaves((args, kwargs)) if id(of) in self._tensors)
        # [guard: generator of the program]
        if any(isinstance(of, torch.Generator) for of in (*args, *(kwargs or {}).values())):
            self.reason = GENERATORS
        if operator is torch.ops.aten.rrelu_with_noise.default:  # [guard: noise of RReLU]
            self.reason = NOISE
        if operator in _RNNS and all(args[_RNNS[operator]]):  # [guard: dropout of recurrent layers]
            self.reason = DROPOUT
        if writes(operator):
            self.written |= addresses_written(operator, args, kwargs or {})
        namespace = getattr(operator, "namespace", "")
        self.communicates = self.communicates or namespace in COLLECTIVES
        if operator in _NORMS and args[5]:  # [guard: running statistics without a counter]
            self.statistics += [of for of in args[3:5] if of is not None]
        fresh = operator is torch.ops.aten.lift_fresh.default  # the tensor was made past the mode
        given = set() if fresh else set(map(storage_address, filter(_is_tensor, tree_leaves((args, kwargs)))))
        foreign = not (namespace in PYTORCH or namespace in COLLECTIVES or is_capturing())
        states = _random_states(args) if foreign else []
        outputs = operator(*args, **(kwargs or {}))
        if foreign and not all(map(torch.equal, states, _random_states(args))):
            note_drawing(operator)
        self.draws = self.draws or draws(operator, args, kwargs or {})
        self.made |= set(map(storage_address, filter(_is_tensor, tree_leaves(outputs)))) - given
        return outputs

    opaque(__torch_dispatch__)


class Watch:
    """One call of a module that is not recomputed, and why later ones must not be.

    Attributes
    ----------
    reason : str or None
        Why later calls must not be recomputed; empty if they may be, None until the call has returned.
    writers : tuple of int
        Positions, in `inside`, of modules that wrote to their buffers.
    draws : bool
        Whether the call drew random numbers, or may have in compiled code.
    communicates : bool
        Whether the call communicated with other ranks outside of compiled code.
    compiled : bool
        Whether modules inside are compiled, or all of it with the model around it.
    """

    def __init__(self, module: Module, *, compiled: bool = False, after: Watch | None = None) -> None:
        self._module: Module | None = module
        again = after is not None and after.reason is None
        self._number: int = 1 + (after._number if after is not None and again else 0)  # of calls in a row
        self.reason: str | None = None
        self.writers: tuple[int, ...] = ()
        self.draws, self.communicates = True, False
        self.compiled = compiled or any(map(is_compiled, inside(module)))

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that calls the module."""
        assert self._module is not None
        module, self._module = self._module, None
        modules, names = inside(module), _names(module)
        # Sharding replaces parameters around the call; only what is written to one counts.
        weights = [(of, version(of)) for each in modules for of in registered(each)[0].values() if of is not None]
        buffers = list(map(_versions, modules))
        alive = [dict(registered(of)[1]) for of in modules]  # so that no other buffer gets the identity of one of them
        leaves = tree_leaves((args, kwargs))
        inputs = [(of, version(of)) for of in leaves if isinstance(of, Tensor)]
        objects = objects_among(leaves)
        before = Snapshot(objects, values_inside)
        attributes = [
            _Attribute(each, name, of)
            for each in modules
            for name, of in vars(each).items()
            if _Attribute.shows(name, of)
        ]
        read, written, made = set[int](), set[int](), set[int]()
        statistics: list[Tensor] = []
        if self.compiled and any(buffers):
            # Under a mode PyTorch traces a part of the first call and runs the rest past it, and the buffers that it
            # traced count as written to (seen with torch 2.13).  Their values say which of them were.
            copies = [(of, of.clone()) for each in alive for of in each.values() if of is not None]
            result, seen = function(*args, **kwargs), ""
            statistics = [of for of, copy in copies if is_capturing() or not torch.equal(of, copy)]
        elif DispatchMode is None:
            result, seen = function(*args, **kwargs), ""
        else:
            mode = _Seen({id(of.value) for of in attributes})
            with mode.seeing(), mode:
                result = function(*args, **kwargs)
            seen, statistics, self.draws = mode.reason, mode.statistics, mode.draws or self.compiled
            self.communicates, read, written, made = mode.communicates, mode.read, mode.written, mode.made
            # [guard: buffers that are written to past their counters]
            statistics += [of for each in alive for of in each.values() if storage_address(of) in written]
        # What wrote to one buffer of a module may have written to others past their version counters.
        updated, now = set(map(id, statistics)), list(map(_versions, modules))
        changed = [
            k for k, had in enumerate(buffers) if had != now[k] or any(identity in updated for identity, _ in had)
        ]
        self.writers = tuple(changed)  # [guard: buffers that a group changes]
        plain = not (self.compiled or self.communicates) and all(Parameter in type(of).__mro__ for of, _ in weights)
        known = {storage_address(of) for of in (*(of for of, _ in weights), *(of for of, _ in inputs))}
        known.update(storage_address(of) for each in alive for of in each.values() if of is not None)
        del alive
        writers = [modules[k] for k in changed]
        updated -= {identity for had in now for identity, _ in had}
        tables = all(registered(of)[1] is vars(of).get("_buffers") for of in writers)  # not those of TorchScript
        # [guard: parameters that a group changes]
        if updated or not tables or _overlap(writers) or any(_edited(*of, written) for of in weights):
            seen = CHANGES
        elif any(isinstance(of, SyncBatchNorm) for of in writers):  # [guard: norm over several ranks]
            seen = RANKS
        elif any(_edited(*of, written) for of in inputs):  # [guard: group that writes to its inputs]
            seen = INPUTS
        # [guard: group that changes its arguments]
        elif before.changed() or any(hasattr(of, "__next__") for of in objects):
            seen = OBJECTS
        elif any(of.changed(read) for of in attributes):  # [guard: attributes that a group changes]
            seen = ATTRIBUTES
        # Sharding writes to memory of its own, and so does compiled code.
        # [guard: group that writes to what is outside of it]
        elif plain and written - made - known - {0}:
            seen = OUTSIDE
        elif _is_reentrant(result, [of for of, _ in inputs]):  # [guard: reentrant checkpointing inside of a group]
            seen = HOOKS
        grows = names != _names(module) or any(of.grew for of in attributes)
        # [guard: calls that add what the next one finds]
        self.reason = None if grows and not seen and self._number <= AGAIN else seen
        return result

    opaque(__call__)


def _random_states(args: Any) -> list[Tensor]:
    """Return the states of the generators that an operator draws from without being given one."""
    devices = {of.device for of in args if isinstance(of, Tensor) and of.device.type not in ("cpu", "meta")}
    return [torch.get_rng_state(), *(torch.get_device_module(of).get_rng_state(of) for of in devices)]


def _names(module: Module) -> list[Any]:
    """Return the names of parameters, buffers and children of a module and of all inside of it."""
    return [tuple(map(tuple, registered(of))) for of in inside(module)]


def _is_tensor(of: Any) -> bool:
    return isinstance(of, Tensor)


def _versions(module: Module) -> list[tuple[int, int]]:
    """Return identities and versions of the buffers of a module."""
    return [(id(of), version(of)) for of in registered(module)[1].values() if of is not None]


def _edited(tensor: Tensor, before: int, written: Collection[int]) -> bool:
    """Return whether a tensor was written to since a version; also through ``data``, which has another counter."""
    return version(tensor) != before or storage_address(tensor) in written  # [guard: edits past a version counter]


class _Attribute:
    """An attribute of a module before a call that may be changed in place; one that is replaced is put back."""

    def __init__(self, module: Module, name: str, value: Any) -> None:
        self._table, self._name, self.value = vars(module), name, value
        # A dictionary may get more entries, as one that caches does.
        self._parts = dict(value) if type(value) is dict else {}
        self._before = [Snapshot(of, values_held) for of in (self._parts.values() if type(value) is dict else [value])]

    @staticmethod
    def shows(name: str, value: Any) -> bool:
        """Return whether it shows when the value of an attribute is changed."""
        return is_data(name, value) and (isinstance(value, (Tensor, *HOLDERS)) or type(value).__module__ == "numpy")

    @property
    def grew(self) -> bool:
        """Whether it is a dictionary that has entries which it did not have."""
        return type(self.value) is dict and not self.value.keys() <= self._parts.keys()

    def changed(self, read: Collection[int]) -> bool:
        """Return whether it was changed in place, or replaced by what was computed from it; `read` by operators."""
        value, now = self.value, self._table.get(self._name)
        if now is not value and id(value) in read:
            return True
        parts = self._parts.items()
        replaced = any(
            value.get(key) is not of and (type(of) not in PLAIN or value.get(key) != of) for key, of in parts
        )
        return replaced or any(of.changed() for of in self._before)


def _overlap(modules: Iterable[Module]) -> bool:
    """Return whether different buffers of some modules are views of one memory, of which copies would be none."""
    buffers = {id(of): of for each in modules for of in registered(each)[1].values() if of is not None}
    return len(set(map(storage_address, buffers.values()))) < len(buffers)  # [guard: buffers that share memory]


def _is_reentrant(result: Any, inputs: Iterable[Tensor]) -> bool:
    """Return whether a node of reentrant checkpointing is between inputs and result."""
    return any(node.name().startswith(REENTRANT) for node in nodes_between(result, inputs))
