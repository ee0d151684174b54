"""The operators that make dropped values again, part by part, as backward needs them.

`[Note: parts]`  What one module directly inside of the group saves is a part; by a policy that `holds`, a call that
has ended is one.  Backward reads saved tensors in about the reverse of the order of saving.  The first read of a part
makes all of it, so the MLP of a block is made again, used and freed before its attention is.  On the way values of
other parts are made.  Of those, the ones that are expensive to make are *held* until no part is left that needs them:
results of matrix products, attention and functions, and what takes more than `CHEAP` operators.  All else is freed at
once, and made again with its own part.  A call that is one part runs each operator once, and takes more memory: an
eighth to a fourth for a block of a Llama.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


class _Read(NamedTuple):
    """A tensor among the arguments of a step: the value, and how it lies on the tensor that stands for the value."""

    value: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the start of the tensor that stands for the value
    same: bool  # as that tensor itself


class ExpectedTensor(NamedTuple):
    """What the pack hook compares a saved tensor with, and what it does with it."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements
    value: int
    is_dropped: bool
    is_shared: bool  # among several dropped tensors of the value
    is_source: bool  # taken from here
    place: int  # of the argument of the call that this is, among the tensors; -1 if it is none


class Step(NamedTuple):
    """One operator of a program."""

    number: int  # in the trace
    node: Node
    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: tuple[tuple[Any, Any], ...]  # of the tensors among the arguments, as `_Read` or lists with such
    made: tuple[tuple[int, int], ...]  # places among its outputs, and the values there
    reads: tuple[int, ...]  # values, each once
    sources: tuple[int, ...]  # those of them that the program does not make
    scratch: tuple[int, ...]  # places of running statistics, of which it gets copies


class Where(NamedTuple):
    """Which bits of a value are compared: some at equal distances, or all of them, in a sum."""

    whole: bool
    number: int  # of elements
    step: int
    offset: int
    bits: torch.dtype


class Drop(NamedTuple):
    """What is dropped at once: entries by segment, and entry and value of the bits that are compared."""

    parts: list[tuple[int, list[int]]]
    samples: list[tuple[int, int, Where]]
    sums: list[tuple[int, int, Where]]  # of all values


Line: TypeAlias = tuple[Step, tuple[int, ...], tuple[int, ...]]
"""A step, the sources that it is the first to read, and the values that nothing needs behind it."""


class Fill(NamedTuple):
    """How a part of a program is made."""

    run: list[Line]
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


def _read(place: Place, stands: View) -> _Read | None:
    """Return how a place lies on the tensor that stands for its value; None if it reaches beyond that tensor."""
    view = place.view
    offset, between = divmod(view.offset - stands.offset, view.dtype.itemsize)
    if view.conj or view.neg or between:
        return None
    if not all(view.size):
        offset = 0
    elif view.extent[0] < stands.extent[0] or view.extent[1] > stands.extent[1]:
        return None
    return _Read(place.value, view.dtype, view.size, view.stride, offset, view == stands)


