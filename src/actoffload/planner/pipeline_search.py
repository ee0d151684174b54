"""Choose what every rank of a pipeline offloads: what levels their peaks at no cost in time, or within a budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from typing import Any

from .._arguments import check_fraction, check_kind, check_max_inflight, number_of_bytes
from .._text import size
from ..schedule.costs import Link
from ..schedule.pipeline import StageCost, Step
from ..schedule.pipeline_plan import Actions, PipelinePlan
from ..schedule.run import RankRun
from ..schedule.simulate import Pipeline, check_pipeline
from .pipeline_placement import RankPlacement, RankProfile, place_rank
from .variants import StageVariants, Ways, recomputed, saved_by, upgrades

__all__ = ["Knobs", "RankChoices", "plan_pipeline"]

MARGINS = 0.05, 0.15, 0.3, 0.6
"""Parts of the time of a copy by which it is expected to be late; the next is tried if the simulation stalls."""

FREE = 0.002
"""Part of the step by which a plan without a cost may take longer."""

EXTENTS = 10
"""Extents of recomputation that are tried."""

PRECISION = 64
"""The level of the peaks is found within this part of it."""

COSTS = "No plan of this rank"
"""How the reason for a plan begins that costs time or exceeds its budget; more margin for its copies does not help."""


FEW, TRIALS = 3, 12
"""Numbers of parts that are tried for a limit: the fewest that fit, and others."""


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
    delta_bytes_per_rank : int or str, optional
        Of each microbatch rank `r` offloads at least ``r * delta_bytes_per_rank`` bytes less than all, or than
        `fraction`.  The peaks are not leveled then.
    max_inflight : int, optional
        Groups that are copied to the host at a time, at most, from the start of their forward; what would be one more
        is kept.  Reloads are not limited.
    memory_budget : int, str or sequence of these, optional
        Device memory of each rank: bytes, or text such as ``"24GiB"``.  Each rank offloads the least that keeps within
        it, at a cost in time if there is no other way.
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
    [1792, 1792, 1792, 1024]
    """
    check_pipeline(orders, stages, link, send_latency, send_bandwidth)
    if names is not None:
        check_kind(Mapping, names=names)
    if variants is not None:
        check_kind(Mapping, variants=variants)
    check_max_inflight(max_inflight)
    delta = number_of_bytes("delta_bytes_per_rank", delta_bytes_per_rank, optional=True)
    if fraction is not None:
        check_fraction(fraction)
    budgets: Sequence[Any] = [memory_budget] * len(orders)
    if isinstance(memory_budget, Sequence) and not isinstance(memory_budget, str):
        budgets = memory_budget
    if len(budgets) != len(orders):
        raise ValueError(f"memory_budget has {len(budgets)} entries for {len(orders)} ranks; give one for each.")
    budgets = [number_of_bytes("memory_budget", budget, optional=True) for budget in budgets]
    run = partial(Pipeline, orders, link=link, send_latency=send_latency, send_bandwidth=send_bandwidth)
    knobs = Knobs(fraction, delta, max_inflight)
    search = _Search(orders, stages, run, knobs, variants or {})
    search.recompute(budgets)
    return search.plans(search.best(budgets), names or {})


