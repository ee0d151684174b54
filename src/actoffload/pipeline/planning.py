"""From what the ranks exchanged to the plans of all of them; every rank makes the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..planner import Variant, plan_pipeline
from ..planner.variants import recomputed, ways_of
from ..schedule.costs import Link
from ..schedule.pipeline_plan import PipelinePlan
from ..schedule.pipeline_simulation import simulate_pipeline
from ..schedule.timeline import milliseconds, size
from .exchange import Measured

__all__ = ["Limits", "costs_time", "decision", "plans_of", "slowest", "variants_of"]

FREE = 0.01  # of the time of a step


@dataclass(frozen=True)
class Limits:
    """What the arguments of `offload` allow; None for no limit."""

    fraction: float | None = None  # of the bytes of each microbatch
    max_inflight: int | None = None  # groups that are copied at a time
    delta_bytes_per_rank: int | None = None  # fewer on each rank than on the one before
    memory_budget: int | None = None  # bytes of device memory of each rank
    may_recompute: bool = False  # where the memory is not enough


def plans_of(
    measured: Sequence[Measured], limits: Limits, slower: float = 1.0
) -> tuple[tuple[PipelinePlan, ...], list[int]]:
    """Return the plans of all ranks, and the bytes of saved tensors that each has on its device at a time.

    Copies are expected to take `slower` times as long as measured.
    """
    orders, names = [of.order for of in measured], {stage: of for each in measured for stage, of in each.names.items()}
    costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
    stages, link = [costs[stage] for stage in sorted(costs)], slowest([of.link for of in measured], slower)
    budgets = [of.limit for of in measured]
    variants = variants_of(measured)
    plan = partial(plan_pipeline, orders, stages, link, names=names, max_inflight=limits.max_inflight)
    plans: tuple[PipelinePlan, ...] = ()
    if limits.memory_budget is None:
        plans = plan(fraction=limits.fraction, delta_bytes_per_rank=limits.delta_bytes_per_rank)
    if not plans or any(_exceeds(of, limit) for of, limit in zip(plans, budgets, strict=True)):
        least = min(of for of in budgets if of is not None)
        plans = plan(memory_budget=[least if of is None else of for of in budgets], variants=variants)
    ways = ways_of(plans, variants)
    stages = list(recomputed(stages, variants, ways))
    peaks = [rank.peak_bytes for rank in simulate_pipeline(orders, stages, link, plans).ranks]
    return plans, peaks


def costs_time(measured: Sequence[Measured], plans: Sequence[PipelinePlan]) -> bool:
    """Return whether a rank exceeds its memory, or a step takes longer than without offloading to keep within it."""
    slow = any(of.seconds > of.baseline_seconds * (1 + FREE) for of in plans if of.seconds and of.baseline_seconds)
    return slow or any(_exceeds(of, each.limit) for of, each in zip(plans, measured, strict=True))


def variants_of(measured: Sequence[Measured]) -> dict[int, Sequence[tuple[Variant, ...]]]:
    """Return the ways to run the groups of each stage, the first one without recomputation; empty if not measured."""
    return {stage: ways for each in measured for stage, ways in (each.again or {}).items()}


def _exceeds(plan: PipelinePlan, limit: int | None) -> bool:
    return limit is not None and plan.peak_bytes is not None and plan.peak_bytes > limit


def slowest(links: Sequence[Link], slower: float = 1.0) -> Link:
    """Return the lowest rates of all ranks, which wait for each other, divided by a factor."""
    both = [link.both / slower for link in links if link.both is not None]
    return Link(
        min(link.d2h for link in links) / slower,
        min(link.h2d for link in links) / slower,
        max(link.latency for link in links),
        min(both, default=None),
    )


def decision(plans: Sequence[PipelinePlan]) -> str:
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
