"""The operators that make dropped values again, in the order in which backward needs them.

`[Note: what is held]`  Backward reads saved tensors in about the reverse of the order in which they were saved, and a
program runs as far as the tensor needs that is read.  On the way it makes values that backward reads later.  Those that
are expensive to make are *held* until they are not needed: results of matrix products, attention and functions, and
what takes more than `CHEAP` operators.  Of the others, those stay for a while that several tensors of one *segment*
need, which is what one module directly inside of the group saves.  All else is freed at once, and made again when it is
read.  So the MLP of a block is made again, used and freed before its attention is.  By a policy that `holds`,
everything is made once: a block of a Llama takes an eighth to a fourth more memory, see `call` [Note: values that are
held].

`[Note: counts]`  A held value, or a source of the program, is needed by each dropped value that is made from it by
cheap operators until backward has read that, and by each held value until that is made.  The counts decide when memory
is freed and nothing else: a value that is missing is made again from sources, all of which remain as long as a graph
that is retained may read them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.tensors import negative_view
from ..engine.layout import View
from .policy import COSTLY, Policy, rules_of
from .trace import UNKNOWN, Entry, FunctionCall, Node, Place, Trace, Weight, returns_one, with_twins

__all__ = ["Expected", "Program", "Step", "copy_of", "on_value"]

CHEAP = 4
"""Operators that may be run again to make a value instead of holding it."""


class _Read(NamedTuple):
    """A tensor among the arguments of a step: the value, and how it lies on the tensor that stands for the value."""

    value: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the start of the tensor that stands for the value
    view: View | None  # where sizes and strides do not say it
    same: bool  # as that tensor itself


class Expected(NamedTuple):
    """What the pack hook compares a saved tensor with, and what it does with it."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements
    value: int
    is_dropped: bool
    is_shared: bool  # among several dropped tensors of the value
    source: int  # the argument of the call that this is, by its place among the tensors; -1 if it is none


class Step(NamedTuple):
    """One operator of a program."""

    node: Node
    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: tuple[tuple[Any, Any], ...]  # of the tensors among the arguments, as `_Read` or lists with such
    single: int  # the value that the operator returns as a tensor; -1 if it returns several
    made: tuple[tuple[int, int], ...]
    reads: tuple[int, ...]  # values, each once
    sources: tuple[int, ...]  # those of them that the program does not make
    scratch: tuple[int, ...]  # places of running statistics, of which it gets copies


