"""The run of one rank of a simulated pipeline: its clocks, its memory and the copies of its chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .costs import Link
from .pipeline import Chunk, ChunkAction, Computation, Step
from .pipeline_times import GroupTimes, Part, StageTimes, Whole
from .plan import Do
from .timeline import Kind, Span, Timeline

__all__ = ["NEVER", "Compiled", "RankRun", "Steps", "shared"]

NEVER = -1.0
"""When something arrives that is not sent yet."""


class Compiled(NamedTuple):
    """A step with what is looked up for it."""

    needs: int  # number of what another stage sends, or -1
    sends: int  # number of what it sends, or -1
    delay: float  # seconds until that is where it is needed
    whole: Whole
    times: StageTimes
    step: Step


Steps = dict[int, dict[int, tuple[ChunkAction, ...]]]
"""Actions by step and position."""


@dataclass(slots=True)
class RankRun:
    """One rank that runs.  The clocks are seconds since the step of the schedule began."""

    steps: list[Compiled]
    times: Sequence[StageTimes]  # of all stages
    link: Link
    other: int  # bytes on the device beside saved tensors
    actions: Steps
    split: Collection[tuple[int, int]]  # stages and microbatches of which the input backward uses the saved tensors
    record: bool = False  # a timeline; it takes about as long as the run
    compute: float = 0.0
    host: float = 0.0
    d2h: float = 0.0
    h2d: float = 0.0
    bubble: float = 0.0
    stalled: float = 0.0
    saved: int = 0  # bytes of saved tensors
    saved_peak: int = 0
    peak: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    starts: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    _copied: dict[Chunk, float] = field(default_factory=dict)  # when the copies to the host are done
    _needs: dict[Chunk, float] = field(default_factory=dict)  # when its compute can start without a stall
    _reloading: dict[tuple[int, int], int] = field(default_factory=dict)  # chunks of each stage and microbatch
    _trimmed: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes that input backwards freed

    def __post_init__(self) -> None:
        self.peak = self.other

    def advance(self, arrivals: list[float], waiting: dict[int, int], ready: list[int]) -> int:
        """Run until a step needs what is not sent yet; return the number of that, or -1 at the end.

        A rank that waits for what this one sends goes from `waiting` to `ready`.
        """
        steps, starts, actions, reloading, trimmed = (
            self.steps,
            self.starts,
            self.actions,
            self._reloading,
            self._trimmed,
        )
        compute = self.compute
        for number in range(len(starts), len(steps)):
            needs, sends, delay, whole, times, step = steps[number]
            if needs >= 0:
                arrival = arrivals[needs]
                if arrival == NEVER:
                    self.compute = compute
                    return needs
                if arrival > compute:
                    self.bubble += arrival - compute
                    compute = arrival
            starts.append(compute)
            of = actions.get(number)
            key = step[0], step[2]
            if of is None and not reloading.get(key) and key not in trimmed:
                begin, host = compute, self.host
                compute = max(begin + whole.seconds, host + whole.after_host)
                self.host = host + whole.host
                saved, other = self.saved, self.other
                if saved + whole.saved_peak > self.saved_peak:
                    self.saved_peak = saved + whole.saved_peak
                if saved + other + whole.peak > self.peak:
                    self.peak = saved + other + whole.peak
                self.saved, self.other = saved + whole.saved, other + whole.other
                if self.record:
                    self._span(_kind(step), step.microbatch, begin, compute)
                    self.resident += (begin, saved + max(whole.saved_peak, 0)), (compute, self.saved)
            else:
                self.compute = compute
                self._parts(step, times, of or {})
                compute = self.compute
            if sends >= 0:
                arrivals[sends] = compute + delay
                if sends in waiting:
                    ready.append(waiting.pop(sends))
        self.compute = compute
        return -1

    def _parts(self, step: Step, times: StageTimes, actions: dict[int, tuple[ChunkAction, ...]]) -> None:
        """Run a step group by group."""
        stage, computation, microbatch = step
        forward, count, needs = computation is Computation.FORWARD, len(times.groups), self._needs
        if forward:
            self.other += times.cost.boundary_bytes
        parts, trimmed = times.parts(computation), 0
        for position in range(count):
            if parts:
                self.compute += parts[position].gap
                self.peak = max(self.peak, self.saved + self.other + parts[position].gap_temporary)
            offloaded = position in actions and self._act(actions[position])
            if not parts:
                continue  # an input backward without a split computes nothing
            group = position if forward else count - 1 - position
            need = 0.0
            if needs and not forward:
                chunk = Chunk(stage, microbatch, group)
                if chunk in needs:
                    need = needs.pop(chunk)
                    self._reloading[stage, microbatch] -= 1
                    trimmed += times.groups[group].nbytes - times.groups[group].again_bytes
            start = self._run(parts[position], step, need)
            if offloaded:
                self._copy_out(Chunk(stage, microbatch, group), times.groups[group], start)
        boundary = times.cost.boundary_bytes
        if computation is Computation.BACKWARD:
            self.other -= boundary
        elif computation is Computation.BACKWARD_INPUT:
            self.other += times.recomputed
            self._occupy(-trimmed)
            if trimmed:
                self._trimmed[stage, microbatch] = trimmed
        elif computation is Computation.BACKWARD_WEIGHT:
            self.other -= boundary + (times.kept_other + times.recomputed if times.cost.splits else 0)
            if times.cost.splits:
                self._occupy(self._trimmed.pop((stage, microbatch), 0) - times.cost.nbytes)
        if count in actions:
            self._act(actions[count])

    def _run(self, part: Part, step: Step, need: float) -> float:
        """Run a group, before whose saved tensors arrive compute cannot start; return when it started."""
        before, start = self.saved + self.other, self.compute
        if need > start:
            self.stalled += need - start
            if self.record:
                self._span(Kind.STALL, step.microbatch, start, need)
            start = need
        self.host += part.host
        end = self.compute = max(start + part.seconds, self.host)
        self.other += part.kept
        if part.saved:
            self._occupy(part.saved)
        top = max(before, self.saved + self.other) + part.temporary
        if top > self.peak:
            self.peak = top
        if self.record:
            self._span(_kind(step), step.microbatch, start, end)
        return start

    def _act(self, actions: tuple[ChunkAction, ...]) -> bool:
        """Carry out the actions of a moment; return whether the group that starts is offloaded."""
        offloaded = False
        for do, chunk in actions:
            group = self.times[chunk.stage].groups[chunk.group]
            if do is Do.OFFLOAD:
                offloaded = True
            elif do is Do.RELEASE:
                self._release(chunk, group)
            elif chunk in self._copied:
                del self._copied[chunk]
                split = (chunk.stage, chunk.microbatch) in self.split
                self._reload(chunk, group.back, group.input_ahead if split else group.back_ahead, group.nbytes)
            else:  # for the weight backward
                self._reload(chunk, group.again, group.again, group.again_bytes)
        return offloaded

    def _copy_out(self, chunk: Chunk, group: GroupTimes, start: float) -> None:
        """Queue the copies of a group whose forward starts at a time."""
        link = self.link
        begin = max(self.d2h, start + group.out_ready)
        done = max(shared(begin, group.out, self.h2d, link.d2h, link.h2d, link.both), start + group.out_after)
        self.d2h = self._copied[chunk] = done
        self.bytes_out += group.nbytes
        if self.record:
            self._span(Kind.D2H, chunk.microbatch, begin, done, group.nbytes)

    def _release(self, chunk: Chunk, group: GroupTimes) -> None:
        """Free a chunk when it is copied; after its input backward what the weight backward needs."""
        done = self._copied.get(chunk)
        if done is None:
            self._occupy(-group.again_bytes)
            return
        if done > self.compute:
            self.stalled += done - self.compute
            if self.record:
                self._span(Kind.STALL, chunk.microbatch, self.compute, done)
            self.compute = done
        self._occupy(-group.nbytes)

    def _reload(self, chunk: Chunk, seconds: float, ahead: float, nbytes: int) -> None:
        """Allocate memory and queue the copies back."""
        self._occupy(nbytes)
        begin, link = max(self.h2d, self.compute), self.link
        self.h2d = shared(begin, seconds, self.d2h, link.h2d, link.d2h, link.both)
        self._needs[chunk] = self.h2d - (seconds - ahead)
        self.bytes_back += nbytes
        of = chunk.stage, chunk.microbatch
        self._reloading[of] = self._reloading.get(of, 0) + 1
        if self.record:
            self._span(Kind.H2D, chunk.microbatch, begin, self.h2d, nbytes)

    def _occupy(self, nbytes: int) -> None:
        """Allocate or free the memory of saved tensors."""
        self.saved += nbytes
        if nbytes > 0:
            if self.saved > self.saved_peak:
                self.saved_peak = self.saved
            if self.saved + self.other > self.peak:
                self.peak = self.saved + self.other
        if self.record:
            self.resident.append((self.compute, self.saved))

    def _span(self, kind: Kind, microbatch: int, start: float, end: float, nbytes: int = 0) -> None:
        if end > start:
            self.spans.append(Span(kind, microbatch, start, end, nbytes))

    def timeline(self) -> Timeline:
        """Return what was recorded."""
        return Timeline.build(self.spans, self.resident, source="simulated")


def _kind(step: Step) -> Kind:
    return Kind.FORWARD if step.computation is Computation.FORWARD else Kind.BACKWARD


def shared(start: float, seconds: float, busy: float, own: float, other: float, both: float | None) -> float:
    """Return the end of copies that have what the other direction leaves of the bandwidth while that is busy."""
    if busy <= start or both is None or both >= own + other:
        return start + seconds
    rest, together = max(both - other, 0.0) / own, busy - start
    if rest and seconds <= rest * together:
        return start + seconds / rest
    return start + together + (seconds - rest * together)
