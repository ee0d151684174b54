"""Search the plan of a model: the fastest within a limit of memory.

Without a limit, or if everything fits, nothing is offloaded and nothing recomputed.  Otherwise groups are recomputed in
steps, the cheapest bytes first, and for each number of steps as few groups are offloaded as the limit asks for.  The
step is fastest for some number of steps, which is searched; all groups in one way, as far as whole replay of
everything, are among the candidates.  Blocks are alike, so which of them come first is tried, too.  At last single
groups are changed as long as that makes the step shorter.  The few best plans are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import TypeAlias

from .._arguments import check_bytes, check_fits, check_kind, check_kinds, check_limit, check_seconds, check_whole
from .._text import size
from ..schedule.costs import Link
from ..schedule.plan import Plan
from ..schedule.simulate import simulate
from ..schedule.timeline import Simulation
from .group_plan import GroupPlan
from .placement import Alone, Placement, Profile, place
from .variants import Variant, upgrades

__all__ = ["choose", "frontier"]

ROUNDING = 1e-9  # relative; of two plans that differ by less the one with fewer copies is as fast
EXTENTS = 6  # steps of a sequence that are tried at first
REFINED = 5  # sequences that are searched between them
QUICK, FEW, SOME = 2, 4, 16  # numbers of offloaded groups that are tried for one limit
TRIES, MOST_TRIES = 80, 400  # choices of ways that are tried: for many groups, for few
WORK = 8000  # choices times groups, between them
NEAR = 0.002  # of the smallest peak, without what is always allocated: plans that differ by less have about the same
FINAL = 2  # of them for which a plan is simulated

LEANEST = "This is about the smallest peak that a plan reaches."
FASTEST = "This is the fastest plan that was found with at most this peak."

Ways: TypeAlias = tuple[int, ...]
"""For each group the position of its way."""
Rank: TypeAlias = tuple[bool, float]
"""Whether the limit is exceeded; then the peak, otherwise the time."""


def choose(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    *,
    limit: int | None = None,
    host_seconds: float = 0.0,
    among: Collection[int] | None = None,
    without_bytes: int | None = None,
    excess: int = 0,
    host_limit: int | None = None,
) -> GroupPlan:
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
    among : collection of int, optional
        Positions of the groups that may be offloaded; None for all.  The last group is never offloaded, because
        backward begins there.
    without_bytes : int, optional
        Peak of device memory without offloading as it was measured, for the reason; None to take what the costs add up
        to.
    excess : int
        Bytes by which a pass may take more device memory than the costs add up to; the plan leaves room for them
        within the limit.
    host_limit : int, optional
        Bytes of host memory for what is offloaded in one step; None for no limit.

    Returns
    -------
    GroupPlan
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
    _check(names, groups, link, host_seconds, among, host_limit)
    check_limit(limit=limit)
    if without_bytes is not None:
        check_bytes(without_bytes=without_bytes)
    check_fits("a number of bytes", isfinite, excess=excess)
    most = inf if limit is None else limit - excess
    search = _Search(tuple(names), groups, link, most, host_seconds, among, host_limit)
    without = search.keep.peak_bytes if without_bytes is None else without_bytes
    plan = search.best()
    because = ""
    if (plan.peak_bytes or 0) > search.limit:
        because = f"No plan is within the limit of {size(limit or 0)}; this one has the smallest peak."
    elif without > search.limit and (plan.recomputed or (plan.seconds or 0.0) > search.keep.seconds):
        action = "offloading and recomputing" if plan.recomputed else "offloading"
        because = f"Without {action} the peak would be {size(without)}, above the limit of {size(limit or 0)}."
    return replace(plan, because=because)


def frontier(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    *,
    host_seconds: float = 0.0,
    among: Collection[int] | None = None,
    host_limit: int | None = None,
    points: int = 16,
) -> tuple[GroupPlan, ...]:
    """Return plans from the smallest peak to that without offloading, each faster than those before it.

    ``because`` says what each plan is among them, and names no limit, because none was given.

    Parameters
    ----------
    names, groups, link, host_seconds, among, host_limit
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
    _check(names, groups, link, host_seconds, among, host_limit)
    check_whole(points=points, least=1)

    def search(limit: float) -> GroupPlan:
        return _Search(tuple(names), groups, link, limit, host_seconds, among, host_limit).best()

    leanest, kept = search(0), search(inf)
    low, high = leanest.peak_bytes or 0, kept.peak_bytes or 0
    limits = [low + (high - low) * k // max(points - 1, 1) for k in range(1, points - 1)]
    between = (replace(search(limit), because=FASTEST) for limit in limits)
    plans = [replace(leanest, because=LEANEST), *between, replace(kept, because="This plan offloads nothing.")]
    found: list[GroupPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.seconds)):
        if not found or (plan.seconds or 0.0) < (found[-1].seconds or 0.0):
            found.append(plan)
    return tuple(found)


