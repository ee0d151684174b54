"""What the ranks of a pipeline exchange, and the plans of all of them that follow; every rank makes the same.

`[Note: exchanges]`  All ranks of a pipeline make the same exchanges when one of the first steps begins.  Steps with
backward are counted, and all ranks run the same number.  If a rank has not measured a whole step, all ranks see that,
and try again when the next step begins.  A rank that later runs another order plans anew alone, with what the others
sent before, because they do not know of it.

`[Note: replicas]`  With tensor or data parallelism several pipelines run copies of the same stages, and their ranks
communicate inside of these stages, also in what is recomputed.  So the ranks of one stage must recompute the same:
what the pipelines exchange is exchanged among them, too, and the costs of the first pipeline count for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from .._text import milliseconds, register, size
from ..planner import Variant, plan_pipeline
from ..schedule.costs import LayerCost, Link, Saved, StageCost
from ..schedule.pipeline import Computation, PipelinePlan, Step
from ..tune.exchange import LONE, Exchange
from ..tune.exchange import disagreement as different_arguments
from ..tune.script import fits

T = TypeVar("T")

Plans = tuple[PipelinePlan, ...]
"""Of all ranks, in order."""


@dataclass(frozen=True)
class RankCosts:
    """What one rank knows before all of them plan."""

    rank: int
    order: tuple[Step, ...]
    names: Mapping[int, tuple[str, ...]]  # by stage
    costs: Mapping[int, StageCost]  # by stage
    link: Link
    limit: int | None = None  # bytes of device memory
    again: Mapping[int, Sequence[tuple[Variant, ...]]] | None = None  # by stage and group: the ways to run it


register(RankCosts, Step, Computation, StageCost, LayerCost, Saved, Link, Variant)


def agreed(pipelines: Sequence[Sequence[RankCosts | None]]) -> list[RankCosts] | None:
    """Return what the ranks of pipelines that run the same stages plan with; None if one of them has no whole step.

    The costs are those of the first pipeline; of memory it is the least, and of links the slowest.
    """
    found = []
    for copies in zip(*pipelines, strict=True):
        known = [each for each in copies if each is not None]
        if len(known) < len(copies):
            return None
        limit = min((each.limit for each in known if each.limit is not None), default=None)
        found.append(replace(known[0], limit=limit, link=Link.slowest(each.link for each in known)))
    return found


@dataclass(frozen=True)
class Limits:
    """What the arguments of `offload` allow; None for no limit."""

    fraction: float | None = None  # of the bytes of each microbatch
    max_inflight: int | None = None  # groups that are copied at a time
    delta_bytes_per_rank: int | None = None  # fewer on each rank than on the one before
    memory_budget: int | None = None  # bytes of device memory of each rank
    may_recompute: bool = False  # where the memory is not enough

    @property
    def by_hand(self) -> bool:
        """Whether they say how much is offloaded."""
        given = self.fraction, self.max_inflight, self.delta_bytes_per_rank
        return self.memory_budget is None and given != (None, None, None)


def plans_of(measured: Sequence[RankCosts], limits: Limits, *, whole: bool = False) -> Plans:
    """Return the plans of all ranks: what the arguments ask for if that fits, otherwise the fastest that fit.

    With `whole`, every group is replayed as a whole, and offloaded only where a rank would exceed its memory; there are
    none if no group has another way.
    """
    variants = variants_of(measured)
    if whole and not any(len(group) > 1 for groups in variants.values() for group in groups):
        return ()
    names = {stage: groups for each in measured for stage, groups in each.names.items()}
    costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
    stages, link = [costs[stage] for stage in sorted(costs)], Link.slowest(each.link for each in measured)
    orders = [each.order for each in measured]
    plan = partial(plan_pipeline, orders, stages, link, names=names, max_inflight=limits.max_inflight)
    if limits.by_hand and not whole:
        plans = plan(fraction=limits.fraction, delta_bytes_per_rank=limits.delta_bytes_per_rank)
        if not exceed(plans, measured):
            return plans
    least = min((each.limit for each in measured if each.limit is not None), default=None)
    budgets = [least if each.limit is None else each.limit for each in measured]
    known = [budget for budget in budgets if budget is not None]
    much: dict[str, Any] = {"memory_budget": known} if known else {"fraction": 0.0}
    plans = plan(variants=variants, whole=whole, **much)
    return tuple(
        found if not found.idle or found.because else replace(found, because=fits(found.peak_bytes or 0, budget))
        for found, budget in zip(plans, budgets, strict=True)
    )


def exceed(plans: Plans, measured: Sequence[RankCosts]) -> bool:
    """Return whether one of some plans takes more than its rank may; none does."""
    pairs = zip(plans, measured, strict=False)
    return any(each.limit is not None and (plan.peak_bytes or 0) > each.limit for plan, each in pairs)


def variants_of(measured: Sequence[RankCosts]) -> dict[int, Sequence[tuple[Variant, ...]]]:
    """Return the ways to run the groups of each stage, the first one without recomputation; empty if not measured."""
    return {stage: ways for each in measured for stage, ways in (each.again or {}).items()}


def decision(plans: Plans) -> str:
    """Return what was decided for each rank, in a line for each and one for all."""
    lines = ["The plans of all ranks of the pipeline:"]
    for plan in plans:
        chunks = sum(len(plan.names[step.stage]) for step in plan.order if step.computation is Computation.FORWARD)
        line = f"  rank {plan.rank}: {len(plan.transfers)} of {chunks} groups of all microbatches are offloaded"
        line += f" ({size(plan.offloaded_bytes)})"
        if plan.peak_bytes is not None:
            line += f", peak {size(plan.peak_bytes)}"
        if plan.seconds is not None and plan.baseline_seconds:
            line += f", {milliseconds(plan.seconds)} a step, {milliseconds(plan.baseline_seconds)} without offloading"
        lines.append(f"{line}. {plan.because}".rstrip())
    return "\n".join(lines)


# Exchanges


@dataclass(frozen=True)
class Settings:
    """The arguments of one rank, and what is wrong with them."""

    rank: int  # global
    arguments: Mapping[str, Any]  # those that have to be the same on all ranks
    problem: str = ""
    # Entries of `layers` and `keep`, each with the reason if no stage of this rank has such modules.
    entries: Mapping[str, str] = field(default_factory=dict)


register(Settings)


class PipelineRanks:
    """The exchanges of one rank, which may raise a `LostRankError`; see [Note: exchanges] and [Note: replicas].

    Made where `offload` is called, with the process group of the pipeline.
    """

    def __init__(self, group: Any = None) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if initialized else ()
        self.group, self._pipeline, self._copies = group, Exchange.of("pipeline", ranks), LONE
        self.replicas: tuple[int, ...] = ()  # global ranks that run the same stages

    def meet(self, settings: Settings, replicas: Sequence[int]) -> list[Settings]:
        """Return the settings of all ranks.

        `replicas` are the global ranks that run the stages of this rank, ascending; empty if no others do.  They count
        if there are equally many of each rank of the pipeline.
        """
        self._copies = Exchange.of("stage", replicas)
        own = self._gather(self._pipeline, (settings, tuple(replicas)))
        if len({len(each) for _, each in own}) == 1:
            self.replicas = tuple(replicas)
        else:
            self._copies = LONE
        return [each for ranks in self._gather(self._copies, [each for each, _ in own]) for each in ranks]

    def refuse(self, replicas: Sequence[int]) -> None:
        """Take no part, because something is wrong with the arguments of this rank."""
        self._copies = Exchange.of("stage", replicas)
        self.leave()

    def gather(self, value: T) -> list[list[T]]:
        """Return the values of the ranks of each pipeline that runs these stages, in the order of their ranks."""
        return self._gather(self._copies, self._gather(self._pipeline, value))

    def _gather(self, exchange: Exchange, value: T) -> list[T]:
        return exchange.gather(value, "of the pipeline")

    def leave(self) -> None:
        """Take no further part, and let the others not wait."""
        for exchange in (self._pipeline, self._copies):
            exchange.leave()


def disagreement(settings: Sequence[Settings]) -> str:
    """Return what is wrong with the arguments of the ranks, in words that are the same on each; empty if nothing is."""
    matched = {entry for each in settings for entry, reason in each.entries.items() if not reason}
    for each in settings:
        unmatched = (reason for entry, reason in each.entries.items() if entry not in matched)
        problem = each.problem or next(unmatched, "")
        if problem:
            return f"Rank {each.rank} of the pipeline: {problem}"
    return different_arguments({each.rank: each.arguments for each in settings})
