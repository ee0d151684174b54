"""Measure a step of a schedule: when computations and groups begin and end on the device, and how fast copies are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from ..device.base import Backend, StreamEvent, current_stream
from ..engine.statistics import Counters
from ..model.tuning.metering import Border, Meter
from ..schedule.pipeline import Computation, Step
from ..schedule.plan import When
from ..schedule.timeline import Kind

__all__ = ["GroupSeconds", "StepMeter"]


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
                median(of.get(k, none).seconds for of in found),
                median(of.get(k, none).gap for of in found),
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
