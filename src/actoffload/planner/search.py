"""Search the ways to run the groups of a rank, and what it offloads: the fastest step within a limit of memory.

Groups are recomputed in steps, the cheapest bytes first, and for each number of steps as few groups are offloaded as
the limit asks for.  The step is fastest for some number of steps, which is searched; whole replay of everything is
among the candidates.  At last single groups are changed as long as that makes the step shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeAlias

from ..schedule.costs import Link, StageCost, StageTimes
from ..schedule.plan import Plan
from ..schedule.run import Pipeline
from .placement import ROUNDING, Knobs, Profile, Spots
from .variants import Variant

StageVariants: TypeAlias = Mapping[int, Sequence[Sequence[Variant]]]
"""For some stages the ways to run each group: the first without recomputation."""

Ways: TypeAlias = Mapping[tuple[int, int], int]
"""By stage and group the position of the way that is taken; others are run without recomputation."""

EXTENTS, FINEST = 8, 64  # extents of recomputation that are tried at first, and into which all are divided at last
LEAST, WORK = 26, 3000  # choices of ways that are tried, at least, and beyond that for a step of one event

Rank: TypeAlias = tuple[bool, float]
"""False and the time where the limit is kept, otherwise True and the peak."""

Key: TypeAlias = tuple[tuple[tuple[int, int], int], ...]
"""Ways, sorted."""


class Ranks:
    """The ranks of a pipeline, and their stages as they are run: at first without recomputation."""

    def __init__(
        self,
        plans: Sequence[Plan],
        stages: Sequence[StageCost],
        link: Link,
        variants: StageVariants,
        knobs: Knobs,
        host_seconds: float = 0.0,
    ) -> None:
        self.plans, self.plain = plans, tuple(stages)
        self.knobs, self.variants = knobs, variants
        self.pipeline = Pipeline(plans, stages, link, host_seconds=host_seconds)
        self._spots = list(map(Spots, plans))
        self._times: dict[tuple[int, ...], StageTimes] = {}
        self.use({})
        self.baseline_seconds, self.baseline_peaks = self.seconds, [each.peak_bytes for each in self.profiles]
        self.reset()

    def use(self, ways: Ways) -> None:
        """Run groups in some ways from now on, and find out how the ranks run so without offloading."""
        self.ways, pipeline = ways, self.pipeline
        pipeline.times = [self._stage_times(stage) for stage in range(len(self.plain))]
        runs = pipeline.run([{}] * len(self.plans), note=True)
        self.seconds = max((run.compute for run in runs), default=0.0)
        self.profiles = [
            Profile(spots, run, rank, plan, self.knobs, pipeline)
            for rank, (plan, spots, run) in enumerate(zip(self.plans, self._spots, runs, strict=True))
        ]

    def taken(self, stage: int) -> list[Variant]:
        """Return the ways that the groups of a stage are run in; empty if it has no others."""
        return [group[self.ways.get((stage, k), 0)] for k, group in enumerate(self.variants.get(stage, ()))]

    def reset(self) -> None:
        """Run no group with recomputation, or every one in its last way."""
        ways = {(stage, k): len(ways) - 1 for stage, groups in self.variants.items() for k, ways in enumerate(groups)}
        self.use({pair: way for pair, way in ways.items() if way} if self.knobs.whole else {})

    def _stage_times(self, stage: int) -> StageTimes:
        """Return the times of a stage; worked out once for stages that are equal."""
        cost, taken = self.plain[stage], self.taken(stage)
        key = id(cost), *(id(way.cost) for way in taken)
        if key not in self._times:
            costs = tuple(way.cost for way in taken) or cost.groups
            self._times[key] = self.pipeline.stage_times(replace(cost, groups=costs))
        return self._times[key]

    def recompute(self, rank: int, limit: float, free: float) -> None:
        """Use the ways of the groups of a rank in which a step within a limit is the shortest, as far as found.

        They stay as they are if that takes no more than a `free` part of the step longer than without a limit.  If the
        limit cannot be kept, they are those with the smallest peak.
        """
        if self.knobs.whole:
            return
        if not any(stage in self.plans[rank].layers for stage, _ in self.ways):
            most = self.seconds * (1 + free)
            found = self.profiles[rank].within(limit, most)
            if found is not None and found[1] <= most:
                return
        self.use(_Greedy(self, rank, limit, free).best())


class _Step(NamedTuple):
    """From one way of a group to one that saves less."""

    price: float  # seconds for each byte
    pair: tuple[int, int]  # stage and group
    way: int


class _Greedy:
    """Searches the ways of the groups of a rank: the cheapest bytes first, as many as make the step shortest."""

    def __init__(self, ranks: Ranks, rank: int, limit: float, free: float) -> None:
        self._ranks, self._which, self._limit, self._free = ranks, rank, limit, free
        self._others = ranks.ways
        stages = sorted(ranks.plans[rank].layers.keys() & ranks.variants.keys())
        self._pairs = [(stage, group) for stage in stages for group in range(len(ranks.variants[stage]))]
        costs = {pair: [way.cost for way in ranks.variants[pair[0]][pair[1]]] for pair in self._pairs}
        self._saved = {pair: [cost.nbytes for cost in each] for pair, each in costs.items()}
        self._seconds = {pair: [cost.forward + cost.backward for cost in each] for pair, each in costs.items()}
        self._tries = LEAST + WORK // max(len(ranks.profiles[rank].needs), 1)
        self._known: dict[Key, Rank] = {}
        self._best: tuple[Rank, Ways] = (True, inf), {}

    def best(self) -> Ways:
        """Return the best ways that are found."""
        self._rank({pair: way for pair, way in self._others.items() if pair in self._saved})
        self._rank({})
        self._rank({pair: len(each) - 1 for pair, each in self._saved.items() if len(each) > 1})
        self._search()
        self._improve()
        return {**self._others, **self._best[1]}

    def _rank(self, ways: Ways) -> Rank:
        key = tuple(sorted(ways.items()))
        if key in self._known:
            return self._known[key]
        (exceeds, least), _ = self._best
        if len(self._known) >= self._tries:
            return True, inf
        longest = inf if exceeds else least  # until some ways keep the limit, no time is too long
        ranks = self._ranks
        ranks.use({**self._others, **ways})
        if ranks.seconds >= longest:
            rank: Rank = False, ranks.seconds
        else:
            allowed = longest * (1 + ROUNDING)
            most, profile = ranks.seconds * (1 + self._free), ranks.profiles[self._which]
            found = profile.within(self._limit, most, allowed)
            if found is not None:
                rank = False, round(found[1], 12)
            elif exceeds:  # no ways are known that keep the limit
                smallest = profile.smallest()
                rank = True, float(smallest.peak_bytes)
            else:
                rank = True, inf
        self._known[key] = rank
        self._best = min(self._best, (rank, ways), key=lambda each: each[0])
        return rank

    def _steps(self) -> list[_Step]:
        """Return steps from no recomputation to the most, the cheapest bytes first."""
        steps: list[_Step] = []
        for pair in self._pairs:
            nbytes, seconds, before, price = self._saved[pair], self._seconds[pair], 0, 0.0
            for way in range(1, len(nbytes)):
                less = nbytes[before] - nbytes[way]
                if less > 0:
                    price = max(price, (seconds[way] - seconds[before]) / less)  # so that they stay in order
                    steps.append(_Step(price, pair, way))
                    before = way
        return sorted(steps, key=lambda step: step.price)

    def _search(self) -> None:
        """Try extents of the steps, finer and finer near the best."""
        steps = self._steps()

        def rank(number: int) -> Rank:
            return self._rank({step.pair: step.way for step in steps[:number]})

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
                        other[pair] = min(max(way, 0), len(self._saved[pair]) - 1)
                    improved |= self._rank({pair: way for pair, way in other.items() if way}) < best
            if not improved:
                size = 0 if size == 1 else max(size // 4, 1)
