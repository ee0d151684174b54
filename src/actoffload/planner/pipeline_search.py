"""Choose what every rank of a pipeline offloads: what levels their peaks at no cost in time, or within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from .._arguments import check_bytes, check_fraction, check_whole
from ..schedule.costs import Link
from ..schedule.pipeline import StageCost, Step
from ..schedule.pipeline_plan import PipelinePlan
from ..schedule.pipeline_rank import Steps
from ..schedule.pipeline_results import RankSimulation
from ..schedule.pipeline_simulation import Pipeline
from ..schedule.timeline import size
from .pipeline_choices import Knobs, RankChoices
from .pipeline_placement import RankPlacement
from .pipeline_profile import RankProfile
from .pipeline_recomputation import StageVariants, Ways, recomputed, saved_by, upgrades

__all__ = ["plan_pipeline"]

MARGINS = 0.05, 0.15, 0.3, 0.6
"""Parts of the time of a copy by which it is expected to be late; the next is tried if the simulation stalls."""

FREE = 0.002
"""Part of the step by which a plan without a cost may take longer."""

TRIALS = 10
"""Extents of recomputation that are tried."""


def plan_pipeline(
    orders: Sequence[Sequence[Step]],
    stages: Sequence[StageCost],
    link: Link,
    *,
    names: Mapping[int, Sequence[str]] | None = None,
    fraction: float | None = None,
    delta_bytes_per_rank: int | None = None,
    max_inflight: int | None = None,
    memory_budget: int | Sequence[int] | None = None,
    variants: StageVariants | None = None,
    send_latency: float = 0.0,
    send_bandwidth: float = inf,
) -> tuple[PipelinePlan, ...]:
    """Return what each rank of a pipeline offloads, and when.

    By default each rank offloads the least that levels the peaks of all ranks as low as is possible without a cost in
    time: a rank that needs less memory than the level offloads nothing.

    Parameters
    ----------
    orders, stages, link, send_latency, send_bandwidth
        As in `simulate_pipeline`.
    names : mapping of int to sequence of str, optional
        Names of the groups of each stage; by default their numbers.
    fraction : float, optional
        Fraction of the bytes of each microbatch to offload, if there is time to copy them.  The peaks are not leveled
        then.
    delta_bytes_per_rank : int, optional
        Of each microbatch rank `r` offloads at least ``r * delta_bytes_per_rank`` bytes less than all, or than
        `fraction`.  The peaks are not leveled then.
    max_inflight : int, optional
        Groups that are copied to the host at a time, at most; what would be one more is kept.
    memory_budget : int or sequence of int, optional
        Bytes of device memory of each rank.  Each rank offloads the least that keeps within it, at a cost in time if
        there is no other way.
    variants : mapping, optional
        Ways to run the groups with recomputation, the first without; they are used only where a budget cannot be
        reached without a cost in time, and only if they cost less.

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
    >>> plans = plan_pipeline(orders, [StageCost((group,) * 4)] * 4, Link(d2h=10e9, h2d=10e9))
    >>> [plan.peak_bytes >> 20 for plan in plans]  # MiB; without offloading 4096, 3072, 2048 and 1024
    [2816, 2816, 2048, 1024]
    """
    check_whole(optional=True, max_inflight=max_inflight)
    check_bytes(optional=True, delta_bytes_per_rank=delta_bytes_per_rank)
    if max_inflight is not None and max_inflight < 1:
        raise ValueError(f"max_inflight is {max_inflight}; expected a number of groups, at least 1.")
    if fraction is not None:
        check_fraction(fraction)
    budgets: Sequence[int | None]
    budgets = memory_budget if isinstance(memory_budget, Sequence) else [memory_budget] * len(orders)
    if len(budgets) != len(orders):
        raise ValueError(f"memory_budget has {len(budgets)} entries for {len(orders)} ranks; give one for each.")
    for budget in budgets:
        check_bytes(optional=True, memory_budget=budget)
    run = partial(Pipeline, orders, link=link, send_latency=send_latency, send_bandwidth=send_bandwidth)
    knobs = Knobs(fraction, delta_bytes_per_rank, max_inflight)
    search = _Search(orders, stages, run, knobs, variants or {})
    search.recompute(budgets)
    return search.plans(search.best(budgets), names or {})


class _Search:
    """The ranks, and their stages as they are run."""

    def __init__(
        self,
        orders: Sequence[Sequence[Step]],
        stages: Sequence[StageCost],
        run: Callable[[Sequence[StageCost]], Pipeline],
        knobs: Knobs,
        variants: StageVariants,
    ) -> None:
        self.orders, self.plain, self.run = [tuple(order) for order in orders], tuple(stages), run
        self.knobs, self.variants = knobs, variants
        self.ways: Ways = {}
        self._use(self.ways)
        self.baseline_seconds = self.seconds

    def _use(self, ways: Ways) -> None:
        """Run the pipeline without offloading, with groups recomputed in some ways."""
        self.ways, self.stages = ways, recomputed(self.plain, self.variants, ways)
        self.pipeline = self.run(self.stages)
        ranks = self.pipeline.run([{}] * len(self.orders))
        self.seconds = max((rank.end for rank in ranks), default=0.0)
        self.profiles = [
            RankProfile.of(order, of.starts, self.pipeline.times, self.pipeline.link)
            for order, of in zip(self.orders, ranks, strict=True)
        ]

    def _choices(self, rank: int, margin: float = MARGINS[0]) -> RankChoices:
        return RankChoices(self.profiles[rank], rank, self.knobs, margin)

    def recompute(self, budgets: Sequence[int | None]) -> None:
        """Recompute groups of the ranks that can reach their budgets so at a lower cost than by offloading alone."""
        for rank, budget in enumerate(budgets):
            before = self.ways
            steps = upgrades(self.variants, {step.stage for step in self.orders[rank]})
            if budget is None or len(steps) == 1:
                continue
            best, least = before, inf
            some = max((len(steps) - 1) // TRIALS, 1)
            for ways in (steps[0], *steps[1:-1:some], steps[-1]):
                self._use({**before, **ways})
                if self.seconds >= least:
                    break
                seconds = self._seconds(rank, budget)
                if seconds < least:
                    best, least = self.ways, seconds
            self._use(best if least < inf else {**before, **steps[-1]})

    def _seconds(self, rank: int, budget: int) -> float:
        """Return the time of a step in which one rank keeps within its budget; infinite if it cannot."""
        choices = self._choices(rank)
        if choices.free(choices.lowest()).peak_bytes <= budget:
            return self.seconds
        found = choices.within(budget, partial(self._alone, rank))
        return inf if found is None else found[1]

    def _alone(self, rank: int, placement: RankPlacement) -> float:
        """Return the time of a step in which one rank offloads."""
        actions: list[Steps] = [{} for _ in self.orders]
        actions[rank] = self._plan(rank, placement).actions
        return max(of.end for of in self.pipeline.run(actions))

    def best(self, budgets: Sequence[int | None]) -> list[tuple[RankPlacement, str]]:
        """Return what each rank does, and why; with more room for delays of copies if the simulation has stalls."""
        found: list[tuple[RankPlacement, str]] = []
        for margin in MARGINS:
            self.free = True
            found = self._placements([self._choices(rank, margin) for rank in range(len(self.orders))], budgets)
            if not self.free or self._simulated(found)[1] <= self.seconds * (1 + FREE):
                break
        return found

    def _placements(
        self, ranks: Sequence[RankChoices], budgets: Sequence[int | None]
    ) -> list[tuple[RankPlacement, str]]:
        free = [of.everything() if self.knobs.given else of.free(of.lowest()) for of in ranks]
        level = max((of.peak_bytes for of in free), default=0)
        found = []
        for number, (rank, lowest, budget) in enumerate(zip(ranks, free, budgets, strict=True)):
            if budget is not None and lowest.peak_bytes > budget:
                found.append(self._costly(number, rank, lowest.peak_bytes, budget))
            elif self.knobs.given:
                found.append((lowest, ""))
            else:
                because = f"No rank needs more than {size(level)}." if budget is None else ""
                found.append((rank.reaching(level if budget is None else budget), because))
        return found

    def _costly(self, number: int, rank: RankChoices, free: int, budget: int) -> tuple[RankPlacement, str]:
        """Return what a rank does that cannot keep within its budget without a cost."""
        self.free = False
        found = rank.within(budget, partial(self._alone, number))
        if found is None:
            because = f"No plan of this rank is within the limit of {size(budget)}; this one has the smallest peak."
            return rank.smallest(), because
        return found[0], f"Without a cost in time the peak would be {size(free)}, above the limit of {size(budget)}."

    def _simulated(self, found: Sequence[tuple[RankPlacement, str]]) -> tuple[Sequence[RankSimulation], float]:
        ranks = self.pipeline.run([self._plan(rank, of).actions for rank, (of, _) in enumerate(found)])
        return ranks, max((rank.end for rank in ranks), default=0.0)

    def _plan(
        self, rank: int, placement: RankPlacement, names: Mapping[int, Sequence[str]] | None = None
    ) -> PipelinePlan:
        mine = sorted({step.stage for step in self.orders[rank]})
        saves = saved_by(self.stages, self.variants, self.ways)
        numbers = {stage: tuple(map(str, range(len(self.stages[stage].groups)))) for stage in mine}
        return PipelinePlan(
            rank,
            self.orders[rank],
            {stage: tuple((names or {}).get(stage, numbers[stage])) for stage in mine},
            placement.transfers(),
            {stage: bool(self.stages[stage].splits) for stage in mine},
            {stage: tuple(cost.nbytes for cost in self.stages[stage].groups) for stage in mine},
            {stage: saves[stage] for stage in mine if stage in saves},
        )

    def plans(
        self, found: Sequence[tuple[RankPlacement, str]], names: Mapping[int, Sequence[str]]
    ) -> tuple[PipelinePlan, ...]:
        """Return the plans with what they are expected to cost."""
        ranks, seconds = self._simulated(found)
        return tuple(
            replace(
                self._plan(number, placement, names),
                seconds=seconds,
                baseline_seconds=self.baseline_seconds,
                peak_bytes=ranks[number].device_peak_bytes,
                because=because,
            )
            for number, (placement, because) in enumerate(found)
        )
