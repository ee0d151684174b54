"""What the steps of the stages of a pipeline cost, in one number for each purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .costs import LayerCost, Link, copies_back, copies_out
from .pipeline import Computation, SplitCost, StageCost

__all__ = ["GroupTimes", "Part", "StageTimes", "Whole", "stage_times"]


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
    back_ahead: float  # by which they must start before a full backward does, without a stall
    input_ahead: float  # the same for an input backward
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
        """Return the sum of parts.

        `at_start` are other bytes that are allocated before the first part; `at_end` are saved and other bytes that are
        allocated after the last one, negative where they are freed.
        """
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
            Computation.BACKWARD_INPUT: Whole.of(self.backward_input, (0, self.recomputed)),
            Computation.BACKWARD_WEIGHT: Whole.of(
                self.backward_weight,
                (-self.cost.nbytes, -self.kept_other - self.recomputed - boundary) if split else (0, -boundary),
            ),
        }

    @cached_property
    def recomputed(self) -> int:
        """Bytes that the input backward leaves for the weight backward, beside the saved ones."""
        return sum(split.recomputed for split in self.cost.splits)

    @cached_property
    def kept_other(self) -> int:
        """Bytes that groups keep beside the saved ones."""
        return sum(of.kept_bytes for of in self.cost.groups)


def _share(split: SplitCost) -> float:
    both = split.input_seconds + split.weight_seconds
    return split.input_seconds / both if both else 1.0


def stage_times(stages: Sequence[StageCost], link: Link) -> list[StageTimes]:
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
    back, ahead = copies_back(cost, link)
    # The input backward needs the tensors at the same parts of a shorter time.
    of_input = ahead if split is None else copies_back(replace(cost, backward=split.input_seconds), link)[1]
    ready = cost.saved[0].saved_at * cost.forward if cost.saved else 0.0
    again = split.kept if split is not None else 0
    latency = link.latency * len(cost.saved)
    seconds = latency + again / link.h2d if again else 0.0
    return GroupTimes(cost.nbytes, out, ready, after, back, ahead, of_input, again, seconds)
