"""What the steps of a pipeline rank cost, in one number for each purpose, and the clocks and memory of the rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from .costs import LayerCost, Link, copies_back, copies_out
from .pipeline import Computation, SplitCost, StageCost
from .timeline import Kind

__all__ = ["GroupTimes", "RankClock", "RawSpan", "StageTimes", "Whole", "stage_times"]

RawSpan = tuple[Kind, int, float, float, int]
"""Kind, microbatch, start, end and bytes of a `Span`, which takes longer to make."""


@dataclass(slots=True)
class Part:
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
    back_ahead: float  # by which they must start before backward does, without a stall
    again_bytes: int  # what a weight backward needs again
    again: float


@dataclass(slots=True)
class Whole:
    """A step in which nothing is offloaded, released or reloaded, as one."""

    seconds: float
    host: float
    after_host: float  # seconds from the host's time at the begin until compute can be done
    saved: int  # bytes of saved tensors when it ends, on top of those when it starts
    other: int  # and other bytes
    saved_peak: int
    peak: int

    @staticmethod
    def of(parts: list[Part], at_end: tuple[int, int], at_start: int = 0) -> Whole:
        """Return the sum of parts, after which so many saved and other bytes are kept or freed."""
        seconds = host = behind = 0.0
        saved, other, saved_peak, peak = 0, at_start, 0, at_start
        for part in parts:
            before = saved + other
            peak = max(peak, before + part.gap_temporary)
            saved, other = saved + part.saved, other + part.kept
            peak = max(peak, max(before, saved + other) + part.temporary)
            saved_peak = max(saved_peak, saved)
            seconds += part.gap + part.seconds
            host += part.host
            behind = max(behind + part.gap + part.seconds, host)
        return Whole(seconds, host, behind, saved + at_end[0], other + at_end[1], saved_peak, peak)


@dataclass
class StageTimes:
    """The steps of one stage."""

    cost: StageCost
    groups: list[GroupTimes]

    @cached_property
    def forward(self) -> list[Part]:
        """The parts of a forward, in order of execution."""
        return [
            Part(
                gap=of.gap_forward,
                seconds=of.forward,
                host=of.host_forward,
                temporary=of.forward_temporary,
                gap_temporary=of.gap_forward_temporary,
                kept=of.kept_bytes,
                saved=of.nbytes,
            )
            for of in self.cost.groups
        ]

    @cached_property
    def backward(self) -> list[Part]:
        """The parts of a full backward."""
        return [
            Part(
                gap=of.gap_backward,
                seconds=of.backward,
                host=of.host_backward,
                temporary=of.backward_temporary,
                gap_temporary=of.gap_backward_temporary,
                kept=-of.kept_bytes,
                saved=-of.nbytes,
            )
            for of in reversed(self.cost.groups)
        ]

    @cached_property
    def backward_input(self) -> list[Part]:
        """The parts of an input backward, which frees nothing before it ends."""
        splits = reversed(self.cost.splits)
        return [
            replace(part, seconds=split.input_seconds, host=part.host * _share(split), kept=0, saved=0)
            for part, split in zip(self.backward, splits, strict=False)
        ]

    @cached_property
    def backward_weight(self) -> list[Part]:
        """The parts of a weight backward, which frees nothing before it ends; or of a full one without a split."""
        splits = self.cost.splits
        if not splits:
            return self.backward
        return [
            replace(part, gap=0.0, seconds=split.weight_seconds, host=part.host * (1 - _share(split)), kept=0, saved=0)
            for part, split in zip(self.backward, reversed(splits), strict=True)
        ]

    def parts(self, computation: Computation) -> list[Part]:
        """Return the parts of a step."""
        if computation is Computation.FORWARD:
            return self.forward
        if computation is Computation.BACKWARD:
            return self.backward
        return self.backward_input if computation is Computation.BACKWARD_INPUT else self.backward_weight

    @cached_property
    def whole(self) -> dict[Computation, Whole]:
        """The steps as one."""
        boundary, split = self.cost.boundary_bytes, bool(self.cost.splits)
        return {
            Computation.FORWARD: Whole.of(self.forward, (0, 0), boundary),
            Computation.BACKWARD: Whole.of(self.backward, (0, -boundary)),
            Computation.BACKWARD_INPUT: Whole.of(self.backward_input, (self.after_input, 0)),
            Computation.BACKWARD_WEIGHT: Whole.of(
                self.backward_weight, (-self.kept, -self.kept_other - boundary) if split else (0, -boundary)
            ),
        }

    @cached_property
    def kept(self) -> int:
        """Bytes that a weight backward needs again."""
        return sum(split.kept for split in self.cost.splits)

    @cached_property
    def kept_other(self) -> int:
        """Bytes that groups keep beside the saved ones."""
        return sum(of.kept_bytes for of in self.cost.groups)

    @cached_property
    def after_input(self) -> int:
        """Bytes that are freed at the end of an input backward, as a negative number."""
        return self.kept - self.cost.nbytes if self.cost.splits else 0


def _share(split: SplitCost) -> float:
    both = split.input_seconds + split.weight_seconds
    return split.input_seconds / both if both else 1.0


def stage_times(stages: tuple[StageCost, ...], link: Link) -> list[StageTimes]:
    """Return the times of all stages; equal ones are worked out once."""
    known: dict[int, StageTimes] = {}
    found = []
    for cost in stages:
        if id(cost) not in known:
            splits = cost.splits or (None,) * len(cost.groups)
            groups = [_group_times(of, split, link) for of, split in zip(cost.groups, splits, strict=True)]
            known[id(cost)] = StageTimes(cost, groups)
        found.append(known[id(cost)])
    return found


def _group_times(cost: LayerCost, split: SplitCost | None, link: Link) -> GroupTimes:
    out, after = copies_out(cost, link)
    # The input backward needs the tensors at the same parts of a shorter time.
    back, ahead = copies_back(cost if split is None else replace(cost, backward=split.input_seconds), link)
    ready = cost.saved[0].saved_at * cost.forward if cost.saved else 0.0
    again = split.kept if split is not None else 0
    latency = link.latency * len(cost.saved)
    return GroupTimes(cost.nbytes, out, ready, after, back, ahead, again, again and latency + again / link.h2d)


@dataclass(slots=True)
class RankClock:
    """When compute, the host and the copies of a rank are done, and the bytes on its device."""

    link: Link
    other: int  # bytes beside saved tensors
    compute: float = 0.0
    host: float = 0.0
    d2h: float = 0.0
    h2d: float = 0.0
    bubble: float = 0.0
    stalled: float = 0.0
    saved: int = 0
    saved_peak: int = 0
    peak: int = 0
    spans: list[RawSpan] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peak = self.other

    def begin(self, arrival: float) -> None:
        """Wait for what another rank sends."""
        if arrival > self.compute:
            self.bubble += arrival - self.compute
            self.compute = arrival

    def whole(self, step: Whole, kind: Kind, microbatch: int) -> None:
        """Run a step in which nothing moves."""
        start = self.compute
        self.compute = max(start + step.seconds, self.host + step.after_host)
        self.host += step.host
        if step.saved_peak > 0:
            self.saved_peak = max(self.saved_peak, self.saved + step.saved_peak)
        self.peak = max(self.peak, self.saved + self.other + step.peak)
        self.saved += step.saved
        self.other += step.other
        self.spans.append((kind, microbatch, start, self.compute, 0))
        self.resident.append((self.compute, self.saved))

    def run(self, part: Part, kind: Kind, microbatch: int, need: float = 0.0) -> float:
        """Run a group, before whose saved tensors arrive compute cannot start; return when it started."""
        before = self.saved + self.other
        if before + part.gap_temporary > self.peak:
            self.peak = before + part.gap_temporary
        self.compute += part.gap
        self.wait(need, microbatch)
        start = self.compute
        self.host += part.host
        self.compute = max(start + part.seconds, self.host)
        self.other += part.kept
        self.occupy(part.saved)
        top = max(before, self.saved + self.other) + part.temporary
        if top > self.peak:
            self.peak = top
        if self.compute > start:
            self.spans.append((kind, microbatch, start, self.compute, 0))
        return start

    def wait(self, until: float, microbatch: int) -> None:
        """Let compute wait for a copy."""
        start = self.compute
        if until > start:
            self.stalled += until - start
            self.spans.append((Kind.STALL, microbatch, start, until, 0))
            self.compute = until

    def copy_out(self, group: GroupTimes, start: float, microbatch: int) -> float:
        """Queue the copies of a group whose forward starts at a time; return when they are done."""
        begin = max(self.d2h, start + group.out_ready)
        done = self._shared(begin, group.out, self.h2d, self.link.d2h, self.link.h2d)
        self.d2h = max(done, start + group.out_after)
        self.spans.append((Kind.D2H, microbatch, begin, self.d2h, group.nbytes))
        return self.d2h

    def copy_back(self, seconds: float, ahead: float, nbytes: int, microbatch: int) -> float:
        """Queue the copies back of a group now; return when its compute can start without a stall."""
        begin = max(self.h2d, self.compute)
        self.h2d = self._shared(begin, seconds, self.d2h, self.link.h2d, self.link.d2h)
        self.spans.append((Kind.H2D, microbatch, begin, self.h2d, nbytes))
        return self.h2d - (seconds - ahead)

    def _shared(self, start: float, seconds: float, other_end: float, own: float, other: float) -> float:
        """Return the end of copies that have what the other direction leaves of the bandwidth while that is busy."""
        both = self.link.both
        if both is None or both >= own + other or other_end <= start:
            return start + seconds
        rest, together = max(both - other, 0.0) / own, other_end - start
        if rest and seconds <= rest * together:
            return start + seconds / rest
        return start + together + (seconds - rest * together)

    def occupy(self, nbytes: int) -> None:
        """Allocate or free the memory of saved tensors."""
        if nbytes:
            self.saved += nbytes
            if self.saved > self.saved_peak:
                self.saved_peak = self.saved
            if self.saved + self.other > self.peak:
                self.peak = self.saved + self.other
            self.resident.append((self.compute, self.saved))