def _check(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    host_seconds: float,
    among: Collection[int] | None,
    host_limit: int | None,
) -> None:
    check_kinds(str, names=names)
    check_kind(Link, link=link)
    check_seconds(host_seconds=host_seconds)
    check_limit(host_limit=host_limit)
    if among is not None:
        expected = "positions of groups, or None for all"
        check_fits(expected, lambda value: all(place >= 0 for place in value), among=among)
    check_kinds(Sequence, groups=groups)
    for number, group in enumerate(groups):
        check_kinds(Variant, optional=False, **{f"groups[{number}]": group})
    if not names or len(names) != len(groups) or not all(groups):
        raise ValueError(
            f"There are {len(names)} names and {len(groups)} groups; give one name and at least one Variant for each."
        )


class _Search:
    """The search for one limit."""

    def __init__(
        self,
        names: tuple[str, ...],
        groups: Sequence[Sequence[Variant]],
        link: Link,
        limit: float,
        host_seconds: float,
        among: Collection[int] | None,
        host_limit: int | None,
    ) -> None:
        self.names, self.groups, self.link, self.limit = names, groups, link, limit
        self.host_seconds, self.among, self.host_limit = host_seconds, among, host_limit
        self._alone = {id(way.cost): Alone.of(way.cost, link) for group in groups for way in group}
        self._plain: Ways = (0,) * len(groups)
        self.keep = self._place(self._profile(self._plain), ())

    def _profile(self, ways: Ways) -> Profile:
        costs = [group[k].cost for group, k in zip(self.groups, ways, strict=True)]
        return Profile.of(costs, self.link, self.among, self._alone, self.host_limit)

    def _place(self, profile: Profile, offloaded: Collection[int], allowed: float = inf) -> Placement:
        return place(profile, offloaded, self.limit, host_seconds=self.host_seconds, allowed=allowed)

    def best(self) -> GroupPlan:
        """Return the best plan; its reason is not known yet."""
        if self.keep.peak_bytes <= self.limit:
            return self._described(self._plain, self.keep.plan())[0]
        baseline = self.keep.seconds
        quick = self._counted(self._plain, quick=True)
        free = quick.peak_bytes <= self.limit and quick.seconds <= baseline
        choices = [self._plain] if free else _Greedy(self.groups, self._counted, self.limit).best()
        plan, fits = None, False
        for ways_ in choices:
            # Placement leaves out what the host delays inside of a group; the next is taken if that matters.
            found, result = self._described(ways_, self._leaner(ways_, self._counted(ways_)).plan())
            if plan is None or result.device_peak_bytes < (plan.peak_bytes or 0):
                plan, fits = found, result.device_peak_bytes <= self.limit
            if fits:
                break
        assert plan is not None
        if not fits:
            return self._about_as_lean(plan)
        return plan

    def _about_as_lean(self, leanest: GroupPlan) -> GroupPlan:
        """Return the fastest of the plans with about the smallest peak, where no plan is within the limit."""
        least = leanest.peak_bytes or 0
        always = min(level for group in self.groups for level in group[0].cost.other_bytes)
        nearly = math.ceil(least + NEAR * (least - always))
        how = self.host_seconds, self.among, self.host_limit
        return _Search(self.names, self.groups, self.link, nearly, *how).best()

    def _counted(self, ways: Ways, *, quick: bool = False) -> Placement:
        """Return the fastest placement of the first groups within the limit, or the one with the smallest peak.

        Few groups more than must be offloaded are best, since each costs copies: these are tried first, then some of
        the others unless a `quick` answer is enough.
        """
        profile = self._profile(ways)
        leanest, found, allowed = profile.leanest, None, inf
        if leanest[0] <= self.limit:
            return self._place(profile, ())
        least = next((k for k, peak in enumerate(leanest) if peak <= self.limit), len(leanest))
        numbers = [*range(least, len(leanest))[: QUICK if quick else FEW]]
        if not quick:
            numbers += range(least, len(leanest), max(1, len(leanest) // SOME))
        largest = sorted(profile.movable, key=lambda k: -profile.nbytes[k])
        sets = [frozenset(order[:number]) for number in dict.fromkeys(numbers) for order in (profile.movable, largest)]
        for offloaded in dict.fromkeys(sets):
            placement = self._place(profile, offloaded, allowed)
            if placement.peak_bytes <= self.limit and placement.seconds < min(allowed, inf):
                found, allowed = placement, placement.seconds * (1 - ROUNDING)
        if found is not None:
            return found
        smallest = min(leanest)
        return place(profile, profile.movable[: leanest.index(smallest)], smallest, host_seconds=self.host_seconds)

    def _leaner(self, ways: Ways, fastest: Placement) -> Placement:
        """Return a placement that takes no longer, with about the smallest peak: other passes may need more memory."""
        profile = self._profile(ways)
        low, best = min(profile.leanest), fastest
        while best.peak_bytes - low > max(best.peak_bytes >> 8, 1):
            middle = (low + best.peak_bytes) // 2
            least = next((k for k, peak in enumerate(profile.leanest) if peak <= middle), len(profile.leanest))
            numbers = dict.fromkeys((*range(least, len(profile.leanest))[:FEW], max(len(best.released), least)))
            places = (
                place(
                    profile, profile.movable[:number], middle, host_seconds=self.host_seconds, allowed=fastest.seconds
                )
                for number in numbers
            )
            lean = next((each for each in places if each.peak_bytes <= middle and each.seconds < inf), None)
            low, best = (middle, best) if lean is None else (low, lean)
        return best

    def _described(self, ways: Ways, plan: Plan) -> tuple[GroupPlan, Simulation]:
        """Return a plan with what is expected of it, and its simulation."""
        taken = [group[k] for group, k in zip(self.groups, ways, strict=True)]
        result = simulate(plan, [way.cost for way in taken], self.link, host_seconds=self.host_seconds)
        found = GroupPlan(
            self.names,
            plan,
            tuple(way.cost.nbytes for way in taken),
            seconds=result.step_time,
            baseline_seconds=self.keep.seconds,
            peak_bytes=result.device_peak_bytes,
        )
        if any(ways):
            pairs = [(way.cost, group[0].cost) for way, group in zip(taken, self.groups, strict=True)]
            found = replace(
                found,
                recomputed_nbytes=tuple(max(plain.nbytes - cost.nbytes, 0) for cost, plain in pairs),
                recompute_seconds=max(sum(cost.backward - plain.backward for cost, plain in pairs), 0.0),
                saves=tuple(way.saves for way in taken),
            )
        return found, result


class _Greedy:
    """Searches the ways of all groups: the cheapest bytes first, as many as make the step fastest."""

    def __init__(self, groups: Sequence[Sequence[Variant]], counted: Callable[..., Placement], limit: float) -> None:
        self._groups, self._counted, self._limit = groups, counted, limit
        self._known: dict[Ways, Rank] = {}
        self._tries = min(max(WORK // len(groups), TRIES), MOST_TRIES)

    def _rank(self, ways: Ways) -> Rank:
        if ways not in self._known:
            placement = self._counted(ways, quick=True)
            exceeds = placement.peak_bytes > self._limit
            self._known[ways] = exceeds, placement.peak_bytes if exceeds else placement.seconds
        return self._known[ways]

    def best(self) -> list[Ways]:
        """Return the best few, the best one first."""
        sequences = [steps for order in _orders(len(self._groups)) for steps in self._sequences(order)]
        found = []
        for number, steps in enumerate(sequences):
            stride = max(len(steps) // EXTENTS, 1)
            place = min((*range(0, len(steps), stride), len(steps) - 1), key=lambda k: self._rank(steps[k]))
            found.append((self._rank(steps[place]), number, place, stride))
        for _, number, place, stride in sorted(found)[:REFINED]:
            self._refine(sequences[number], place, stride)
        self._improve(min(self._known, key=self._rank))
        return sorted(self._known, key=self._rank)[:FINAL]

    def _sequences(self, order: Sequence[int]) -> Iterator[list[Ways]]:
        """Yield choices from no replay to the most: by any of the ways, and by one of them alone."""
        for most in range(max(map(len, self._groups))):
            groups = [(group[0], group[min(most, len(group) - 1)]) if most else group for group in self._groups]
            steps = []
            for ways in upgrades({0: groups}, [0], order):
                chosen = [ways.get((0, k), 0) for k in range(len(groups))]
                if most:
                    pairs = zip(chosen, self._groups, strict=True)
                    chosen = [min(most, len(group) - 1) if way else 0 for way, group in pairs]
                steps.append(tuple(chosen))
            yield steps

    def _refine(self, steps: Sequence[Ways], place: int, stride: int) -> None:
        """Search between steps that were tried, around the best of them."""
        while stride > 1:
            stride //= 2
            near = (place, place - stride, place + stride)
            place = min((k for k in near if 0 <= k < len(steps)), key=lambda k: self._rank(steps[k]))

    def _improve(self, best: Ways) -> None:
        """Change single groups as long as that makes the step shorter."""
        improved = True
        while improved:
            improved = False
            for group in range(len(best)):
                for way in (best[group] - 1, best[group] + 1):
                    if not 0 <= way < len(self._groups[group]):
                        continue
                    if len(self._known) >= self._tries:
                        return
                    other = (*best[:group], way, *best[group + 1 :])
                    if self._rank(other) < self._rank(best):
                        best, improved = other, True


def _orders(count: int) -> list[list[int]]:
    """Return orders of groups that cost the same: from the last, from the first, and at about equal distances."""
    bits = max(count - 1, 1).bit_length()
    spread = sorted(range(count), key=lambda k: int(f"{k:0{bits}b}"[::-1], 2))
    return [list(reversed(range(count))), list(range(count)), spread]
