"""Measure a step of a schedule: when computations and groups begin and end, how fast copies are, and the costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from ..device.base import Backend, StreamEvent, current_stream
from ..engine.statistics import Counters
from ..model.tuning.metering import Border, Meter
from ..schedule.costs import LayerCost, Saved
from ..schedule.pipeline import Computation, SplitCost, StageCost, Step
from ..schedule.plan import When
from ..schedule.timeline import Kind
from .conductor import Learned

__all__ = ["GroupSeconds", "StepMeter", "even_costs", "measured_costs"]


class GroupSeconds(NamedTuple):
    """Seconds of one group in one computation, and of the gap before it."""

    seconds: float
    gap: float


class _Mark(NamedTuple):
    when: When | None  # None for the computation
    place: int  # of the group; 0 for the begin of the computation and 1 for its end
    event: StreamEvent


class StepMeter(Meter):
    """Records the copies of a step, and the events of its computations.

    It is installed as the recorder of the engine; `note` is called by the conductor.
    """

    keeps_busy = False  # other ranks would wait

    def __init__(self, backend: Backend, counters: Counters) -> None:
        super().__init__(backend, counters, memory=False)
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

    def begin(self, owner: object, kind: Kind, layer: int) -> None:
        """Do nothing: `note` is called at the same events."""

    def finish(self, owner: object, kind: Kind, layer: int) -> None:
        """Do nothing: `note` is called at the same events."""

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


def even_costs(
    stage: int, saved: Sequence[Sequence[tuple[int, int]]], learned: Learned, outside: int = 0, other_bytes: int = 0
) -> StageCost:
    """Return the cost of a stage, with the same times for all groups.

    `saved` has for each group the place and the bytes of each storage that it saves; a microbatch saves `outside` bytes
    in no group, and `other_bytes` are always on the device.
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
    return StageCost(
        tuple(groups),
        tuple(splits) if split else (),
        learned.boundary.get(stage, 0) + outside,
        sent_forward=sent,
        sent_backward=learned.sent.get(stage - 1, sent),
        other_bytes=other_bytes,
    )


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
