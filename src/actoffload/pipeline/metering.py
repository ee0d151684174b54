"""Measure a step of a schedule: when computations and groups begin and end, how fast copies are, and the costs.

`[Note: memory of a step]`  A peak that is compared with the saved tensors at their own peak counts twice what a plan
counts by itself.  So memory is read where groups and computations begin and end.  What is allocated inside of a group
alone is temporary, as in `model.tuning`.  From what is allocated at such a border go the saved tensors, the boundaries
of the microbatches in flight, and the gradients of stages that had a backward; the rest is there in the whole step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from ..device.base import Backend, StreamEvent, current_stream
from ..engine.passes import ModelPass
from ..engine.statistics import Counters
from ..model.tuning.metering import Border, Meter
from ..schedule.costs import LayerCost, Saved
from ..schedule.pipeline import Computation, SplitCost, StageCost, Step
from ..schedule.plan import When
from ..schedule.timeline import Kind
from .conductor import Learned

__all__ = ["GroupSeconds", "Standing", "StepMeter", "even_costs", "kept_outputs", "measured_costs", "with_temporaries"]


class GroupSeconds(NamedTuple):
    """Seconds of one group in one computation, and of the gap before it."""

    seconds: float
    gap: float


class _Mark(NamedTuple):
    when: When | None  # None for the computation
    place: int  # of the group; 0 for the begin of the computation and 1 for its end
    event: StreamEvent


@dataclass(frozen=True)
class Standing:
    """Bytes of a stage that a plan counts by itself."""

    boundary: int  # of each microbatch, from its forward to its last backward
    output: int  # of each microbatch, from its forward on
    gradients: int  # of weights of its groups, from its first backward on


class StepMeter(Meter):
    """Records the copies of a step, the events of its computations, and the memory at them.

    It is installed as the recorder of the engine; `note` is called by the conductor.

    Parameters
    ----------
    standing : mapping of int to Standing, optional
        By stage; memory is read only if it is given, which takes time of the host.
    """

    keeps_busy = False  # other ranks would wait

    def __init__(self, backend: Backend, counters: Counters, standing: Mapping[int, Standing] | None = None) -> None:
        super().__init__(backend, counters, memory=bool(standing))
        self._standing = standing or {}
        self._in_flight, self._forwards, self._with_gradients = Counter[int](), Counter[int](), set[int]()
        self.other_bytes = 0
        self._group: tuple[Hashable, Kind, int] | None = None  # the group whose end comes next
        self._settled = True  # no gradients are being allocated
        # By stage, kind and group: bytes allocated for a time in the gap before it (False), and in it.
        self.temporaries: dict[tuple[Hashable, Kind, int, bool], int] = defaultdict(int)
        begun = backend.record_timed(current_stream(backend))
        self.borders.append(Border(Kind.FORWARD, -1, False, begun, backend.host_time()))
        self._marks: dict[Step, list[_Mark]] = defaultdict(list)
        self._ended: StreamEvent | None = None

    def end(self) -> None:
        """Note the end of the step."""
        self._ended = self._backend.record_timed(current_stream(self._backend))

    def seconds(self) -> float:
        """Return how long the whole step took, with all that it waited for."""
        assert self._ended is not None
        return self._backend.elapsed(self.borders[0].event, self._ended)

    def note(self, step: Step, when: When | None, index: int) -> None:
        """Note an event of a computation, or of a group in it."""
        event = self._backend.record_timed(current_stream(self._backend))
        self._marks[step].append(_Mark(when, index, event))
        if when is None and self._standing:
            self._begin_or_end(step, ends=bool(index))

    def _begin_or_end(self, step: Step, *, ends: bool) -> None:
        """Note the memory where a computation begins or ends."""
        begins = step.computation is Computation.FORWARD and not ends
        self._in_flight[step.stage] += begins
        self._forwards[step.stage] += begins
        weights = step.computation in (Computation.BACKWARD, Computation.BACKWARD_WEIGHT)
        if weights and ends:
            self._with_gradients.add(step.stage)
        self._settled = ends or not weights or step.stage in self._with_gradients
        self.level()
        self._in_flight[step.stage] -= weights and ends

    def level(self) -> None:
        """Note the memory between groups, and what of it is there in the whole step."""
        super().level()
        if self._standing and self._between and self._settled:
            standing = sum(
                self._in_flight[stage] * each.boundary
                + self._forwards[stage] * each.output
                + each.gradients * (stage in self._with_gradients)
                for stage, each in self._standing.items()
            )
            other = self._allocated - self._counters.resident_bytes - standing
            self.other_bytes = max(self.other_bytes, other)

    def begin(self, owner: object, kind: Kind, layer: int) -> None:
        """Note the memory where a group begins; its time is that of `note`."""
        self._border(owner, kind, layer, ends=False)

    def finish(self, owner: object, kind: Kind, layer: int) -> None:
        """Note the memory where a group ends; its time is that of `note`."""
        self._border(owner, kind, layer, ends=True)

    def _border(self, owner: object, kind: Kind, layer: int, *, ends: bool) -> None:
        if not self._standing or not isinstance(owner, ModelPass) or owner.model not in self._standing:
            return
        group = owner.model, kind, layer
        if ends and group != self._group:  # it ended where the next one began
            return
        self._take_memory()
        self.temporaries[(*group, ends)] = max(self.temporaries[(*group, ends)], self._temporary)
        self._group, self._between, self._temporary = None if ends else group, ends, 0

    def passed(self) -> bool:
        """Return whether the device has passed all marks and copies."""
        ended = self._ended is None or self._backend.passed(self._ended)
        marks = (mark.event for marks in self._marks.values() for mark in marks)
        return ended and super().passed() and all(map(self._backend.passed, marks))

    def wait(self) -> None:
        """Wait until the device has passed all marks and copies."""
        if not self.passed():
            self._backend.synchronize(self._backend.current_device())

    def computations(self, stage: int, computation: Computation) -> float | None:
        """Return the median seconds of a computation of a stage, without stalls; None if the step had none."""
        found = [
            self._seconds(marks[0], marks[-1])
            for step, marks in self._marks.items()
            if step.stage == stage and step.computation is computation and len(marks) > 1
        ]
        return median(found) if found else None

    def groups(self, stage: int, computation: Computation, count: int) -> list[GroupSeconds] | None:
        """Return the median seconds of each group in a computation of a stage; None if the step had none of it.

        A group that backward never comes to, because nothing in it needs a gradient of its own, has no time of its own.
        Where no group was seen, each has the same part of the computation.
        """
        read = self._forward if computation is Computation.FORWARD else self._backward
        steps = [
            marks
            for step, marks in self._marks.items()
            if step.stage == stage and step.computation is computation and len(marks) > 1
        ]
        if not steps:
            return None
        found = [spans for marks in steps if (spans := read(marks))]
        if not found:
            whole = median(self._seconds(marks[0], marks[-1]) for marks in steps)
            return [GroupSeconds(whole / count, 0.0)] * count
        none = GroupSeconds(0.0, 0.0)
        return [
            GroupSeconds(
                median(spans.get(k, none).seconds for spans in found),
                median(spans.get(k, none).gap for spans in found),
            )
            for k in range(count)
        ]

    def _forward(self, marks: list[_Mark]) -> dict[int, GroupSeconds]:
        """Return the spans of the groups in a forward, by their place."""
        spans, before = {}, marks[0]
        starts = {mark.place: mark for mark in marks if mark.when is When.FORWARD_START}
        for end in (mark for mark in marks if mark.when is When.FORWARD_END and mark.place in starts):
            start = starts[end.place]
            spans[end.place] = GroupSeconds(self._seconds(start, end), self._seconds(before, start))
            before = end
        return spans

    def _backward(self, marks: list[_Mark]) -> dict[int, GroupSeconds]:
        """Return the spans of the groups in a backward, by their place: each until the next one begins."""
        starts = [mark for mark in marks if mark.when is When.BACKWARD_START]
        ends = [*starts[1:], marks[-1]][: len(starts)]
        return {
            start.place: GroupSeconds(self._seconds(start, end), self._seconds(marks[0], start) if not k else 0.0)
            for k, (start, end) in enumerate(zip(starts, ends, strict=True))
        }

    def _seconds(self, start: _Mark, end: _Mark) -> float:
        """Return the seconds from one mark to another without those in which compute stalled."""
        elapsed, first = self._backend.elapsed, self.borders[0].event
        at, until = elapsed(first, start.event), elapsed(first, end.event)
        stalled = self._stalled_until()
        return max(until - stalled(until) - at + stalled(at), 0.0)

    def _stalled_until(self) -> Callable[[float], float]:
        if self._stalled is None:
            self._stalled = self._stalls()
        return self._stalled

    _stalled: Callable[[float], float] | None = None


# Costs


def kept_outputs(stage: int, learned: Learned) -> tuple[int, int]:
    """Return the bytes of outputs that a stage keeps of a microbatch until its last backward, and until the step ends.

    Those that are saved do not count.
    """
    nbytes = learned.boundary.get(stage, 0)
    return (0, nbytes) if learned.returns.get(stage, False) else (nbytes, 0)


def even_costs(
    stage: int,
    saved: Sequence[Sequence[tuple[int, int]]],
    learned: Learned,
    outside: int = 0,
    other_bytes: int = 0,
    gradients: Sequence[int] = (),
) -> StageCost:
    """Return the cost of a stage, with the same times for all groups.

    `saved` has for each group the place and the bytes of each storage that it saves; a microbatch saves `outside` bytes
    in no group, `other_bytes` are always on the device, and `gradients` are those of each group.
    """
    groups, splits = [], []
    for k, storages in enumerate(saved):
        groups.append(LayerCost(1.0, 2.0, _evenly([nbytes for _, nbytes in storages])))
        used = learned.used.get((stage, k), frozenset())
        kept = sum(nbytes for place, nbytes in storages if place in used)
        splits.append(SplitCost(1.0, 1.0, kept))
    # The first stage has no inputs of which to compute gradients.  Another may have run nothing in the latest step.
    late = {step.stage for step in learned.order if step.computation is Computation.BACKWARD_INPUT}
    split = learned.split.get(stage, False) or (stage > 0 and stage in late)
    sent = learned.sent.get(stage, 0)
    boundary, output = kept_outputs(stage, learned)
    return StageCost(
        tuple(groups),
        tuple(splits) if split else (),
        boundary + outside,
        sent_forward=sent,
        sent_backward=learned.sent.get(stage - 1, sent),
        other_bytes=other_bytes,
        output_bytes=output,
        gradient_bytes=tuple(gradients),
    )


def with_temporaries(stage: int, cost: StageCost, meter: StepMeter) -> StageCost:
    """Return the cost of a stage with the memory that a step allocated for a time in its groups and before them."""
    groups = tuple(
        replace(
            group,
            forward_temporary=meter.temporaries[stage, Kind.FORWARD, k, True],
            gap_forward_temporary=meter.temporaries[stage, Kind.FORWARD, k, False],
            backward_temporary=meter.temporaries[stage, Kind.BACKWARD, k, True],
            gap_backward_temporary=meter.temporaries[stage, Kind.BACKWARD, k, False],
        )
        for k, group in enumerate(cost.groups)
    )
    return replace(cost, groups=groups)


def measured_costs(stage: int, even: StageCost, meter: StepMeter) -> StageCost:
    """Return the cost of a stage with the times of a step; what the step did not show stays as in `even`."""
    count = len(even.groups)
    forward = meter.groups(stage, Computation.FORWARD, count)
    halves = meter.groups(stage, Computation.BACKWARD_INPUT, count)
    backward = meter.groups(stage, Computation.BACKWARD, count)
    weight = meter.computations(stage, Computation.BACKWARD_WEIGHT)
    if backward is None and not even.splits:  # the weight backward is the full one
        backward = meter.groups(stage, Computation.BACKWARD_WEIGHT, count)
    if forward is None or (backward is None and halves is None):
        return even
    whole = sum(half.seconds for half in halves) if halves else 0.0
    splits = []
    for k, split in enumerate(even.splits):
        if halves is not None and weight is not None:
            part = halves[k].seconds / whole if whole else 1 / count
            split = replace(split, input_seconds=halves[k].seconds, weight_seconds=weight * part)
        elif backward is not None:
            split = replace(split, input_seconds=backward[k].seconds / 2, weight_seconds=backward[k].seconds / 2)
        splits.append(split)
    groups = []
    for k, group in enumerate(even.groups):
        seconds = backward[k].seconds if backward else splits[k].input_seconds + splits[k].weight_seconds
        gap = (backward or halves or forward)[k].gap
        groups.append(
            replace(
                group,
                forward=forward[k].seconds,
                gap_forward=forward[k].gap,
                backward=seconds,
                gap_backward=gap,
            )
        )
    return replace(even, groups=tuple(groups), splits=tuple(splits))


def _evenly(sizes: Sequence[int]) -> tuple[Saved, ...]:
    """Return storages that are saved at equal distances, and needed in reverse order."""
    count = len(sizes)
    return tuple(Saved(nbytes, (k + 1) / count, (count - 1 - k) / count) for k, nbytes in enumerate(sizes) if nbytes)
