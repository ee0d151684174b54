"""The operators that make dropped values again, part by part, as backward needs them.

`[Note: parts]`  What one module directly inside of the group saves is a part; by a policy that `holds`, a call that
has ended is one.  The first read of a part makes all of it, so the MLP of a block is made again, used and freed before
its attention is.  Values of other parts that are made on the way are freed at once, and made again with their own part.
Only those that are expensive to make are *held* until no part is left that needs them: results of matrix products,
attention and functions, and what takes more than `CHEAP` operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._torch.tensors import leaves
from ..engine.layout import View
from .policy import COSTLY, Policy, rules_of
from .trace import UNKNOWN, Entry, FunctionCall, Node, Place, RngPosition, Trace, Weight

ELEMENTS = 64  # of a sample
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WHOLE = -1  # the part that is all of a call
CHEAP = 4
"""Operators that may be run once more to make a value instead of holding it."""
FILLS = 256
"""Requests of backwards that a program remembers."""
SAMPLED = 2
"""Values of a call of which samples are compared, at most; all others are read to make these."""
PARTS = 8
"""Part of the dropped bytes for which it is worth dropping before the call ends."""


class _Read(NamedTuple):
    """How a tensor lies on the tensor that stands for its value."""

    value: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the start of the tensor that stands for the value
    same: bool  # as that tensor itself
    copied: bool = False  # the operator gets a copy


class ExpectedTensor(NamedTuple):
    """What the pack hook compares a saved tensor with, and what it does with it."""

    dtype: torch.dtype | None  # None: nothing is known of it
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements; -1 if it is not dropped
    value: int
    first: int  # the entry that is dropped with it and lies on the same storage, or -1
    is_source: bool  # taken from here
    place: int  # of the argument of the call that this is, among the tensors; -1 if it is none
    drop: Drop | None  # what is dropped behind it


class Step(NamedTuple):
    """One operator of a program."""

    node: Node
    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: list[tuple[Any, Any]]  # of the tensors among the arguments, as `_Read` or lists with such
    made: list[tuple[int, int]]  # places among its outputs, and the values there


class Where(NamedTuple):
    """Which bits of a value are compared: some at equal distances, or all of them, in a sum."""

    layout: tuple[tuple[int], tuple[int], int]  # size, stride and offset, in elements of the value
    bits: torch.dtype
    summed: bool


class Drop(NamedTuple):
    """What is dropped at once: entries, and for some of them value and bits that are compared."""

    entries: list[int]
    samples: list[tuple[int, int, Where]]
    sums: list[tuple[int, int, Where]]  # of all values
    drawn: int  # random numbers of the call before


Line: TypeAlias = tuple[Step, list[int], list[int]]
"""A step, the sources that it is the first to read, and the values that nothing needs behind it."""


class Fill(NamedTuple):
    """How a part of a program is made."""

    lines: list[Line]
    needed: frozenset[int]  # sources that other parts need, and values
    held: frozenset[int]  # these values


def on_value(tensor: Tensor, read: _Read) -> Tensor:
    """Return the tensor that lies on a value as `read` says, given the tensor that stands for the value."""
    if read.same:
        return tensor
    if read.dtype is tensor.dtype:
        return tensor.as_strided(read.size, read.stride, tensor.storage_offset() + read.offset)
    start = tensor.storage_offset() * tensor.itemsize // read.dtype.itemsize + read.offset
    found = torch.empty(0, dtype=read.dtype, device=tensor.device)
    return found.set_(tensor.untyped_storage(), start, read.size, read.stride)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with the same strides, which functions may have noted in their forward."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    extent = extent if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.size(), tensor.stride(), 0)


def _read(value: int, view: View, stands: View) -> _Read | None:
    """Return how a view lies on the tensor that stands for its value; None if it reaches beyond that tensor."""
    offset, between = divmod(view.offset - stands.offset, view.dtype.itemsize)
    if view.conj or view.neg or between:
        return None
    if not all(view.size):
        offset = 0
    elif view.extent[0] < stands.extent[0] or view.extent[1] > stands.extent[1]:
        return None
    return _Read(value, view.dtype, view.size, view.stride, offset, view == stands)


def _where(view: View, *, summed: bool) -> Where | None:
    """Return which bits of a value are compared; None for one with gaps, whose bits mean nothing there."""
    start, end = view.extent
    itemsize = view.dtype.itemsize
    if not view.dense or view.conj or view.neg or itemsize not in INTEGERS or (summed and start % 8):
        return None
    elements = (end - start) // itemsize
    if summed:
        # As 64-bit integers, which are added without a copy of another type; up to seven bytes at the end are left out.
        count = elements * itemsize // 8 * 8 // itemsize
        return Where(((count,), (1,), start // itemsize), torch.int64, summed) if count else None
    step = max(elements // ELEMENTS, 1)
    return Where(((min(elements, ELEMENTS),), (step,), start // itemsize), INTEGERS[itemsize], summed)


class Program:
    """What of a traced call is dropped at its end, and how it is made again.

    The operators that a policy keeps are not run again.  Values of fewer than `min_bytes` stay, and those that are
    `banned` because they turned out not to be the same when they were made again.
    """

    def __init__(self, trace: Trace, policy: Policy, min_bytes: int, banned: Collection[int] = ()) -> None:
        self.trace, self.policy, self.min_bytes, self.banned = trace, policy, min_bytes, banned
        self.saves: dict[int, list[int]] = {}  # entries by value
        for number, entry in enumerate(trace.entries):
            if entry.value != UNKNOWN:
                self.saves.setdefault(entry.value, []).append(number)
        stands, kept = self._choose()
        # Values that operators can make.
        self._makes = {value for value in stands.keys() - kept.keys() if isinstance(trace.values[value].origin, Node)}
        self.dropped = frozenset(self.saves.keys() & self._makes)
        needed, _ = self._makers(self.dropped, ())
        self.steps = {node: self._step(node, stands) for node in trace.nodes if node in needed}
        self.redraws = any(node.drawn is not None for node in self.steps)
        used = sorted({value for node in self.steps for value in node.reads})
        # Sources, by value: the place among the tensors of the call, the weight, or the entry that saves it.
        origins = {value: trace.values[value].origin for value in used}
        self.inputs = {value: origin for value, origin in origins.items() if isinstance(origin, int)}
        self.weights = {value: origin for value, origin in origins.items() if isinstance(origin, Weight)}
        self.kept = {value: kept[value] for value in used if value in kept}
        self.sources = {*self.inputs, *self.weights, *self.kept}
        self.reads: dict[int, _Read] = {}  # by entry of a dropped value: how it lies on the value
        self.parts: dict[int, list[int]] = {}  # the entries of dropped values in each
        for number, entry in enumerate(trace.entries):
            if entry.value in self.dropped:
                self.reads[number] = _read(entry.value, entry.view, stands[entry.value])  # type: ignore[arg-type,assignment]
                self.parts.setdefault(entry.segment, []).append(number)
        self.dropped_bytes = sum(trace.values[value].nbytes for value in self.dropped)
        self.held = self._find_held()  # see [Note: parts]
        # Nothing else is made from the values of which samples are compared.
        ends = sorted(self.dropped.difference(used), key=lambda value: (-trace.values[value].nbytes, value))
        self._sampled = frozenset(ends[:SAMPLED])
        drops, self.last_drop = self._plan_drops()
        self.expected = [self._expect(number, entry, drops.get(number)) for number, entry in enumerate(trace.entries)]
        self._fills: dict[tuple[int, frozenset[int], frozenset[int]], Fill] = {}

    # What is dropped

    def _choose(self) -> tuple[dict[int, View], dict[int, int]]:
        """Return how the tensor lies that stands for each known value, and the entries of those that stay."""
        stands: dict[int, View] = {}
        kept: dict[int, int] = {}
        runs: set[Node] = set()  # operators that may run again
        for number, value in enumerate(self.trace.values):
            node, view, saves = value.origin, value.view, self.saves.get(number, ())
            places = [place for each in saves if (place := self.trace.entries[each].view) is not None]
            if isinstance(node, Node):
                stays = number in self.banned or (saves and node.name in self.policy.names)
                if not stays and (node in runs or self._may_run(node, stands)):
                    runs.add(node)
                    assert view is not None
                    large = value.nbytes >= self.min_bytes or not saves
                    if large and all(_read(number, place, view) for place in places):
                        stands[number] = view
                        continue
            elif node is not None and view is not None:
                stands[number] = view
                continue
            if saves:  # it stays, and programs may read it
                stands[number], kept[number] = max(zip(places, saves, strict=True), key=lambda each: each[0].covered)
        return stands, kept

    def _may_run(self, node: Node, stands: Mapping[int, View]) -> bool:
        if self.policy.keeps(node) or any(value not in stands for value in node.reads):
            return False
        places = leaves((node.args, node.kwargs), Place)
        return all(_read(place.value, place.view, stands[place.value]) for place in places)

    def _step(self, node: Node, stands: Mapping[int, View]) -> Step:
        scratch = (node.operator if isinstance(node.operator, FunctionCall) else rules_of(node.operator)).scratch
        args = [_with_reads(given, stands, copied=place in scratch) for place, given in enumerate(node.args)]
        kwargs = {name: _with_reads(given, stands) for name, given in node.kwargs.items()}
        named = [*enumerate(args), *kwargs.items()]
        places = [(at, given) for at, given in named if any(leaves(given, _Read))]
        # A value may stay that an operator returns beside others.
        made = [(place, value) for place, value in node.made if value in self._makes]
        # Without the Python frame of `torch.ops`.
        return Step(node, getattr(node.operator, "_op", node.operator), args, kwargs, places, made)

    def _expect(self, number: int, entry: Entry, drop: Drop | None) -> ExpectedTensor:
        view, value = entry.view, entry.value
        if view is None:
            return ExpectedTensor(None, torch.Size(), (), -1, value, -1, False, -1, drop)
        is_dropped, is_source = value in self.dropped, self.kept.get(value) == number
        same = value in self.inputs and view == self.trace.values[value].view and not entry.by_function
        offset = view.offset // view.dtype.itemsize if is_dropped else -1
        first = self.saves[value][0] if is_dropped and self.saves[value][0] != number else -1
        place = self.inputs[value] if same else -1
        return ExpectedTensor(view.dtype, view.size, view.stride, offset, value, first, is_source, place, drop)

    # Parts

    def _find_held(self) -> frozenset[int]:
        """Return the values that are expensive to make; see [Note: parts]."""
        held, costs = set[int](), dict[int, int]()
        for node, step in self.steps.items():
            cost = 1 + sum(costs[value] for value in node.reads if value in costs and value not in held)
            costly = node.operator in COSTLY or isinstance(node.operator, FunctionCall)
            expensive = cost > CHEAP or costly or getattr(node.operator, "namespace", "aten") != "aten"
            for _, value in step.made:
                costs[value] = cost
                if expensive:
                    held.add(value)
        return frozenset(held)

    def fill(self, part: int, present: frozenset[int], others: frozenset[int]) -> Fill:
        """Return how a part is made, if some values are there, and other parts are still to be made."""
        found = self._fills.get((part, present, others))
        if found is None:
            if len(self._fills) > FILLS:
                self._fills.clear()
            targets = self._values(self.reads if part == WHOLE else self.parts[part])
            run, _ = self._makers(targets, present)
            steps = [step for node, step in self.steps.items() if node in run]
            held = self.held.intersection((*present, *(value for step in steps for _, value in step.made)))
            _, needed = self._makers(self._values(each for other in others for each in self.parts[other]), held)
            lines = self.lines(steps, targets | needed)
            found = self._fills[part, present, others] = Fill(lines, frozenset(needed), frozenset(needed & held))
        return found

    def _values(self, entries: Iterable[int]) -> set[int]:
        return {self.trace.entries[number].value for number in entries}

    def _makers(self, targets: Iterable[int], present: Collection[int]) -> tuple[set[Node], set[int]]:
        """Return the operators that make values from sources and from values that are there, and which of these."""
        found, needed, waiting = set[Node](), set[int](), list(targets)
        while waiting:
            value = waiting.pop()
            node = self.trace.values[value].origin
            if value in present or value not in self._makes:
                needed.add(value)
            elif isinstance(node, Node) and node not in found:
                found.add(node)
                waiting += node.reads
        return found, needed

    def lines(self, steps: Collection[Step], stays: Collection[int] = ()) -> list[Line]:
        """Return the lines for steps that run in this order, behind which some values stay."""
        mentioned = [{*step.node.reads, *(value for _, value in step.made)} for step in steps]
        last = {value: place for place, values in enumerate(mentioned) for value in values}
        there, lines = set[int](), []
        for place, (step, values) in enumerate(zip(steps, mentioned, strict=True)):
            fetched = [value for value in step.node.reads if value in self.sources and value not in there]
            there.update(fetched)
            lines.append((step, fetched, [each for each in values if last[each] == place and each not in stays]))
        return lines

    def runs(self) -> Counter[Node]:
        """Return how often each operator runs if backward comes to the parts in reverse order."""
        present, others, found = frozenset[int](), set(self.parts), Counter[Node]()
        for part in sorted(self.parts, reverse=True):
            others.remove(part)
            fill = self.fill(part, present, frozenset(others))
            found.update(step.node for step, _, _ in fill.lines)
            present = fill.held
        return found

    def _drop(self, values: Collection[int], drawn: int) -> Drop:
        entries = sorted(number for value in values for number in self.saves[value])
        samples: list[tuple[int, int, Where]] = []
        sums: list[tuple[int, int, Where]] = []
        for value in sorted(values):
            number = self.saves[value][0]
            view, saved = self.trace.values[value].view, self.trace.entries[number].view
            if view is None or saved is None or view.dtype is not saved.dtype:
                continue
            if value in self._sampled and (bits := _where(view, summed=False)):
                samples.append((number, value, bits))
            if bits := _where(view, summed=True):
                sums.append((number, value, bits))
        return Drop(entries, samples, sums, drawn)

    def _plan_drops(self) -> tuple[dict[int, Drop], Drop]:
        """Return what is dropped behind entries with which a module inside ends that saved much, and at the end."""
        trace = self.trace
        ready: dict[int, int] = {}  # by value: the entry behind which nothing of it is missing
        for value in self.dropped:
            _, sources = self._makers((value,), ())
            ready[value] = max(self.saves[value][-1], *(self.kept.get(each, 0) for each in sources), 0)
        gone: set[int] = set()
        drops_at: dict[int, Drop] = {}
        for number, (entry, following) in enumerate(pairwise(trace.entries)):
            dropped = {value for value, behind in ready.items() if behind <= number} - gone
            nbytes = sum(trace.values[value].nbytes for value in dropped)
            if entry.segment != following.segment and dropped and nbytes >= self.dropped_bytes / PARTS:
                drops_at[number] = self._drop(dropped, entry.drawn)
                gone |= dropped
        return drops_at, self._drop(self.dropped - gone, trace.drawn)


# Running


def run(
    lines: Iterable[Line], source: Callable[[int], Tensor], values: dict[int, Tensor], beginning: RngPosition | None
) -> Iterator[Step]:
    """Run lines on values; yield each step that has run, before what nothing needs any more is removed.

    `source` returns the tensor of a source; `beginning` is that of the call if the program draws random numbers.
    """
    for step, sources, unneeded in lines:
        for value in sources:
            values[value] = source(value)
        run_step(step, values, beginning)
        yield step
        for value in unneeded:
            del values[value]


def run_step(step: Step, values: dict[int, Tensor], beginning: RngPosition | None) -> None:
    """Run one operator on values, and add what it makes."""
    args, kwargs = step.args, step.kwargs
    if step.places:
        args = args.copy()
        kwargs = kwargs.copy() if kwargs else kwargs
        for at, read in step.places:
            given = values[read.value] if type(read) is _Read and read.same else _filled(read, values)
            if type(at) is int:
                args[at] = given
            else:
                kwargs[at] = given
    if step.node.drawn is None:
        outputs = step.call(*args, **kwargs)
    else:
        assert beginning is not None
        with beginning.draw_from(step.node.drawn):
            outputs = step.call(*args, **kwargs)
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    for place, value in step.made:
        values[value] = outputs[place]


def _with_reads(given: Any, stands: Mapping[int, View], *, copied: bool = False) -> Any:
    if isinstance(given, Place):
        read = _read(given.value, given.view, stands[given.value])
        if copied and read is not None:  # [guard: running statistics are updated once]
            read = read._replace(same=False, copied=True)
        return read
    has_place = isinstance(given, list) and any(leaves(given, Place))
    return [_with_reads(each, stands) for each in given] if has_place else given


def _filled(given: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(given, _Read):
        tensor = on_value(values[given.value], given)
        return tensor.clone() if given.copied else tensor
    return [_filled(each, values) for each in given] if isinstance(given, list) else given
