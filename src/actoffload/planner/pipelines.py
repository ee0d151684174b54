"""Choose what every rank of a pipeline offloads: as much as is asked for at no cost in time, or within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._arguments import check_fraction, check_kind, check_whole, number_of_bytes
from .._text import size
from ..schedule.costs import Link, StageCost
from ..schedule.pipeline import PipelinePlan, Step
from ..schedule.simulate import check_pipeline
from .placement import Placement
from .search import Choices, Knobs, Ranks
from .variants import StageVariants, by_stage

FREE = 0.002
"""Part of the step by which a plan without a cost may take longer."""


def plan_pipeline(
    orders: Sequence[Sequence[Step]],
    stages: Sequence[StageCost],
    link: Link,
    *,
    names: Mapping[int, Sequence[str]] | None = None,
    fraction: float | None = None,
    delta_bytes_per_rank: int | str | None = None,
    max_inflight: int | None = None,
    memory_budget: int | str | Sequence[int | str] | None = None,
    variants: StageVariants | None = None,
    whole: bool = False,
) -> tuple[PipelinePlan, ...]:
    """Return what each rank of a pipeline offloads, and when.

    Without a budget, a fraction or another limit nothing is offloaded.

    Parameters
    ----------
    orders, stages, link
        As in `simulate_pipeline`.
    names : mapping of int to sequence of str, optional
        Names of the groups of each stage; by default their numbers.
    fraction : float, optional
        Fraction of the bytes of each microbatch to offload, if there is time to copy them.
    delta_bytes_per_rank : int or str, optional
        Of each microbatch rank `r` offloads at least ``r * delta_bytes_per_rank`` bytes less than all, or than
        `fraction`.
    max_inflight : int, optional
        Groups that are copied to the host at a time, at most, from the start of their forward; what would be one more
        is kept.  Reloads are not limited.
    memory_budget : int, str or sequence of these, optional
        Device memory of each rank: bytes, or text such as ``"24GiB"``.  Each rank offloads the least that keeps within
        it, at a cost in time if there is no other way.
    variants : mapping, optional
        Ways to run the groups with recomputation, the first without; they are used only where a budget cannot be
        reached without a cost in time, and only if they cost less.
    whole : bool
        Whether every group is run in the last of its ways, as activation checkpointing runs it.

    Returns
    -------
    tuple of PipelinePlan
        One for each rank, the same on every rank that calls this with the same arguments.  If a rank cannot keep
        within its budget, its plan has the smallest peak that was found, and `PipelinePlan.because` says so.

    Examples
    --------
    >>> from actoffload.planner import plan_pipeline
    >>> from actoffload.schedule import LayerCost, Link, StageCost, one_f_one_b
    >>> group = LayerCost.even(2**28, forward=0.010, backward=0.020)
    >>> orders = one_f_one_b(ranks=4, microbatches=16)
    >>> plans = plan_pipeline(
    ...     orders, [StageCost((group,) * 4)] * 4, Link(d2h=10e9, h2d=10e9), memory_budget="1792MiB"
    ... )
    >>> [plan.peak_bytes >> 20 for plan in plans]  # MiB; without offloading 4096, 3072, 2048 and 1024
    [1792, 1792, 1792, 1024]
    """
    check_pipeline(orders, stages, link)
    if names is not None:
        check_kind(Mapping, names=names)
    if variants is not None:
        check_kind(Mapping, variants=variants)
    check_whole(max_inflight=max_inflight, optional=True, least=1)
    delta = number_of_bytes("delta_bytes_per_rank", delta_bytes_per_rank, optional=True)
    if fraction is not None:
        check_fraction(fraction)
    budgets: Sequence[Any] = [memory_budget] * len(orders)
    if isinstance(memory_budget, Sequence) and not isinstance(memory_budget, str):
        budgets = memory_budget
    if len(budgets) != len(orders):
        raise ValueError(f"memory_budget has {len(budgets)} entries for {len(orders)} ranks; give one for each.")
    budgets = [number_of_bytes("memory_budget", budget, optional=True) for budget in budgets]
    knobs = Knobs(fraction, delta, max_inflight, whole=whole)
    ranks = Ranks(orders, stages, link, variants or {}, knobs)
    for rank, budget in enumerate(budgets):
        if budget is not None and variants:
            ranks.recompute(rank, budget, FREE)
    allowed = ranks.seconds * (1 + FREE)
    found = [_chosen(each, budget, allowed) for each, budget in zip(ranks.choices, budgets, strict=True)]
    return _plans(ranks, found, names or {})


RankChoice = tuple[Placement, str]
"""What a rank does, and why."""


def _chosen(rank: Choices, budget: int | None, allowed: float) -> RankChoice:
    """Return what a rank does, and why."""
    knobs = rank.knobs
    if budget is None and not knobs.given and knobs.max_inflight is None:
        return rank.nothing, ""
    if budget is None or (knobs.given and rank.free.peak_bytes <= budget):
        return rank.free, ""
    found, limit = rank.within(budget, allowed), f"is within the limit of {size(budget)}"
    if found is None:
        return rank.smallest(), f"No plan of this rank {limit}; this one has the smallest peak."
    return found[0], "" if found[1] <= allowed else f"No plan of this rank without a cost in time {limit}."


def _plans(ranks: Ranks, found: Sequence[RankChoice], names: Mapping[int, Sequence[str]]) -> tuple[PipelinePlan, ...]:
    """Return the plans with what they are expected to cost."""
    runs, seconds = ranks.simulated([placement for placement, _ in found])
    costs = [times.cost for times in ranks.pipeline.times]
    saves = {
        stage: tuple(group[ways.get(k, 0)].saves for k, group in enumerate(ranks.variants[stage]))
        for stage, ways in by_stage(ranks.ways).items()
    }
    plans = []
    for number, (order, (placement, because), run) in enumerate(zip(ranks.orders, found, runs, strict=True)):
        mine = {stage: costs[stage] for stage in sorted({step.stage for step in order})}
        plans.append(
            PipelinePlan(
                number,
                order,
                {stage: tuple(names.get(stage, map(str, range(len(cost.groups))))) for stage, cost in mine.items()},
                placement.transfers(),
                {stage: bool(cost.splits) for stage, cost in mine.items()},
                {stage: tuple(group.nbytes for group in cost.groups) for stage, cost in mine.items()},
                {stage: saves[stage] for stage in mine if stage in saves},
                seconds=seconds,
                baseline_seconds=ranks.baseline_seconds,
                peak_bytes=run.peak,
                saved_peak_bytes=run.saved_peak,
                because=because,
            )
        )
    return tuple(plans)