def on_value(tensor: Tensor, read: _Read) -> Tensor:
    """Return the tensor that lies on a value as `read` says, given the tensor that stands for the value."""
    if read.same:
        return tensor
    if read.view is None:
        return tensor.as_strided(read.size, read.stride, tensor.storage_offset() + read.offset)
    view, itemsize = read.view, read.view.dtype.itemsize
    start = tensor.storage_offset() * tensor.itemsize + read.offset
    found = torch.empty(0, dtype=view.dtype, device=tensor.device)
    found.set_(tensor.untyped_storage(), start // itemsize, view.size, view.stride)
    found = found.conj() if view.conj else found
    return negative_view(found) if view.neg else found


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with the same strides, which functions may have noted in their forward."""
    if tensor.is_conj():
        return copy_of(tensor.conj()).conj()
    if tensor.is_neg():
        return negative_view(copy_of(negative_view(tensor)))
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    extent = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    extent = extent if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.size(), tensor.stride(), 0)


def _read(place: Place, stands: View) -> _Read | None:
    """Return how a place lies on the tensor that stands for its value; None if it reaches beyond that tensor."""
    view = place.view
    if view == stands:
        return _Read(place.value, view.size, view.stride, 0, None, True)
    if not all(view.size):
        return _Read(place.value, view.size, view.stride, 0, None, False)
    start, end = view.extent
    first, last = stands.extent
    if start < first or end > last:
        return None
    plain = view.dtype is stands.dtype and not (view.conj or view.neg or stands.conj or stands.neg)
    offset = view.offset - stands.offset
    if plain:
        return _Read(place.value, view.size, view.stride, offset // view.dtype.itemsize, None, False)
    return _Read(place.value, view.size, view.stride, offset, view, False)


@dataclass(slots=True, eq=False)
class Program:
    """What of a traced call is dropped at its end, and how it is made again.

    Parameters
    ----------
    trace : Trace
        The call.
    policy : Policy
        Which operators are not run again.
    min_bytes : int
        Smaller values stay.
    banned : collection of int
        Values that turned out not to be the same when they were made again.
    """

    trace: Trace
    policy: Policy
    min_bytes: int
    banned: Collection[int] = ()
    nodes: list[Node] = field(default_factory=list)  # of the trace, see [Note: twins]
    dropped: frozenset[int] = frozenset()  # values
    sources: dict[int, int | Weight | None] = field(default_factory=dict)  # values; None for one that autograd saves
    kept_at: dict[int, int] = field(default_factory=dict)  # by source: the entry from which it is taken
    steps: dict[int, Step] = field(default_factory=dict)  # by the place of the operator in the trace
    reads: dict[int, _Read] = field(default_factory=dict)  # by entry of a dropped value: how it lies on the value
    held: frozenset[int] = frozenset()
    basis: dict[int, tuple[int, ...]] = field(default_factory=dict)  # see [Note: counts]
    counts: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)  # by dropped value: its entries
    expected: list[Expected | None] = field(default_factory=list)  # by entry; None for weights and what is unknown
    weights: tuple[tuple[int, Weight], ...] = ()  # among the sources
    inputs: tuple[tuple[int, int], ...] = ()  # among the sources: their places among the tensors of the arguments
    # By segment and value, where several tensors of the segment need a cheap value: how many dropped values do.
    near: dict[tuple[int, int], int] = field(default_factory=dict)
    near_of: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)  # by dropped value: keys of `near`
    drops_at: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by entry: those dropped behind it
    stays: set[int] = field(default_factory=set)  # entries that turned out to be weights, or casts of such
    firsts: dict[int, int] = field(default_factory=dict)  # dropped values, by the entry that saves each first
    samples: dict[int, int] = field(default_factory=dict)  # those of them of which samples are compared
    dropped_bytes: int = 0
    _runs: dict[tuple[int, ...], list[tuple[Step, tuple[int, ...]]]] = field(default_factory=dict)
    _every_run: list[tuple[Step, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        trace = self.trace
        self.nodes = with_twins(trace, self.banned)
        stands = self._choose()
        needed = self._needed()
        for number in sorted(needed):
            self.steps[number] = self._step(self.nodes[number], stands)
        for number, entry in enumerate(trace.entries):
            if entry.value in self.dropped:
                read = _read(Place(entry.value, entry.view), stands[entry.value])  # type: ignore[arg-type]
                assert read is not None
                self.reads[number] = read
                self.pending[entry.value] = self.pending.get(entry.value, 0) + 1
        used = {value for step in self.steps.values() for value in step.reads}
        self.sources = {value: source for value, source in self.sources.items() if value in used}
        self.kept_at = {value: entry for value, entry in self.kept_at.items() if value in self.sources}
        self.weights = tuple((value, source) for value, source in self.sources.items() if type(source) is Weight)
        self.inputs = tuple((value, source) for value, source in self.sources.items() if type(source) is int)
        self.expected = list(map(self._expect, trace.entries))
        self._count()
        self._plan_drops()
        self.dropped_bytes = sum(trace.values[value].nbytes for value in self.dropped)
        first: dict[int, int] = {}
        makers = [(step.node, value) for step in self.steps.values() for _, value in step.made]
        ends = [value for _, value in makers if value in self.dropped and value not in used]
        ends = sorted(ends, key=lambda value: -trace.values[value].nbytes)[:SAMPLED]
        for number, entry in reversed([*enumerate(trace.entries)]):
            if entry.value in self.dropped:
                first[entry.value] = number
        self.firsts = {number: value for value, number in first.items()}
        self.samples = {first[value]: value for value in ends}

    # What is dropped

    def _choose(self) -> dict[int, View]:
        """Choose the values that are dropped; return how the tensor lies that stands for each value in the program."""
        trace, values = self.trace, self.trace.values
        saved: dict[int, list[int]] = {}
        for number, entry in enumerate(trace.entries):
            if entry.value != UNKNOWN:
                saved.setdefault(entry.value, []).append(number)
        stands: dict[int, View] = {}
        sources: dict[int, int | Weight | None] = {}
        for number, value in enumerate(values):
            if value.source is not None and value.view is not None:
                stands[number], sources[number] = value.view, value.source
        runs: set[int] = set()  # operators that may run again
        for number, value in enumerate(values):
            if number in sources:
                continue
            made = value.maker != UNKNOWN and number not in self.banned
            stays = made and number in saved and self.nodes[value.maker].name in self.policy.names
            if made and not stays and (value.maker in runs or self._may_run(self.nodes[value.maker], stands)):
                runs.add(value.maker)
                assert value.view is not None
                large = value.nbytes >= self.min_bytes or number not in saved
                if large and self._fits(number, saved.get(number, ()), value.view):
                    stands[number] = value.view
                    continue
            if number in saved:  # it stays, and programs may read it
                views = [(view, at) for at in saved[number] if (view := trace.entries[at].view) is not None]
                view, at = max(views, key=lambda each: each[0].covered)
                stands[number], sources[number], self.kept_at[number] = view, None, at
        self.sources = sources
        self.dropped = frozenset(number for number in saved if number in stands and number not in sources)
        return stands

    def _may_run(self, node: Node, stands: dict[int, View]) -> bool:
        if self.policy.keeps(node.operator, node.name):
            return False
        if any(value not in stands for value in node.reads):
            return False
        return all(_read(place, stands[place.value]) is not None for place in _places(node))

    def _fits(self, number: int, entries: Sequence[int], view: View) -> bool:
        places = (self.trace.entries[entry].view for entry in entries)
        return all(place is not None and _read(Place(number, place), view) is not None for place in places)

    def _needed(self) -> set[int]:
        """Return the operators that make the dropped values from the sources."""
        needed: set[int] = set()
        waiting = list(self.dropped)
        while waiting:
            value = waiting.pop()
            if value in self.sources:
                continue
            maker = self.trace.values[value].maker
            if maker not in needed:
                needed.add(maker)
                waiting += self.nodes[maker].reads
        return needed

    def _step(self, node: Node, stands: dict[int, View]) -> Step:
        args = [_with_reads(given, stands) for given in node.args]
        kwargs = {name: _with_reads(given, stands) for name, given in node.kwargs.items()}
        named = [*enumerate(args), *kwargs.items()]
        places = tuple((at, given) for at, given in named if isinstance(given, _Read) or _has_read(given))
        # A value may stay that an operator returns beside others.
        made = tuple((place, value) for place, value in node.made if value not in self.sources)
        function = isinstance(node.operator, FunctionCall)
        single = made[0][1] if not function and len(node.made) == 1 and made and returns_one(node.operator) else -1
        scratch = () if function else tuple(k for k in rules_of(node.operator).scratch if k < len(args))
        # Without the Python frame of `torch.ops`.
        call = getattr(node.operator, "_op", node.operator)
        reads = tuple(dict.fromkeys(node.reads))
        sources = tuple(value for value in reads if value in self.sources)
        return Step(node, call, args, kwargs, places, single, made, reads, sources, scratch)

    def _expect(self, entry: Entry) -> Expected | None:
        view, value = entry.view, entry.value
        if view is None:
            return None
        source = self.sources.get(value)
        same = type(source) is int and view == self.trace.values[value].view and not entry.by_function
        return Expected(
            view.dtype,
            view.size,
            view.stride,
            view.offset // view.dtype.itemsize,
            value,
            value in self.dropped,
            self.pending.get(value, 0) > 1,
            source if same else -1,  # type: ignore[arg-type]
        )

    # What is held, and until when

    def _count(self) -> None:
        held, costs = set[int](), dict[int, int]()
        below: dict[int, set[int]] = {}  # by value: the held values and sources from which cheap operators make it
        path: dict[int, set[int]] = {}  # by value: these operators
        for number in sorted(self.steps):
            step = self.steps[number]
            cost, found, steps = 1, set[int](), {number}
            for value in step.reads:
                if value in self.sources or value in held:
                    found.add(value)
                else:
                    cost += costs[value]
                    found |= below[value]
                    steps |= path[value]
            operator = step.node.operator
            known = operator not in COSTLY and not isinstance(operator, FunctionCall)
            expensive = cost > CHEAP or not known or getattr(operator, "namespace", "aten") != "aten"
            for _, value in step.made:
                costs[value], below[value], path[value] = cost, found, steps
                if expensive:
                    held.add(value)
        self.held = frozenset(held)
        self.basis = {value: tuple(below[value]) for value in {*self.dropped, *held}}
        for values in self.basis.values():
            for value in values:
                self.counts[value] = self.counts.get(value, 0) + 1
        for value in self.dropped & self.held:
            self.counts[value] = self.counts.get(value, 0) + 1  # until backward has read it
        self._count_near(path)

    def _count_near(self, path: dict[int, set[int]]) -> None:
        segments: dict[int, set[int]] = {}  # the dropped values of each
        for entry in self.trace.entries:
            if entry.value in self.dropped:
                segments.setdefault(entry.segment, set()).add(entry.value)
        keys: dict[int, list[tuple[int, int]]] = {value: [] for value in self.dropped}
        for segment, dropped in segments.items():
            made = [value for value in self.held if self.nodes[self.trace.values[value].maker].segment == segment]
            uses = dict.fromkeys(dropped, 1)
            for number in set[int]().union(*(path[value] for value in (*dropped, *made))):
                for value in self.steps[number].reads:
                    uses[value] = uses.get(value, 0) + 1
            for value, number in uses.items():
                if number > 1 and value not in self.held and value not in self.sources:
                    maker = self.trace.values[value].maker
                    readers = [each for each in dropped if each == value or maker in path[each]]
                    self.near[segment, value] = len(readers)
                    for reader in readers:
                        keys[reader].append((segment, value))
        self.near_of = {value: tuple(found) for value, found in keys.items()}

    def _plan_drops(self) -> None:
        """Decide behind which entries values are dropped: where a module inside has ended that saved much."""
        trace = self.trace
        total = sum(trace.values[value].nbytes for value in self.dropped)
        ready: dict[int, int] = {}  # by value: the entry behind which nothing of it is missing
        last = {entry.value: number for number, entry in enumerate(trace.entries) if entry.value in self.dropped}
        for value, number in last.items():
            ready[value] = max([number, *(self.kept_at.get(source, 0) for source in self._sources_of(value))])
        waiting = sorted(ready, key=ready.__getitem__)
        found: list[int] = []
        segments = [entry.segment for entry in trace.entries]
        for number in range(len(segments)):
            ends = number + 1 == len(segments) or segments[number + 1] != segments[number]
            if not ends:
                continue
            while waiting and ready[waiting[0]] <= number:
                found.append(waiting.pop(0))
            nbytes = sum(trace.values[value].nbytes for value in found)
            if found and number + 1 < len(segments) and nbytes >= total / PARTS:
                gone = set(found)
                self.drops_at[number] = tuple(k for k, entry in enumerate(trace.entries) if entry.value in gone)
                found = []

    def _sources_of(self, value: int) -> set[int]:
        found, waiting, seen = set[int](), [value], set[int]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.sources:
                found.add(value)
            else:
                waiting += self.nodes[self.trace.values[value].maker].reads
        return found

    # Running

    def run(self, step: Step, values: dict[int, Tensor]) -> None:
        """Run one operator on values, and add what it makes."""
        args, kwargs = step.args, step.kwargs
        if step.places:
            args = args.copy()
            kwargs = kwargs.copy() if kwargs else kwargs
            for at, read in step.places:
                if type(read) is _Read:
                    given: Any = values[read.value] if read.same else on_value(values[read.value], read)
                else:
                    given = _filled(read, values)
                if type(at) is int:
                    args[at] = given
                else:
                    kwargs[at] = given
            for at in step.scratch:
                if args[at] is not None:
                    args[at] = args[at].clone()  # [guard: running statistics are updated once]
        outputs = step.call(*args, **kwargs)
        if step.single != -1:
            values[step.single] = outputs
        elif isinstance(outputs, Tensor):
            for _, value in step.made:
                values[value] = outputs
        else:
            for place, value in step.made:
                values[value] = outputs[place]

    def every_run(self) -> list[tuple[Step, tuple[int, ...], tuple[int, ...]]]:
        """Return all operators in order, with the sources that each is the first to read, and what none needs later."""
        if not self._every_run:
            steps = [self.steps[number] for number in sorted(self.steps)]
            values = [dict.fromkeys((*(value for _, value in step.made), *step.reads)) for step in steps]
            last = {value: place for place, mentioned in enumerate(values) for value in mentioned}
            there: set[int] = set()
            for place, (step, mentioned) in enumerate(zip(steps, values, strict=True)):
                sources = tuple(value for value in step.sources if value not in there)
                unneeded = tuple(v for v in mentioned if last[v] == place and v not in self.dropped)
                self._every_run.append((step, sources, unneeded))
                there.update(sources)
        return self._every_run

    def to_run(self, target: int, present: Collection[int]) -> list[tuple[Step, tuple[int, ...]]]:
        """Return the operators that make a value from the sources and from the values that are present, in order.

        With each are the values that no later one needs.  Backwards of a program ask for the same each time.
        """
        key = target, *present
        found = self._runs.get(key)
        if found is None:
            if len(self._runs) > RUNS:
                self._runs.clear()
            found = self._runs[key] = []
            seen = {target}
            for number in reversed(self._find_run(target, present)):
                step = self.steps[number]
                mentioned = dict.fromkeys([*(value for _, value in step.made), *step.reads])
                found.append((step, tuple(value for value in mentioned if value not in seen)))
                seen.update(mentioned)
            found.reverse()
        return found

    def _find_run(self, target: int, present: Collection[int]) -> list[int]:
        found: set[int] = set()
        waiting = [target]
        makers, steps, sources = self.trace.values, self.steps, self.sources
        while waiting:
            value = waiting.pop()
            if value in present or value in sources:
                continue
            maker = makers[value].maker
            if maker not in found:
                found.add(maker)
                waiting += steps[maker].reads
        return sorted(found)


RUNS = 1024
"""Requests of backwards that a program remembers."""
SAMPLED = 2
"""Values of a call of which samples are compared, at most; all others are read to make these."""
PARTS = 8
"""Part of the dropped bytes for which it is worth dropping before the call ends."""


def _places(node: Node) -> list[Place]:
    found: list[Place] = []
    waiting = [*node.args, *node.kwargs.values()]
    while waiting:
        given = waiting.pop()
        if isinstance(given, Place):
            found.append(given)
        elif isinstance(given, list):
            waiting += given
    return found


def _has_place(given: Any) -> bool:
    return isinstance(given, list) and any(isinstance(each, Place) or _has_place(each) for each in given)


def _with_reads(given: Any, stands: Mapping[int, View]) -> Any:
    if isinstance(given, Place):
        return _read(given, stands[given.value])
    return [_with_reads(each, stands) for each in given] if _has_place(given) else given


def _has_read(given: Any) -> bool:
    return isinstance(given, list) and any(isinstance(each, _Read) or _has_read(each) for each in given)


def _filled(given: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(given, _Read):
        return on_value(values[given.value], given)
    return [_filled(each, values) for each in given] if isinstance(given, list) else given
