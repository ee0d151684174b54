"""Choose the plan of a model, and those of the ranks of a pipeline: the fastest within a limit of memory.

Without a limit, or if everything fits, nothing is offloaded and nothing recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

from .._arguments import (
    check_bytes,
    check_fits,
    check_fraction,
    check_kind,
    check_kinds,
    check_limit,
    check_seconds,
    check_whole,
    number_of_bytes,
)
from .._text import size
from ..schedule.costs import Link, StageCost
from ..schedule.pipeline import PipelinePlan, Step
from ..schedule.plan import Plan
from ..schedule.simulate import check_pipeline, model_order, model_plan, model_stages, simulate
from .placement import ROUNDING, Knobs, Placement, Profile
from .search import Ranks, StageVariants
from .variants import Variant

NEAR = 0.002  # of the smallest peak, without what is always allocated: plans that differ by less have about the same
WORTH = 0.02  # of the time of a plan, by which one is faster that runs operators more often: the host's time counts too
FREE = 0.002  # of the step, by which a plan of a pipeline without a cost may take longer

LEANEST = "This is about the smallest peak that a plan reaches."
FASTEST = "This is the fastest plan that was found with at most this peak."


def choose(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    *,
    limit: int | None = None,
    host_seconds: float = 0.0,
    without_bytes: int | None = None,
    excess: int = 0,
    host_limit: int | None = None,
    whole: bool = False,
) -> Plan:
    """Return the fastest plan within a limit, in which groups are kept, offloaded, recomputed, or both of the latter.

    If no plan is within the limit, it is the fastest with about the smallest peak.

    Parameters
    ----------
    names : sequence of str
        The groups, in execution order.
    groups : sequence of sequence of Variant
        The ways to run each group; the first is without recomputation.
    link : Link
        How fast copies are.
    limit : int, optional
        Bytes of device memory in forward and backward; None for no limit.
    host_seconds : float
        Seconds that the host spends on each saved tensor of an offloaded group, in forward and again in backward.
    without_bytes : int, optional
        Peak of device memory without offloading as it was measured, for the reason; None to take what the costs add up
        to.
    excess : int
        Bytes by which a pass may take more device memory than the costs add up to; the plan leaves room for them
        within the limit.
    host_limit : int, optional
        Bytes of host memory for what is offloaded in one step; None for no limit.
    whole : bool
        Whether every group is run in the last of its ways, as activation checkpointing runs it.

    Returns
    -------
    Plan
        The plan, with its expected time and peak, and the reason in ``because``.

    Raises
    ------
    ValueError
        If there are not as many names as groups, or none.

    Examples
    --------
    >>> from actoffload.planner import Variant, choose
    >>> from actoffload.schedule import LayerCost, Link
    >>> plain = LayerCost.even(2**30, forward=0.010, backward=0.020)
    >>> recomputed = LayerCost.even(2**28, forward=0.010, backward=0.024)
    >>> group = (Variant(plain), Variant(recomputed, saves=("aten.mm.default#0",)))
    >>> plan = choose("abcdefgh", [group] * 8, Link(d2h=5e10, h2d=5e10), limit=3 * 2**30)
    >>> plan.peak_bytes <= 3 * 2**30, len(plan.recomputed) > 0, plan.seconds < 0.30
    (True, True, True)
    """
    models = _models(names, groups, link, host_seconds, host_limit, whole=whole)
    check_limit(limit=limit)
    if without_bytes is not None:
        check_bytes(without_bytes=without_bytes)
    check_fits("a number of bytes", isfinite, excess=excess)
    most = inf if limit is None else limit - excess
    without = models[0].baseline_peaks[0] if without_bytes is None else without_bytes
    plan = _best(models, most)
    because = ""
    if (plan.peak_bytes or 0) > most:
        because = f"No plan is within the limit of {size(limit or 0)}; this one has the smallest peak."
    elif without > most and (plan.recomputed or plan.offloaded):
        action = "offloading and recomputing" if plan.recomputed else "offloading"
        because = f"Without {action} the peak would be {size(without)}, above the limit of {size(limit or 0)}."
    return replace(plan, because=because, baseline_peak_bytes=without)


def frontier(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    *,
    host_seconds: float = 0.0,
    host_limit: int | None = None,
    points: int = 16,
) -> tuple[Plan, ...]:
    """Return plans from the smallest peak to that without offloading, each faster than those before it.

    ``because`` says what each plan is among them, and names no limit, because none was given.

    Parameters
    ----------
    names, groups, link, host_seconds, host_limit
        As in `choose`.
    points : int
        Number of limits of device memory, at equal distances, for which a plan is searched.

    Examples
    --------
    >>> from actoffload.planner import Variant, frontier
    >>> from actoffload.schedule import LayerCost, Link
    >>> group = (Variant(LayerCost.even(2**30, forward=0.010, backward=0.020)),)
    >>> for plan in frontier(["a", "b", "c", "d"], [group] * 4, Link(d2h=5e10, h2d=5e10), points=4):
    ...     print(f"{plan.peak_bytes / 2**30:.2f} GiB {plan.seconds * 1e3:.0f} ms")
    1.00 GiB 170 ms
    2.00 GiB 134 ms
    3.00 GiB 120 ms
    """
    models = _models(names, groups, link, host_seconds, host_limit)
    check_whole(points=points, least=1)
    leanest, kept = _best(models, 0), _best(models, inf)
    low, high = leanest.peak_bytes or 0, kept.peak_bytes or 0
    limits = [low + (high - low) * k // max(points - 1, 1) for k in range(1, points - 1)]
    between = (replace(_best(models, limit), because=FASTEST) for limit in limits)
    plans = [replace(leanest, because=LEANEST), *between, replace(kept, because="This plan offloads nothing.")]
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.seconds)):
        if not found or (plan.seconds or 0.0) < (found[-1].seconds or 0.0):
            found.append(plan)
    return tuple(found)


def _models(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    host_seconds: float,
    host_limit: int | None,
    *,
    whole: bool = False,
) -> list[_Model]:
    """Return the model with all that is made again held until its last use, and without, if that is not the same."""
    check_kinds(str, names=names)
    check_kind(Link, link=link)
    check_seconds(host_seconds=host_seconds)
    check_limit(host_limit=host_limit)
    check_kinds(Sequence, groups=groups)
    for number, group in enumerate(groups):
        check_kinds(Variant, optional=False, **{f"groups[{number}]": group})
    if not names or len(names) != len(groups) or not all(groups):
        raise ValueError(
            f"There are {len(names)} names and {len(groups)} groups; give one name and at least one Variant for each."
        )
    given = link, host_seconds, Knobs(host_limit=host_limit, whole=whole)
    lean = _Model(names, groups, *given, holds=False)
    if not any(way.held for group in groups for way in group):
        return [lean]
    held = [[replace(way, cost=way.held or way.cost) for way in group] for group in groups]
    return [_Model(names, held, *given, holds=True), lean]


def _best(models: Sequence[_Model], limit: float) -> Plan:
    """Return the fastest plan within a limit, or with about the smallest peak; its reason is not known yet.

    Held values need memory in which other values could stay.  So both ways are searched where holding costs time.
    """
    plan = models[0].best(limit)
    fits, worth = (plan.peak_bytes or 0) <= limit, (plan.seconds or 0.0) * (1 - WORTH)
    if len(models) == 1 or (fits and worth <= (plan.baseline_seconds or 0.0)):
        return plan
    lean = models[1].best(limit)
    return lean if not fits or (lean.seconds or 0.0) < worth else plan


class _Model(Ranks):
    """The search of plans of a model, which is a pipeline of one rank with a stage for each group."""

    def __init__(
        self,
        names: Sequence[str],
        groups: Sequence[Sequence[Variant]],
        link: Link,
        host_seconds: float,
        knobs: Knobs,
        *,
        holds: bool,
    ) -> None:
        stages, variants = model_stages([group[0].cost for group in groups]), dict(enumerate([each] for each in groups))
        super().__init__([model_order(len(groups))], stages, link, variants, knobs, host_seconds)
        self._names, self._host_seconds, self._holds = tuple(names), host_seconds, holds

    def best(self, limit: float) -> Plan:
        """Return the fastest plan within a limit, or with about the smallest peak."""
        self.reset()
        if self.profiles[0].peak_bytes <= limit:
            return self._described(self.profiles[0].nothing)
        self.recompute(0, limit, ROUNDING)
        least = self.profiles[0].leanest()
        if least > limit:
            # Of the plans with about the smallest peak the fastest is taken.
            always = min(level for stage in self.plain for level in stage.groups[0].other_bytes)
            limit = math.ceil(least + NEAR * (least - always))
            self.recompute(0, limit, ROUNDING)
        found = self.profiles[0].within(limit, self.seconds * (1 + ROUNDING))
        return self._described(self.profiles[0].smallest() if found is None else self._leaner(*found))

    def _leaner(self, best: Placement, seconds: float) -> Placement:
        """Return a placement that takes no longer, with about the smallest peak: other passes may need more memory."""
        profile, allowed = self.profiles[0], seconds * (1 + ROUNDING)
        low = profile.leanest()
        while best.peak_bytes - low > max(best.peak_bytes >> 6, 1):
            middle = (low + best.peak_bytes) // 2
            found = profile.within(middle, seconds, allowed)
            low, best = (middle, best) if found is None else (low, found[0])
        return best

    def _described(self, placement: Placement) -> Plan:
        """Return a plan with what is expected of it, with groups in the ways that are used."""
        taken = [self.taken(stage)[0] for stage in range(len(self.plain))]
        found = model_plan(len(taken), placement.actions())
        costs = [way.cost for way in taken]
        expected = simulate(found, costs, self.pipeline.link, host_seconds=self._host_seconds)
        pairs = [(cost, stage.groups[0]) for cost, stage in zip(costs, self.plain, strict=True)]
        return replace(
            found,
            names=self._names,
            nbytes=tuple(cost.nbytes for cost in costs),
            seconds=expected.step_time,
            baseline_seconds=self.baseline_seconds,
            peak_bytes=expected.device_peak_bytes,
            recomputed_nbytes=tuple(max(plain.nbytes - cost.nbytes, 0) for cost, plain in pairs) if self.ways else (),
            recompute_seconds=max(sum(cost.backward - plain.backward for cost, plain in pairs), 0.0),
            saves=tuple(way.saves for way in taken) if self.ways else (),
            holds=self._holds and any(way.held for way in taken),
        )


# Pipelines


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
    found = [_chosen(each, knobs, budget, allowed) for each, budget in zip(ranks.profiles, budgets, strict=True)]
    runs = ranks.pipeline.run([placement.actions() for placement, _ in found])
    seconds = max((run.compute for run in runs), default=0.0)
    plans = []
    for number, (order, (placement, because), run) in enumerate(zip(ranks.orders, found, runs, strict=True)):
        mine = sorted({step.stage for step in order})
        costs = {stage: ranks.pipeline.times[stage].cost for stage in mine}
        titles = {stage: map(str, range(len(cost.groups))) for stage, cost in costs.items()}
        saves = {stage: tuple(way.saves for way in ranks.taken(stage)) for stage in mine}
        plans.append(
            PipelinePlan(
                number,
                order,
                {stage: tuple((names or titles).get(stage, titles[stage])) for stage in mine},
                placement.transfers(),
                {stage: cost.split for stage, cost in costs.items()},
                {stage: tuple(group.nbytes for group in cost.groups) for stage, cost in costs.items()},
                {stage: each for stage, each in saves.items() if any(saved is not None for saved in each)},
                seconds=seconds,
                baseline_seconds=ranks.baseline_seconds,
                peak_bytes=run.peak,
                saved_peak_bytes=run.saved_peak,
                because=because,
            )
        )
    return tuple(plans)


def _chosen(rank: Profile, knobs: Knobs, budget: int | None, allowed: float) -> tuple[Placement, str]:
    """Return what a rank does, and why."""
    by_hand = knobs.fraction is not None or knobs.delta_bytes is not None
    if budget is None and not by_hand and knobs.max_inflight is None:
        return rank.nothing, ""
    if budget is None or (by_hand and rank.free.peak_bytes <= budget):
        return rank.free, ""
    found, limit = rank.within(budget, allowed), f"is within the limit of {size(budget)}"
    if found is None:
        return rank.smallest(), f"No plan of this rank {limit}; this one has the smallest peak."
    return found[0], "" if found[1] <= allowed else f"No plan of this rank without a cost in time {limit}."
