"""The run of one rank of a simulated pipeline: its clocks, its memory and the copies of its chunks.

Each rank has four clocks: compute, host, and one copy queue for each direction.  Memory follows the plan alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from .costs import LayerCost, Link, copies_back, copies_out
from .pipeline import Chunk, ChunkAction, Computation, Moment, SplitCost, StageCost, Step
from .pipeline_plan import Actions
from .plan import Do
from .timeline import Kind, Span, Timeline

__all__ = ["NEVER", "Compiled", "GroupTimes", "Level", "RankRun", "StageTimes"]

NEVER = -1.0
"""When something arrives that is not sent yet."""

WEIGHTS = Computation.BACKWARD, Computation.BACKWARD_WEIGHT
"""What computes gradients of weights."""


# Costs, in one number for each purpose


@dataclass(slots=True)
class _Part:
    """The compute of one group in one step."""

    gap: float
    seconds: float
    host: float
    temporary: int  # bytes allocated for a time
    gap_temporary: int
    kept: int  # bytes that it keeps, or frees if negative, beside the saved ones
    saved: int  # bytes of saved tensors that it keeps, or frees if negative


@dataclass(slots=True)
class GroupTimes:
    """Copies of one group in seconds."""

    nbytes: int
    out: float  # the copies to the host
    out_ready: float  # from the start of forward until the first copy can start
    out_after: float  # until all are done, if the queue is free
    back: float  # the copies back
    back_ahead: float  # by which they must start before a full backward does, without a stall
    input_ahead: float  # the same for an input backward
    again_bytes: int  # what a weight backward needs again
    again: float

    @staticmethod
    def of(cost: LayerCost, split: SplitCost | None, link: Link) -> GroupTimes:
        """Return the times of a group, whose backward may be split."""
        out, after = copies_out(cost, link)
        back, ahead = copies_back(cost, link)
        # The input backward needs the tensors at the same parts of a shorter time.
        input_ahead = ahead if split is None else copies_back(replace(cost, backward=split.input_seconds), link)[1]
        ready = cost.saved[0].saved_at * cost.forward if cost.saved else 0.0
        again = split.kept if split is not None else 0
        seconds = link.latency * len(cost.saved) + again / link.h2d if again else 0.0
        return GroupTimes(cost.nbytes, out, ready, after, back, ahead, input_ahead, again, seconds)


@dataclass
class StageTimes:
    """The steps of one stage."""

    cost: StageCost
    groups: list[GroupTimes]

    @cached_property
    def parts(self) -> dict[Computation, list[_Part]]:
        """The compute of the groups in each computation, in order of execution; none if it computes nothing."""
        forward = [
            _Part(
                cost.gap_forward,
                cost.forward,
                cost.host_forward,
                cost.forward_temporary,
                cost.gap_forward_temporary,
                cost.kept_bytes,
                cost.nbytes,
            )
            for cost in self.cost.groups
        ]
        backward = [
            _Part(
                cost.gap_backward,
                cost.backward,
                cost.host_backward,
                cost.backward_temporary,
                cost.gap_backward_temporary,
                -cost.kept_bytes,
                -cost.nbytes,
            )
            for cost in reversed(self.cost.groups)
        ]
        inputs, weights = list[_Part](), list[_Part]()  # which free nothing before they end
        for part, split in zip(backward, reversed(self.cost.splits), strict=False):
            both = split.input_seconds + split.weight_seconds
            host = part.host * (split.input_seconds / both if both else 1.0)
            inputs.append(replace(part, seconds=split.input_seconds, host=host, kept=0, saved=0))
            late = part.host - host
            weights.append(replace(part, gap=0.0, seconds=split.weight_seconds, host=late, kept=0, saved=0))
        return {
            Computation.FORWARD: forward,
            Computation.BACKWARD: backward,
            Computation.BACKWARD_INPUT: inputs,
            Computation.BACKWARD_WEIGHT: weights if self.cost.splits else backward,
        }

    @cached_property
    def gradients(self) -> list[int]:
        """Bytes of the gradients of each group, in the order of the backward."""
        return list(reversed(self.cost.gradient_bytes or (0,) * len(self.groups)))

    @cached_property
    def recomputed(self) -> int:
        """Bytes that the input backward leaves for the weight backward, beside the saved ones."""
        return sum(split.recomputed for split in self.cost.splits)

    @cached_property
    def freed_late(self) -> int:
        """Bytes beside the saved ones that a weight backward frees at its end, and a full backward group by group."""
        return sum(cost.kept_bytes for cost in self.cost.groups) + self.recomputed if self.cost.splits else 0


# The run


class Compiled(NamedTuple):
    """A step with what is looked up for it."""

    needs: int  # number of what another stage sends, or -1
    sends: int  # number of what it sends, or -1
    delay: float  # seconds until that is where it is needed
    times: StageTimes
    step: Step


class Level(NamedTuple):
    """A moment: when it comes, the bytes that are needed at most until the next one, and whether compute follows."""

    moment: Moment
    when: float
    need: int
    runs: bool


@dataclass(slots=True)
class RankRun:
    """One rank that runs.  The clocks are seconds since the step of the schedule began."""

    steps: list[Compiled]
    times: Sequence[StageTimes]  # of all stages
    link: Link
    other: int  # bytes on the device beside saved tensors
    actions: Actions
    split: Collection[tuple[int, int]]  # stages and microbatches of which the input backward uses the saved tensors
    record: bool = False  # a timeline and the levels of memory; it takes about as long as the run
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
    levels: list[Level] = field(default_factory=list)
    _copied: dict[Chunk, float] = field(default_factory=dict)  # when the copies to the host are done
    _needs: dict[Chunk, float] = field(default_factory=dict)  # when its compute can start without a stall
    _trimmed: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes that input backwards freed
    _with_gradients: set[int] = field(default_factory=set)  # stages

    def __post_init__(self) -> None:
        self.peak = self.other

    def advance(self, arrivals: list[float], waiting: dict[int, int], ready: list[int]) -> int:
        """Run until a step needs what is not sent yet; return the number of that, or -1 at the end.

        A rank that waits for what this one sends goes from `waiting` to `ready`.
        """
        nothing: dict[int, tuple[ChunkAction, ...]] = {}
        for number in range(len(self.starts), len(self.steps)):
            needs, sends, delay, times, step = self.steps[number]
            if needs >= 0:
                arrival = arrivals[needs]
                if arrival == NEVER:
                    return needs
                if arrival > self.compute:
                    self.bubble += arrival - self.compute
                    self.compute = arrival
            self.starts.append(self.compute)
            self._step(number, step, times, self.actions.get(number, nothing))
            if sends >= 0:
                arrivals[sends] = self.compute + delay
                if sends in waiting:
                    ready.append(waiting.pop(sends))
        return -1

    def _step(self, number: int, step: Step, times: StageTimes, actions: dict[int, tuple[ChunkAction, ...]]) -> None:
        """Run a step group by group."""
        stage, computation, microbatch = step
        forward, count, needs = computation is Computation.FORWARD, len(times.groups), self._needs
        boundary, parts, trimmed = times.cost.boundary_bytes, times.parts[computation], 0
        if forward:
            self.other += boundary + times.cost.output_bytes
        first = computation in WEIGHTS and stage not in self._with_gradients
        if first:
            self._with_gradients.add(stage)
        for position in range(count):
            part = parts[position] if parts else None
            if part is not None:
                self._gap(part)
            offloaded = position in actions and self._act(actions[position])
            if part is None:  # an input backward without a split
                self._note(Moment(number, position), self.saved + self.other, runs=False)
                continue
            group = position if forward else count - 1 - position
            need = 0.0
            if needs and not forward:
                chunk = Chunk(stage, microbatch, group)
                if chunk in needs:
                    need = needs.pop(chunk)
                    trimmed += times.groups[group].nbytes - times.groups[group].again_bytes
            kept = part.kept + times.gradients[position] if first else part.kept
            start = self._run(part, step, need, kept, Moment(number, position))
            if offloaded:
                self._copy_out(Chunk(stage, microbatch, group), times.groups[group], start)
        if computation is Computation.BACKWARD:
            self.other -= boundary
        elif computation is Computation.BACKWARD_INPUT:
            self.other += times.recomputed
            self._occupy(-trimmed)
            if trimmed:
                self._trimmed[stage, microbatch] = trimmed
        elif computation is Computation.BACKWARD_WEIGHT:
            self.other -= boundary + times.freed_late
            if times.cost.splits:
                self._occupy(self._trimmed.pop((stage, microbatch), 0) - times.cost.nbytes)
        if count in actions:
            self._act(actions[count])
        self._note(Moment(number, count), self.saved + self.other, runs=False)

    def _gap(self, part: _Part) -> None:
        """Compute before a group."""
        self.compute += part.gap
        need = self.saved + self.other + part.gap_temporary
        self.peak = max(self.peak, need)
        if self.record and self.levels:
            self.levels[-1] = self.levels[-1]._replace(need=max(self.levels[-1].need, need))

    def _run(self, part: _Part, step: Step, need: float, kept: int, moment: Moment) -> float:
        """Run a group, before whose saved tensors arrive compute cannot start; return when it started.

        It keeps `kept` bytes beside the saved ones, or frees them if negative.
        """
        before, start = self.saved + self.other, self.compute
        if need > start:
            self.stalled += need - start
            self._span(Kind.STALL, step.microbatch, start, need)
            start = self.compute = need
        self.host += part.host
        end = max(start + part.seconds, self.host)
        self.other += kept
        top = max(before, self.saved + part.saved + self.other) + part.temporary
        self._note(moment, top, runs=True)
        if part.saved > 0:
            self._occupy(part.saved)
        self.compute = end
        if part.saved < 0:
            self._occupy(part.saved)
        if top > self.peak:
            self.peak = top
        kind = Kind.FORWARD if step.computation is Computation.FORWARD else Kind.BACKWARD
        self._span(kind, step.microbatch, start, end)
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
        begin = max(self.d2h, start + group.out_ready)
        done = max(self.link.end(begin, group.out, self.h2d, back=False), start + group.out_after)
        self.d2h = self._copied[chunk] = done
        self.bytes_out += group.nbytes
        self._span(Kind.D2H, chunk.microbatch, begin, done, group.nbytes)

    def _release(self, chunk: Chunk, group: GroupTimes) -> None:
        """Free a chunk when it is copied; after its input backward what the weight backward needs."""
        done = self._copied.get(chunk)
        if done is None:
            self._occupy(-group.again_bytes)
            return
        if done > self.compute:
            self.stalled += done - self.compute
            self._span(Kind.STALL, chunk.microbatch, self.compute, done)
            self.compute = done
        self._occupy(-group.nbytes)

    def _reload(self, chunk: Chunk, seconds: float, ahead: float, nbytes: int) -> None:
        """Allocate memory and queue the copies back."""
        self._occupy(nbytes)
        begin = max(self.h2d, self.compute)
        self.h2d = self.link.end(begin, seconds, self.d2h, back=True)
        self._needs[chunk] = self.h2d - (seconds - ahead)
        self.bytes_back += nbytes
        self._span(Kind.H2D, chunk.microbatch, begin, self.h2d, nbytes)

    def _occupy(self, nbytes: int) -> None:
        """Allocate or free the memory of saved tensors."""
        self.saved += nbytes
        if nbytes > 0:
            if self.saved > self.saved_peak:
                self.saved_peak = self.saved
            if self.saved + self.other > self.peak:
                self.peak = self.saved + self.other
        if self.record and nbytes:
            self.resident.append((self.compute, self.saved))

    # What is recorded

    def _note(self, moment: Moment, need: int, *, runs: bool) -> None:
        if self.record:
            self.levels.append(Level(moment, self.compute, need, runs))

    def _span(self, kind: Kind, microbatch: int, start: float, end: float, nbytes: int = 0) -> None:
        if self.record and end > start:
            self.spans.append(Span(kind, microbatch, start, end, nbytes))

    def timeline(self) -> Timeline:
        """Return what was recorded."""
        return Timeline.build(self.spans, self.resident, source="simulated")
