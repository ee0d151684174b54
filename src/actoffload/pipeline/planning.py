"""From what the ranks exchanged to the plans of all of them, and the trials of these plans; every rank makes the same.

`[Note: trials of plans]`  The first steps measure groups and copies, each for itself.  Whether a whole step takes as
long as was simulated for them is known only when it has run.  So each plan is tried.  If a step takes longer than
expected, all ranks plan again as if copies took longer.  If plans that should cost nothing cost time all the same,
nothing is offloaded in the end.  Where memory or the arguments ask for a cost, the fastest plan of those tried is kept.
Every rank decides from the same numbers, and so the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..planner import Variant, plan_pipeline
from ..schedule.costs import Link
from ..schedule.pipeline_plan import PipelinePlan
from ..schedule.timeline import milliseconds, size
from .exchange import Measured, Tried

__all__ = ["Limits", "Plans", "Trials", "costs_time", "decision", "plans_of", "slowest", "variants_of"]

FREE = 0.01  # of the time of a step
TRIES = 4  # plans that are tried at most
SLOWER, SLOWEST = 1.25, 4.0  # factor of the time of copies with each further plan, and the largest one

Plans = tuple[PipelinePlan, ...]
"""Of all ranks, in order."""


@dataclass(frozen=True)
class Limits:
    """What the arguments of `offload` allow; None for no limit."""

    fraction: float | None = None  # of the bytes of each microbatch
    max_inflight: int | None = None  # groups that are copied at a time
    delta_bytes_per_rank: int | None = None  # fewer on each rank than on the one before
    memory_budget: int | None = None  # bytes of device memory of each rank
    may_recompute: bool = False  # where the memory is not enough


def plans_of(measured: Sequence[Measured], limits: Limits, slower: float = 1.0) -> Plans:
    """Return the plans of all ranks, where copies take `slower` times as long as measured."""
    names = {stage: groups for each in measured for stage, groups in each.names.items()}
    costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
    stages, link = [costs[stage] for stage in sorted(costs)], slowest([each.link for each in measured], slower)
    plan = partial(
        plan_pipeline,
        [each.order for each in measured],
        stages,
        link,
        names=names,
        max_inflight=limits.max_inflight,
    )
    plans: Plans = ()
    if limits.memory_budget is None:
        plans = plan(fraction=limits.fraction, delta_bytes_per_rank=limits.delta_bytes_per_rank)
    if not plans or _exceed(plans, measured):
        least = min(each.limit for each in measured if each.limit is not None)
        budgets = [least if each.limit is None else each.limit for each in measured]
        plans = plan(memory_budget=budgets, variants=variants_of(measured))
    return plans


def costs_time(measured: Sequence[Measured], plans: Plans) -> bool:
    """Return whether a rank exceeds its memory, or a step takes longer than without offloading to keep within it."""
    return _expected(plans) > 1 + FREE or _exceed(plans, measured)


def _exceed(plans: Plans, measured: Sequence[Measured]) -> bool:
    peaks = [plan.peak_bytes or 0 for plan in plans]
    return any(each.limit is not None and peak > each.limit for peak, each in zip(peaks, measured, strict=True))


def variants_of(measured: Sequence[Measured]) -> dict[int, Sequence[tuple[Variant, ...]]]:
    """Return the ways to run the groups of each stage, the first one without recomputation; empty if not measured."""
    return {stage: ways for each in measured for stage, ways in (each.again or {}).items()}


def slowest(links: Sequence[Link], slower: float = 1.0) -> Link:
    """Return the lowest rates of all ranks, which wait for each other, divided by a factor."""
    both = [link.both / slower for link in links if link.both is not None]
    return Link(
        min(link.d2h for link in links) / slower,
        min(link.h2d for link in links) / slower,
        max(link.latency for link in links),
        min(both, default=None),
    )


def decision(plans: Plans) -> str:
    """Return what was decided for each rank, in a line for each and one for all."""
    lines = ["The plans of all ranks of the pipeline:"]
    for plan in plans:
        chunks = sum(len(plan.names[step.stage]) for step in plan.order if step.computation.value == "F")
        line = f"  rank {plan.rank}: {len(plan.transfers)} of {chunks} groups of all microbatches are offloaded"
        line += f" ({size(plan.offloaded_bytes)})"
        if plan.peak_bytes is not None:
            line += f", peak {size(plan.peak_bytes)}"
        if plan.seconds is not None and plan.baseline_seconds:
            line += f", {milliseconds(plan.seconds)} a step, {milliseconds(plan.baseline_seconds)} without offloading"
        lines.append(f"{line}. {plan.because}".rstrip())
    return "\n".join(lines)


# Trials


def _expected(plans: Plans) -> float:
    """Return the time of a step over that of one without offloading, as simulated."""
    times = [(plan.seconds, plan.baseline_seconds) for plan in plans]
    return max(seconds / without if seconds and without else 1.0 for seconds, without in times)


def _acts(plans: Plans) -> list[object]:
    """Return what plans do; empty if they do nothing."""
    return [(plan.rank, plan.transfers, plan.saves) for plan in plans if plan.transfers or plan.saves]


def _saying(plans: Plans, because: str) -> Plans:
    """Return plans with a further reason."""
    return tuple(replace(plan, because=f"{plan.because} {because}".strip()) for plan in plans)


@dataclass(frozen=True)
class _Trial:
    """A step with plans and, where all ranks have room, one without offloading, in seconds of the slowest rank."""

    plans: Plans
    seconds: float
    without: float | None

    @property
    def planned(self) -> float:
        """Seconds of a step, as simulated."""
        return max(plan.seconds or 0.0 for plan in self.plans)

    @property
    def is_as_planned(self) -> bool:
        """Whether the step took no longer than expected."""
        if self.without is None:
            return self.seconds <= self.planned * (1 + FREE)
        return self.seconds <= (_expected(self.plans) + FREE) * self.without

    def __str__(self) -> str:
        took = f"a step took {milliseconds(self.seconds)}"
        if self.without is None:
            return f"{took}, planned were {milliseconds(self.planned)}"
        return f"{took}, without offloading {milliseconds(self.without)}"


class Trials:
    """The plans of a pipeline, one after the other until one is kept.

    Parameters
    ----------
    measured : sequence of Measured
        Of all ranks.
    limits : Limits
        What the arguments allow.

    Attributes
    ----------
    plans : tuple of PipelinePlan
        Those to try next, or to keep if trials have ended.
    ended : bool
        Whether they have.
    """

    def __init__(self, measured: Sequence[Measured], limits: Limits) -> None:
        self._measured, self._limits, self._slower = measured, limits, 1.0
        self._done: list[_Trial] = []
        self.plans = plans_of(measured, limits)
        self.ended = not _acts(self.plans)

    def add(self, tried: Sequence[Tried]) -> None:
        """Take what the trial of `plans` showed on all ranks."""
        without = max((each.without for each in tried if each.without is not None), default=None)
        self._done.append(now := _Trial(self.plans, max(each.seconds for each in tried), without))
        if now.is_as_planned:
            self.ended = True
            if now is not self._done[0]:
                self.plans = _saying(self.plans, f"With more offloaded {self._done[0]}.")
            return
        further = self._further() if len(self._done) < TRIES else None
        self.ended = further is None
        self.plans = self._best() if further is None else further

    def _further(self) -> Plans | None:
        """Return other plans, for slower copies; None if they do nothing any more."""
        while self._slower < SLOWEST:
            self._slower *= SLOWER
            plans = plans_of(self._measured, self._limits, self._slower)
            if not _acts(plans):
                return None
            if _acts(plans) != _acts(self.plans):
                return plans
        return None

    def _best(self) -> Plans:
        """Return what to keep if no plan takes as long as expected."""
        first, limits = self._done[0], self._limits
        given = limits.memory_budget, limits.fraction, limits.delta_bytes_per_rank
        nothing = plans_of(self._measured, replace(limits, fraction=0.0))
        if given == (None, None, None) and not _acts(nothing):
            if first.without is not None:
                times = {"seconds": first.without, "baseline_seconds": first.without}
                nothing = tuple(replace(plan, **times) for plan in nothing)
            because = f"Nothing is offloaded, because {first}, although copies should have taken no time."
            return _saying(nothing, because)
        best = min(self._done, key=lambda trial: trial.seconds)
        tried = "With this plan" if len(self._done) == 1 else f"With this plan, the fastest of {len(self._done)},"
        return _saying(best.plans, f"{tried} {best}.")
