"""From what the ranks exchanged to the plans of all of them; every rank makes the same.

`[Note: trial of the plans]`  The first steps measure groups and copies, each for itself.  Whether a whole step takes as
long as was simulated for them is known only when it has run.  So the plans are tried.  If plans that should cost
nothing cost time in the trial, nothing is offloaded.  Where memory or the arguments ask for a cost, they are kept.
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

__all__ = [
    "Limits",
    "Plans",
    "act",
    "after_trial",
    "costs_time",
    "decision",
    "plans_of",
    "variants_of",
]

FREE = 0.01  # of the time of a step

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


def plans_of(measured: Sequence[Measured], limits: Limits) -> Plans:
    """Return the plans of all ranks."""
    names = {stage: groups for each in measured for stage, groups in each.names.items()}
    costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
    stages, link = [costs[stage] for stage in sorted(costs)], Link.slowest(each.link for each in measured)
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


def act(plans: Plans) -> bool:
    """Return whether a rank offloads or recomputes anything."""
    return any(plan.transfers or plan.saves for plan in plans)


def after_trial(plans: Plans, tried: Sequence[Tried], measured: Sequence[Measured], limits: Limits) -> Plans:
    """Return what to keep after all ranks have tried their plans: these, or those that offload nothing."""
    seconds = max(each.seconds for each in tried)
    without = max((each.without for each in tried if each.without is not None), default=None)
    planned = max(plan.seconds or 0.0 for plan in plans)
    expected = planned * (1 + FREE) if without is None else (_expected(plans) + FREE) * without
    if seconds <= expected:
        return plans
    beside = f"planned were {milliseconds(planned)}"
    if without is not None:
        beside = f"without offloading {milliseconds(without)}"
    took, nothing = f"a step took {milliseconds(seconds)}, {beside}", plans_of(measured, replace(limits, fraction=0.0))
    given = limits.memory_budget, limits.fraction, limits.delta_bytes_per_rank
    if given != (None, None, None) or act(nothing):
        return _saying(plans, f"With this plan {took}.")
    if without is not None:
        nothing = tuple(replace(plan, seconds=without, baseline_seconds=without) for plan in nothing)
    return _saying(nothing, f"Nothing is offloaded, because {took}, although copies should have taken no time.")


def _expected(plans: Plans) -> float:
    """Return the time of a step over that of one without offloading, as simulated."""
    times = [(plan.seconds, plan.baseline_seconds) for plan in plans]
    return max(seconds / without if seconds and without else 1.0 for seconds, without in times)


def _saying(plans: Plans, because: str) -> Plans:
    """Return plans with a further reason."""
    return tuple(replace(plan, because=f"{plan.because} {because}".strip()) for plan in plans)