def where(view: View, *, whole: bool) -> Where | None:
    """Return which bits of a value are compared; None for one with gaps, whose bits mean nothing there."""
    if view.conj or view.neg or view.dtype.itemsize not in INTEGERS or not view.dense:
        return None
    start, end = view.extent
    if view.covered != end - start:
        return None
    itemsize = view.dtype.itemsize
    elements = (end - start) // itemsize
    if whole:
        # As 64-bit integers, which are added without a copy of another type; up to seven bytes at the end are left out.
        count = elements * itemsize // 8 * 8 // itemsize
        return None if start % 8 or not count else Where(True, count, 1, start // itemsize, torch.int64)
    number, step = min(elements, ELEMENTS), max(elements // ELEMENTS, 1)
    return Where(False, number, step, start // itemsize, INTEGERS[itemsize])


def lines_of(steps: Sequence[Step], stays: Collection[int] = ()) -> list[Line]:
    """Return the lines for steps that run in this order, behind which some values stay."""
    mentioned = [{*step.reads, *(value for _, value in step.made)} for step in steps]
    last = {value: place for place, values in enumerate(mentioned) for value in values}
    there, lines = set[int](), []
    for place, (step, values) in enumerate(zip(steps, mentioned, strict=True)):
        fetched = tuple(value for value in step.sources if value not in there)
        there.update(fetched)
        lines.append((step, fetched, tuple(value for value in values if last[value] == place and value not in stays)))
    return lines


class Program:
    """What of a traced call is dropped at its end, and how it is made again.

    The operators that a policy keeps are not run again.  Values of fewer than `min_bytes` stay, and those that are
    `banned` because they turned out not to be the same when they were made again.  Where it may not `redraw`, results
    of operators that draw random numbers stay, too.
    """

    def __init__(
        self, trace: Trace, policy: Policy, min_bytes: int, banned: Collection[int] = (), *, redraw: bool = True
    ) -> None:
        self.trace, self.policy, self.min_bytes, self.banned = trace, policy, min_bytes, banned
        self.saves: dict[int, list[int]] = {}  # entries by value
        for number, entry in enumerate(trace.entries):
            if entry.value != UNKNOWN:
                self.saves.setdefault(entry.value, []).append(number)
        # Sources, by value: the place among the tensors of the call, the weight, or the entry that saves it.
        self.inputs: dict[int, int] = {}
        self.weights: dict[int, Weight] = {}
        self.kept: dict[int, int] = {}
        self.sources = set[int]()
        stands = self._choose(redraw)
        self.dropped = frozenset((self.saves.keys() & stands.keys()) - self.sources)
        needed, _ = self._makers(self.dropped, ())
        # By the place of the operator in the trace, in that order.
        self.steps = {number: self._step(number, stands) for number in sorted(needed)}
        self.redraws = any(step.node.drawn is not None for step in self.steps.values())
        used = {value for step in self.steps.values() for value in step.reads}
        self.sources &= used
        self.inputs = {value: place for value, place in self.inputs.items() if value in used}
        self.weights = {value: weight for value, weight in self.weights.items() if value in used}
        self.kept = {value: number for value, number in self.kept.items() if value in used}
        self.reads: dict[int, _Read] = {}  # by entry of a dropped value: how it lies on the value
        self.parts: dict[int, set[int]] = {}  # the dropped values of each
        for number, entry in enumerate(trace.entries):
            if entry.value in self.dropped:
                self.reads[number] = _read(Place(entry.value, entry.view), stands[entry.value])  # type: ignore[arg-type,assignment]
                self.parts.setdefault(entry.segment, set()).add(entry.value)
        self.expected = [self._expect(number, entry) for number, entry in enumerate(trace.entries)]  # None: unknown
        self.dropped_bytes = sum(trace.values[value].nbytes for value in self.dropped)
        self.held = self._find_held()  # see [Note: parts]
        # Nothing else is made from the values of which samples are compared.
        ends = sorted(self.dropped - used, key=lambda value: (-trace.values[value].nbytes, value))
        self._sampled = frozenset(ends[:SAMPLED])
        self.drops_at, self.last_drop = self._plan_drops()
        self._fills: dict[tuple[int, frozenset[int], frozenset[int]], Fill] = {}

    # What is dropped

    def _choose(self, redraw: bool) -> dict[int, View]:
        """Choose the sources; return how the tensor lies that stands for each value that is a source or can be made."""
        trace, values, saves = self.trace, self.trace.values, self.saves
        stands: dict[int, View] = {}
        for number, value in enumerate(values):
            if isinstance(value.source, int):
                self.inputs[number] = value.source
            elif value.source is not None:
                self.weights[number] = value.source
            if value.source is not None and value.view is not None:
                stands[number] = value.view
        self.sources = {*self.inputs, *self.weights}
        runs: set[int] = set()  # operators that may run again
        for number, value in enumerate(values):
            if number in self.sources:
                continue
            node = None if value.maker == UNKNOWN or number in self.banned else trace.nodes[value.maker]
            stays = node is not None and number in saves and node.name in self.policy.names
            if node is not None and not stays and (value.maker in runs or self._may_run(node, stands, redraw)):
                runs.add(value.maker)
                assert value.view is not None
                large = value.nbytes >= self.min_bytes or number not in saves
                places = [trace.entries[each].view for each in saves.get(number, ())]
                if large and all(place and _read(Place(number, place), value.view) for place in places):
                    stands[number] = value.view
                    continue
            if number in saves:  # it stays, and programs may read it
                views = [(view, at) for at in saves[number] if (view := trace.entries[at].view) is not None]
                stands[number], self.kept[number] = max(views, key=lambda each: each[0].covered)
                self.sources.add(number)
        return stands

    def _may_run(self, node: Node, stands: dict[int, View], redraw: bool) -> bool:
        if self.policy.keeps(node.operator, node.name) or (node.drawn is not None and not redraw):
            return False
        if any(value not in stands for value in node.reads):
            return False
        return all(_read(place, stands[place.value]) for place in leaves((node.args, node.kwargs), Place))

    def _step(self, number: int, stands: dict[int, View]) -> Step:
        node = self.trace.nodes[number]
        args = [_with_reads(given, stands) for given in node.args]
        kwargs = {name: _with_reads(given, stands) for name, given in node.kwargs.items()}
        named = [*enumerate(args), *kwargs.items()]
        places = tuple((at, given) for at, given in named if any(leaves(given, _Read)))
        # A value may stay that an operator returns beside others.
        made = tuple((place, value) for place, value in node.made if value not in self.sources)
        rules = None if isinstance(node.operator, FunctionCall) else rules_of(node.operator)  # which are cached
        scratch = tuple(place for place in rules.scratch if place < len(args)) if rules is not None else ()
        # Without the Python frame of `torch.ops`.
        call = getattr(node.operator, "_op", node.operator)
        reads = tuple(dict.fromkeys(node.reads))
        sources = tuple(value for value in reads if value in self.sources)
        return Step(number, node, call, args, kwargs, places, made, reads, sources, scratch)

    def _expect(self, number: int, entry: Entry) -> ExpectedTensor | None:
        view, value = entry.view, entry.value
        if view is None:
            return None
        same = value in self.inputs and view == self.trace.values[value].view and not entry.by_function
        return ExpectedTensor(
            view.dtype,
            view.size,
            view.stride,
            view.offset // view.dtype.itemsize,
            value,
            is_dropped=value in self.dropped,
            is_shared=value in self.dropped and len(self.saves[value]) > 1,
            is_source=self.kept.get(value) == number,
            place=self.inputs[value] if same else -1,
        )

    # Parts

    def _find_held(self) -> frozenset[int]:
        """Return the values that are expensive to make; see [Note: parts]."""
        held, costs = set[int](), dict[int, int]()
        for step in self.steps.values():
            cost = 1 + sum(costs[value] for value in step.reads if value not in self.sources and value not in held)
            operator = step.node.operator
            costly = operator in COSTLY or isinstance(operator, FunctionCall)
            expensive = cost > CHEAP or costly or getattr(operator, "namespace", "aten") != "aten"
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
            targets = self.dropped if part == WHOLE else self.parts[part]
            run, _ = self._makers(targets, present)
            steps = [self.steps[number] for number in sorted(run)]
            made = (value for step in steps for _, value in step.made)
            held = self.held.intersection((*present, *made))
            _, needed = self._makers((value for other in others for value in self.parts[other]), held)
            lines = lines_of(steps, {*targets, *needed})
            found = self._fills[part, present, others] = Fill(lines, frozenset(needed), frozenset(needed & held))
        return found

    def _makers(self, targets: Iterable[int], present: Collection[int]) -> tuple[set[int], set[int]]:
        """Return the operators that make values from sources and from values that are there, and which of these."""
        found, needed, waiting = set[int](), set[int](), list(targets)
        while waiting:
            value = waiting.pop()
            if value in present or value in self.sources:
                needed.add(value)
                continue
            maker = self.trace.values[value].maker
            if maker not in found:
                found.add(maker)
                waiting += self.trace.nodes[maker].reads
        return found, needed

    def runs(self) -> Counter[int]:
        """Return how often each operator runs if backward comes to the parts in reverse order."""
        present, others, found = frozenset[int](), set(self.parts), Counter[int]()
        for part in sorted(self.parts, reverse=True):
            others.remove(part)
            fill = self.fill(part, present, frozenset(others))
            found.update(step.number for step, _, _ in fill.run)
            present = fill.held
        return found

    def _drop(self, values: Collection[int]) -> Drop:
        parts: dict[int, list[int]] = {}
        for number in sorted(number for value in values for number in self.saves[value]):
            parts.setdefault(self.trace.entries[number].segment, []).append(number)
        samples = self._compared(self._sampled.intersection(values), whole=False)
        return Drop(list(parts.items()), samples, self._compared(values, whole=True))

    def _compared(self, values: Collection[int], *, whole: bool) -> list[tuple[int, int, Where]]:
        found = []
        for value in sorted(values):
            number = self.saves[value][0]
            view, saved = self.trace.values[value].view, self.trace.entries[number].view
            bits = where(view, whole=whole) if view and saved and view.dtype is saved.dtype else None
            if bits is not None:
                found.append((number, value, bits))
        return found

    def _plan_drops(self) -> tuple[dict[int, Drop], Drop]:
        """Return what is dropped behind entries with which a module inside ends that saved much, and at the end."""
        trace = self.trace
        ready: dict[int, int] = {}  # by value: the entry behind which nothing of it is missing
        for value in self.dropped:
            _, sources = self._makers((value,), ())
            ready[value] = max(self.saves[value][-1], *(self.kept.get(each, 0) for each in sources), 0)
        gone: set[int] = set()
        drops_at: dict[int, Drop] = {}
        for number, (segment, following) in enumerate(pairwise(entry.segment for entry in trace.entries)):
            if segment == following:
                continue
            dropped = {value for value, behind in ready.items() if behind <= number} - gone
            nbytes = sum(trace.values[value].nbytes for value in dropped)
            if dropped and nbytes >= self.dropped_bytes / PARTS:
                drops_at[number] = self._drop(dropped)
                gone |= dropped
        return drops_at, self._drop(self.dropped - gone)

    # Running

    def run(self, step: Step, values: dict[int, Tensor], beginning: RngPosition | None) -> None:
        """Run one operator on values, and add what it makes; `beginning` is that of the call if the operator draws."""
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
            for at in step.scratch:
                if args[at] is not None:
                    args[at] = args[at].clone()  # [guard: running statistics are updated once]
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


FILLS = 256
"""Requests of backwards that a program remembers."""
SAMPLED = 2
"""Values of a call of which samples are compared, at most; all others are read to make these."""
PARTS = 8
"""Part of the dropped bytes for which it is worth dropping before the call ends."""


def _with_reads(given: Any, stands: Mapping[int, View]) -> Any:
    if isinstance(given, Place):
        return _read(given, stands[given.value])
    has_place = isinstance(given, list) and any(leaves(given, Place))
    return [_with_reads(each, stands) for each in given] if has_place else given


def _filled(given: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(given, _Read):
        return on_value(values[given.value], given)
    return [_filled(each, values) for each in given] if isinstance(given, list) else given
