"""Search the ways to run the groups of a rank, and what it offloads: the fastest step within a limit of memory.

Groups are recomputed in steps, the cheapest bytes first, and for each number of steps as few groups are offloaded as
the limit asks for.  The step is fastest for some number of steps, which is searched; all groups in one way, as far as
whole replay of everything, are among the candidates.  Blocks are alike, so both are tried: from the last and from the
first on.  At last single groups are changed as long as that makes the step shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeAlias

from ..schedule.costs import Link, StageCost, StageTimes
from ..schedule.pipeline import Computation, Step
from ..schedule.simulate import Pipeline
from .placement import ROUNDING, Knobs, Profile, Spots
from .variants import Variant

StageVariants: TypeAlias = Mapping[int, Sequence[Sequence[Variant]]]
"""For some stages the ways to run each group: the first without recomputation."""

Ways: TypeAlias = Mapping[tuple[int, int], int]
"""By stage and group the position of the way that is taken; others are run without recomputation."""

EXTENTS, FINEST = 6, 32  # extents of recomputation that are tried at first, and into which all are divided at last
LEAST, MOST, WORK = 28, 100, 3500  # choices of ways that are tried: for many moments, for few, and times the moments

Rank: TypeAlias = tuple[bool, float, float]
"""Where the limit is kept: False, the time, and that of recomputation; otherwise True, the peak, and the time."""

Key: TypeAlias = tuple[tuple[tuple[int, int], int], ...]
"""Ways, sorted."""


class Ranks:
    """The ranks of a pipeline, and their stages as they are run: at first without recomputation."""

    def __init__(
        self,
        orders: Sequence[Sequence[Step]],
        stages: Sequence[StageCost],
        link: Link,
        variants: StageVariants,
        knobs: Knobs,
        host_seconds: float = 0.0,
    ) -> None:
        self.orders, self.plain = [tuple(order) for order in orders], tuple(stages)
        self.knobs, self.variants = knobs, variants
        self.pipeline = Pipeline(orders, stages, link, host_seconds=host_seconds)
        counts = {stage: len(cost.groups) for stage, cost in enumerate(stages)}
        splits = {stage: cost.split for stage, cost in enumerate(stages)}
        self._spots = [Spots(order, counts, splits) for order in orders]
        self._times: dict[tuple[int, ...], StageTimes] = {}
        self._known: dict[Key, tuple[list[StageTimes], float, list[Profile]]] = {}
        self.use({})
        self.baseline_seconds, self.baseline_peaks = self.seconds, [each.peak_bytes for each in self.profiles]
        self.reset()

    def use(self, ways: Ways) -> None:
        """Run groups in some ways from now on; how the ranks run so without offloading is found out once."""
        self.ways, key, pipeline = ways, tuple(sorted(ways.items())), self.pipeline
        if key not in self._known:
            pipeline.times = [self._stage_times(stage) for stage in range(len(self.plain))]
            runs = pipeline.run([{}] * len(self.orders), note=True)
            profiles = [
                Profile(spots, run, rank, self.knobs, pipeline)
                for rank, (spots, run) in enumerate(zip(self._spots, runs, strict=True))
            ]
            self._known[key] = pipeline.times, max((run.compute for run in runs), default=0.0), profiles
        pipeline.times, self.seconds, self.profiles = self._known[key]

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
        stages = {step.stage for step in self.orders[rank]}
        if not any(stage in stages for stage, _ in self.ways):
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
        order = ranks.orders[rank]
        self._number = Counter(step.stage for step in order if step.computation is Computation.FORWARD)
        stages = sorted(self._number.keys() & ranks.variants.keys())
        self._pairs = [(stage, group) for stage in stages for group in range(len(ranks.variants[stage]))]
        costs = {pair: [way.cost for way in ranks.variants[pair[0]][pair[1]]] for pair in self._pairs}
        self._saved = {pair: [cost.nbytes for cost in each] for pair, each in costs.items()}
        self._seconds = {pair: [cost.forward + cost.backward for cost in each] for pair, each in costs.items()}
        plain = [(ranks.plain[stage].groups, number) for stage, number in sorted(self._number.items())]
        self._compute = sum(number * sum(cost.forward + cost.backward for cost in groups) for groups, number in plain)
        self._tries = min(max(WORK // max(len(ranks.profiles[rank].needs), 1), LEAST), MOST)
        self._known: dict[Key, Rank] = {}
        self._best: tuple[Rank, Ways] = (True, inf, 0.0), {}

    def best(self) -> Ways:
        """Return the best ways that are found."""
        self._rank({pair: way for pair, way in self._others.items() if pair in self._saved})
        self._rank({})
        self._rank({pair: len(each) - 1 for pair, each in self._saved.items() if len(each) > 1})
        place = self._search(self._steps(self._pairs[::-1]))
        self._search(self._steps(self._pairs), place)
        self._improve()
        return {**self._others, **self._best[1]}

    def _rank(self, ways: Ways) -> Rank:
        key = tuple(sorted(ways.items()))
        if key in self._known:
            return self._known[key]
        (exceeds, least, _), _ = self._best
        more = sum(
            self._number[pair[0]] * (self._seconds[pair][way] - self._seconds[pair][0]) for pair, way in ways.items()
        )
        # Until some ways keep the limit, no time is too long.
        longest = inf if exceeds else least
        if self._compute + more >= longest or len(self._known) >= self._tries:
            return True, inf, more
        ranks = self._ranks
        ranks.use({**self._others, **ways})
        if ranks.seconds >= longest:
            rank: Rank = False, ranks.seconds, more
        else:
            allowed = longest * (1 + ROUNDING)
            most, profile = ranks.seconds * (1 + self._free), ranks.profiles[self._which]
            found = profile.within(self._limit, most, allowed)
            if found is not None:
                rank = False, round(found[1], 12), more
            elif exceeds:  # no ways are known that keep the limit
                smallest = profile.smallest()
                rank = True, float(smallest.peak_bytes), profile.seconds(smallest)
            else:
                rank = True, inf, more
        self._known[key] = rank
        self._best = min(self._best, (rank, ways), key=lambda each: each[0])
        return rank

    def _steps(self, pairs: Sequence[tuple[int, int]]) -> list[_Step]:
        """Return steps from no recomputation of some groups to the most, the cheapest bytes first.

        Of groups that cost the same the one comes first that does in `pairs`.
        """
        steps: list[_Step] = []
        for pair in pairs:
            nbytes, seconds = self._saved[pair], self._seconds[pair]
            found: list[_Step] = []  # each further byte costs more than those before it
            for way in range(1, len(nbytes)):
                while True:
                    before = found[-1].way if found else 0
                    less = nbytes[before] - nbytes[way]
                    if less <= 0:
                        break
                    price = (seconds[way] - seconds[before]) / less
                    if not found or price >= found[-1].price:
                        found.append(_Step(price, pair, way))
                        break
                    found.pop()
            steps += found
        return sorted(steps, key=lambda step: step.price)

    def _search(self, steps: Sequence[_Step], place: int | None = None) -> int:
        """Return the best extent of a sequence, near a place if one is given."""

        def rank(number: int) -> Rank:
            return self._rank({step.pair: step.way for step in steps[:number]})

        stride = max(len(steps) // EXTENTS, 1)
        near = range(0, len(steps) + 1, stride) if place is None else (place, place - stride, place + stride)
        while True:
            place = min((k for k in (*near, len(steps)) if 0 <= k <= len(steps)), key=rank)
            if stride <= max(len(steps) // FINEST, 1):
                return place
            stride //= 2
            near = place, place - stride, place + stride

    def _improve(self) -> None:
        """Change blocks of groups, at last single ones, as long as that makes the step shorter.

        A block saves more or less, or as much as without recomputation, or more and the next one less, or the other way
        round.
        """
        count, most = len(self._pairs), max(map(len, self._saved.values()), default=0)
        size = (count + 1) // 2
        while size and len(self._known) < self._tries:
            improved = False
            for start in reversed(range(0, count, size)):  # the last groups are the cheapest to keep
                for here, next_ in ((-1, 0), (-most, 0), (-1, 1), (1, -1), (1, 0)):
                    best, ways = self._best
                    other = dict(ways)
                    for k, pair in enumerate(self._pairs[start : start + 2 * size]):
                        way = ways.get(pair, 0) + (here if k < size else next_)
                        other[pair] = min(max(way, 0), len(self._saved[pair]) - 1)
                    improved |= self._rank({pair: way for pair, way in other.items() if way}) < best
            if not improved:
                size = 0 if size == 1 else max(size // 4, 1)
