"""Search the ways to run the groups of a rank, and what it offloads: the fastest step within a limit of memory.

Groups are recomputed in steps, the cheapest bytes first, and for each number of steps as few groups are offloaded as
the limit asks for.  The step is fastest for some number of steps, which is searched; whole replay of everything is
among the candidates.  At last single groups are changed as long as that makes the step shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias

from ..schedule.costs import Link, StageCost
from ..schedule.plan import Plan
from ..schedule.run import Pipeline, RankRun
from .placement import ROUNDING, Knobs, Placement, Profile, Spots
from .variants import Variant

StageVariants: TypeAlias = Mapping[int, Sequence[Sequence[Variant]]]
"""For some stages the ways to run each group: the first without recomputation."""

Pair: TypeAlias = tuple[int, int]
"""A stage, and the number of a group in it."""

Ways: TypeAlias = Mapping[Pair, int]
"""The positions of the ways that groups are run in; others are run without recomputation."""

EXTENTS, FINEST = 8, 64  # extents of recomputation that are tried at first, and into which all are divided at last
LEAST, WORK = 26, 3000  # choices of ways that are tried, at least, and beyond that for a step of one event
NEAR = 0.002  # of the smallest peak, without what is always allocated: plans that differ by less have about the same

Rank: TypeAlias = tuple[bool, float]
"""False and the time where the limit is kept, otherwise True and the peak."""


class RanksAsRun:
    """The ranks of a pipeline, and their groups as they are run: at first without recomputation."""

    def __init__(
        self,
        plans: Sequence[Plan],
        stages: Sequence[StageCost],
        link: Link,
        variants: StageVariants,
        knobs: Knobs,
        host_seconds: float = 0.0,
    ) -> None:
        self.plans, self.stages, self.knobs = plans, stages, knobs
        self.variants: Mapping[Pair, Sequence[Variant]] = {
            (stage, k): each
            for stage, cost in enumerate(stages)
            for k, each in enumerate(variants.get(stage) or [(Variant(group),) for group in cost.groups])
        }
        # The groups of each rank, in order.
        self.pairs = [
            [(stage, k) for stage, layers in plan.layers.items() for k in range(len(layers))] for plan in plans
        ]
        self.pipeline = Pipeline(plans, stages, link, host_seconds=host_seconds)
        self._spots = list(map(Spots, plans))
        self.use({})
        self.baseline_seconds, self.baseline_peaks = self.seconds, [each.peak_bytes for each in self.profiles]
        if knobs.whole:
            self.reset()

    def use(self, ways: Ways, allowed: float = inf) -> None:
        """Run groups in some ways from now on, and find out how the ranks run so without offloading.

        If that takes longer than `allowed`, nothing is found out.
        """
        self.ways, pipeline = ways, self.pipeline
        pipeline.use([[way.cost for way in self.taken(rank)] for rank in range(len(self.plans))])
        runs = pipeline.run([{}] * len(self.plans), note=True, allowed=allowed)
        self.seconds = max((run.compute for run in runs), default=0.0)
        if self.seconds > allowed:
            return
        self.profiles = [
            Profile(spots, run, rank, self.knobs, pipeline)
            for rank, (spots, run) in enumerate(zip(self._spots, runs, strict=True))
        ]

    def taken(self, rank: int) -> list[Variant]:
        """Return the ways that the groups of a rank are run in."""
        return [self.variants[pair][self.ways.get(pair, 0)] for pair in self.pairs[rank]]

    def described(self, rank: int, placement: Placement, run: RankRun, seconds: float) -> Plan:
        """Return the plan of a rank that was run with a placement, in a step that took so long."""
        ways, plain = self.taken(rank), [self.variants[pair][0].cost for pair in self.pairs[rank]]
        again = any(way.saves is not None for way in ways)
        less = (max(cost.nbytes - way.cost.nbytes, 0) for cost, way in zip(plain, ways, strict=True))
        return replace(
            self.plans[rank],
            steps=placement.steps(),
            nbytes=tuple(way.cost.nbytes for way in ways),
            recomputed_nbytes=tuple(less) if again else (),
            saves=tuple(way.saves for way in ways) if again else (),
            seconds=seconds,
            baseline_seconds=self.baseline_seconds,
            peak_bytes=run.peak,
            saved_peak_bytes=run.saved_peak,
        )

    def reset(self) -> None:
        """Run no group with recomputation, or every one in its last way."""
        last = {pair: len(ways) - 1 for pair, ways in self.variants.items() if len(ways) > 1}
        self.use(last if self.knobs.whole else {})

    def recompute(self, rank: int, limit: float, free: float) -> float:
        """Use the ways of the groups of a rank in which a step within a limit is the shortest, as far as found.

        They stay as they are if that takes no more than a `free` part of the step longer than without a limit.  Returns
        the limit that is kept: a larger one if it cannot be, with about the smallest peak that was found.
        """
        profile, most = self.profiles[rank], self.seconds * (1 + free)
        if profile.within(limit, most, most * (1 + ROUNDING)) is None:
            self._search(rank, limit, free)
        least = self.profiles[rank].leanest()
        if least <= limit:
            return limit
        # Of the plans with about the smallest peak the fastest is taken.
        levels = [level for way in self.taken(rank) for level in way.cost.other_bytes]
        always = self.pipeline.other[rank] + min(levels, default=0)
        limit = math.ceil(least + NEAR * (least - always))
        self._search(rank, limit, free)
        return limit

    def _search(self, rank: int, limit: float, free: float) -> None:
        """Use the best ways of the groups of a rank, if they may be run in others."""
        if not self.knobs.whole and any(len(self.variants[pair]) > 1 for pair in self.pairs[rank]):
            self.use(_Greedy(self, rank, limit, free).best())


class _Greedy:
    """Searches the ways of the groups of a rank: the cheapest bytes first, as many as make the step shortest."""

    def __init__(self, ranks: RanksAsRun, rank: int, limit: float, free: float) -> None:
        self._ranks, self._which, self._limit, self._free = ranks, rank, limit, free
        self._others, self._pairs = ranks.ways, ranks.pairs[rank]
        self._last = {pair: len(ranks.variants[pair]) - 1 for pair in self._pairs}
        self._tries = LEAST + WORK // max(len(ranks.profiles[rank].needs), 1)
        self._known: dict[tuple[tuple[Pair, int], ...], Rank] = {}
        self._best: tuple[Rank, Ways] = (True, inf), {}

    def best(self) -> Ways:
        """Return the best ways that are found."""
        self._rank({pair: way for pair, way in self._others.items() if pair in self._last})
        self._rank({})
        self._rank({pair: last for pair, last in self._last.items() if last})
        self._search()
        self._improve()
        return {**self._others, **self._best[1]}

    def _rank(self, ways: Ways) -> Rank:
        key = tuple(sorted(ways.items()))
        if key not in self._known:
            if len(self._known) >= self._tries:
                return True, inf
            self._known[key] = rank = self._run(ways)
            self._best = min(self._best, (rank, ways), key=lambda each: each[0])
        return self._known[key]

    def _run(self, ways: Ways) -> Rank:
        """Run groups in some ways, with as few offloaded as the limit asks for."""
        (exceeds, least), _ = self._best
        longest = inf if exceeds else least  # until some ways keep the limit, no time is too long
        ranks = self._ranks
        ranks.use({**self._others, **ways}, longest)
        if ranks.seconds >= longest:
            return False, max(ranks.pipeline.left(self._which)[0], longest)
        profile = ranks.profiles[self._which]
        found = profile.within(self._limit, ranks.seconds * (1 + self._free), longest * (1 + ROUNDING), few=1)
        if found is not None:
            return False, round(found[1], 12)
        return True, float(profile.smallest().peak_bytes) if exceeds else inf

    def _steps(self) -> list[tuple[Pair, int]]:
        """Return groups and their next ways, from no recomputation to the most, the cheapest bytes first."""
        steps = list[tuple[float, Pair, int]]()
        for pair in self._pairs:
            costs = [way.cost for way in self._ranks.variants[pair]]
            before, price = costs[0], 0.0  # seconds for each byte
            for way, cost in enumerate(costs):
                less = before.nbytes - cost.nbytes
                more = cost.forward + cost.backward - before.forward - before.backward
                if less > 0:
                    before, price = cost, max(price, more / less)  # so that they stay in order
                    steps.append((price, pair, way))
        return [(pair, way) for _, pair, way in sorted(steps, key=lambda step: step[0])]

    def _search(self) -> None:
        """Try extents of the steps, finer and finer near the best."""
        steps = self._steps()

        def rank(number: int) -> Rank:
            return self._rank(dict(steps[:number]))

        stride = max(len(steps) // EXTENTS, 1)
        near: Sequence[int] = [*range(0, len(steps), stride), len(steps)]
        while stride > len(steps) // FINEST:
            place = min((k for k in near if 0 <= k <= len(steps)), key=rank)
            stride //= 2
            near = place, place - stride, place + stride

    def _improve(self) -> None:
        """Change blocks of groups, at last single ones, as long as that makes the step shorter.

        A block saves more, or more and the next one less, or less.
        """
        count = len(self._pairs)
        size = (count + 1) // 2
        while size and len(self._known) < self._tries:
            improved = False
            for start in reversed(range(0, count, size)):  # the last groups are the cheapest to keep
                for here, next_ in ((-1, 0), (-1, 1), (1, 0)):
                    best, ways = self._best
                    other = dict(ways)
                    for k, pair in enumerate(self._pairs[start : start + 2 * size]):
                        way = ways.get(pair, 0) + (here if k < size else next_)
                        other[pair] = min(max(way, 0), self._last[pair])
                    improved |= self._rank({pair: way for pair, way in other.items() if way}) < best
            if not improved:
                size = 0 if size == 1 else max(size // 4, 1)