# Placements of one rank


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the user allows; None for no limit."""

    fraction: float | None = None  # of the bytes of each microbatch that may be offloaded
    delta_bytes: int | None = None  # fewer of each microbatch on each rank than on the one before
    max_inflight: int | None = None  # groups that may be copied to the host at a time

    @property
    def given(self) -> bool:
        """Whether they say how much is offloaded."""
        return self.fraction is not None or self.delta_bytes is not None


@dataclass
class RankChoices:
    """The placements of one rank."""

    profile: RankProfile
    rank: int  # its number
    knobs: Knobs
    margin: float  # as in `place_rank`

    def __post_init__(self) -> None:
        kinds, candidates = self.profile.kinds(), self.profile.candidates
        each = [candidates[members[0]].nbytes for _, members in kinds]
        room = sum(each) * (1.0 if self.knobs.fraction is None else self.knobs.fraction)
        room -= self.rank * (self.knobs.delta_bytes or 0)
        possible, idle = list[list[int]](), list[list[int]]()
        for nbytes, (seconds, members) in zip(each, kinds, strict=True):
            if nbytes <= room:
                room -= nbytes
                possible.append(members)
                idle += [members] if seconds > 0 else []
        self.parts, self._idle = self.profile.parts(possible), self.profile.parts(idle)

    def _place(self, parts: Sequence[Sequence[int]], limit: float = inf) -> list[RankPlacement]:
        """Return the placements of some parts: chunks stay between their two backwards, or are freed there, too."""
        chosen = [k for part in parts for k in part]
        split = [k for k in chosen if self.profile.candidates[k].split]
        how: dict[str, Any] = {"margin": self.margin, "max_inflight": self.knobs.max_inflight}
        freed_twice: Sequence[Sequence[int]] = ((), split) if split else ((),)
        return [place_rank(self.profile, chosen, again, limit, **how) for again in freed_twice]

    @cached_property
    def free(self) -> RankPlacement:
        """The placement of all for which there is time."""
        return min(self._place(self._idle), key=lambda placement: placement.peak_bytes)

    def within(
        self, limit: int, seconds: Callable[[RankPlacement], float], free: float
    ) -> tuple[RankPlacement, float] | None:
        """Return the placement within a limit that takes the least time, and that time; None if there is none.

        Of those that take at most `free` seconds it is the one of the fewest parts.
        """
        if self.profile.peak_bytes <= limit:
            placement = RankPlacement(self.profile, list(self.profile.needs))
            return placement, seconds(placement)
        count, found = len(self.parts), None
        least = bisect_left(range(1, count + 1), True, key=lambda number: self._smallest(number, limit) <= limit) + 1
        numbers = (*range(least, least + FEW), *range(least + FEW, count, max(count // TRIALS, 1)), count)
        placed = (self._place(self.parts[:number], limit) for number in dict.fromkeys(numbers) if number <= count)
        for placement in chain(chain.from_iterable(placed), (self.free,)):
            if placement.peak_bytes > limit:
                continue
            took = seconds(placement)
            if found is None or took < found[1]:
                found = placement, took
            if took <= free:
                return found
        return found

    def _smallest(self, number: int, limit: int) -> int:
        return min(placement.peak_bytes for placement in self._place(self.parts[:number], limit))

    def smallest(self) -> RankPlacement:
        """Return the placement with the smallest peak that can be had at any cost."""
        return min(self._place(self.parts, 0), key=lambda placement: placement.peak_bytes)


# The search

Chosen = tuple[RankPlacement, str]
"""What a rank does, and why."""


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
        ranks = self.pipeline.run([{}] * len(self.orders), record=True)
        self.seconds = max((rank.compute for rank in ranks), default=0.0)
        self.profiles = [
            RankProfile.of(order, rank, self.pipeline.times, self.pipeline.link)
            for order, rank in zip(self.orders, ranks, strict=True)
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
            some = max((len(steps) - 1) // EXTENTS, 1)
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
        found = self._choices(rank).within(budget, partial(self._alone, rank), self.allowed)
        return inf if found is None else found[1]

    def _alone(self, rank: int, placement: RankPlacement) -> float:
        """Return the time of a step in which one rank offloads."""
        actions: list[Actions] = [{} for _ in self.orders]
        actions[rank] = placement.actions()
        return max(rank.compute for rank in self.pipeline.run(actions))

    @property
    def allowed(self) -> float:
        """Seconds that a step may take without a cost."""
        return self.seconds * (1 + FREE)

    def best(self, budgets: Sequence[int | None]) -> list[Chosen]:
        """Return what each rank does, and why; with more room for delays of copies if the simulation takes longer."""
        found: list[Chosen] = []
        for margin in MARGINS:
            ranks = [self._choices(rank, margin) for rank in range(len(self.orders))]
            found = self._leveled([rank for rank, budget in zip(ranks, budgets, strict=True) if budget is None])
            for rank, budget in zip(ranks, budgets, strict=True):
                if budget is not None:
                    found[rank.rank] = self._within(rank, budget)
            if any(because.startswith(COSTS) for _, because in found) or self._simulated(found)[1] <= self.allowed:
                return found
        return self._without_stalls(found, budgets)

    def _without_stalls(self, found: list[Chosen], budgets: Sequence[int | None]) -> list[Chosen]:
        """Let ranks without a budget offload nothing, those that wait longest first, until there is no cost."""
        while True:
            ranks, seconds = self._simulated(found)
            offloading = [k for k, budget in enumerate(budgets) if budget is None and found[k][0].placed]
            if seconds <= self.allowed or not offloading:
                return found
            worst = max(offloading, key=lambda k: ranks[k].stalled)
            profile = self.profiles[worst]
            found[worst] = RankPlacement(profile, list(profile.needs)), "Offloading would cost time here."

    def _leveled(self, ranks: Sequence[RankChoices]) -> list[Chosen]:
        """Return what the ranks without a budget do for the lowest peak that all of them reach at no cost.

        Where a rank waits for another one, it can as well wait for its copies.
        """
        found = self._nothing()
        if self.knobs.given:
            for rank in ranks:
                found[rank.rank] = rank.free, ""
            return found
        high = max((rank.free.peak_bytes for rank in ranks), default=0)
        low = max((rank.smallest().peak_bytes for rank in ranks), default=0)
        found = self._at(ranks, high) or found
        while high - low > max(high // PRECISION, 1):
            middle = (low + high) // 2
            lower = self._at(ranks, middle)
            if lower is None or self._simulated(lower)[1] > self.allowed:
                low = middle
            else:
                found, high = lower, max(lower[rank.rank][0].peak_bytes for rank in ranks)
        return [(placement, f"No rank needs more than {size(high)}.") for placement, _ in found]

    def _nothing(self) -> list[Chosen]:
        return [(RankPlacement(profile, list(profile.needs)), "") for profile in self.profiles]

    def _at(self, ranks: Sequence[RankChoices], level: int) -> list[Chosen] | None:
        """Return what ranks do for a peak within a level, or None if one of them cannot without a cost."""
        found = self._nothing()
        for rank in sorted(ranks, key=lambda rank: -rank.free.peak_bytes):
            best = rank.within(level, partial(self._alone, rank.rank), self.allowed)
            if best is None or best[1] > self.allowed:
                return None
            found[rank.rank] = best[0], ""
        return found

    def _within(self, rank: RankChoices, budget: int) -> Chosen:
        """Return what a rank with a budget does, and why."""
        if self.knobs.given and rank.free.peak_bytes <= budget:
            return rank.free, ""
        found = rank.within(budget, partial(self._alone, rank.rank), self.allowed)
        if found is None:
            because = f"{COSTS} is within the limit of {size(budget)}; this one has the smallest peak."
            return rank.smallest(), because
        free = found[1] <= self.allowed
        return found[0], "" if free else f"{COSTS} without a cost in time is within the limit of {size(budget)}."

    def _simulated(self, found: Sequence[Chosen]) -> tuple[Sequence[RankRun], float]:
        ranks = self.pipeline.run([placement.actions() for placement, _ in found])
        return ranks, max((rank.compute for rank in ranks), default=0.0)

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

    def plans(self, found: Sequence[Chosen], names: Mapping[int, Sequence[str]]) -> tuple[PipelinePlan, ...]:
        """Return the plans with what they are expected to cost."""
        ranks, seconds = self._simulated(found)
        return tuple(
            replace(
                self._plan(number, placement, names),
                seconds=seconds,
                baseline_seconds=self.baseline_seconds,
                peak_bytes=ranks[number].peak,
                saved_peak_bytes=ranks[number].saved_peak,
                because=because,
            )
            for number, (placement, because) in enumerate(found)
        )
