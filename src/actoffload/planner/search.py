"""Search the plan of a model: the fastest within a limit of memory.

Without a limit, or if everything fits, nothing is offloaded and nothing recomputed.  Otherwise the way of each group is
searched, and which groups are offloaded.  Blocks are alike, so the search is for numbers of groups first: it begins
with the best plan in which all groups run in the same way, and changes as many groups as makes the plan better, first
half of them, at last single ones: the first, the last, or some at equal distances.  Then single groups are changed by
simulated annealing.  Near the smallest possible peak a plan in which each group runs in its own way is up to 4 % faster
than the best one that counts groups.  The few best plans are simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import NamedTuple, TypeAlias

from .._arguments import check_bytes, check_fits, check_kind, check_kinds, check_limit, check_seconds, check_whole
from ..schedule.costs import Link
from ..schedule.plan import Plan
from ..schedule.simulate import simulate
from ..schedule.timeline import Simulation, size
from .group_plan import GroupPlan
from .placement import Alone, Placement, Profile, place
from .variants import Variant

__all__ = ["choose", "frontier"]

ROUNDING = 1e-9  # relative; of two plans that differ by less the one with fewer copies is as fast
QUICK, FEW, SOME = 2, 4, 16  # numbers of offloaded groups that are tried for one limit
TRIES, MOST_TRIES = 80, 400  # choices of ways that are tried: for many groups, for few
WORK = 8000  # choices times groups, between them
NEAR = 0.002  # of the smallest peak, without what is always allocated: plans that differ by less have about the same
FINAL = 2  # of them for which a plan is simulated
CHANGES, MOST_CHANGES = 800_000, 5000  # placements times the square of the number of groups; placements
HOT, COLD = 0.006, 0.0001  # temperature at first and at last, as a part of the time of a step
PENALTY = 20.0  # times the time for copying the bytes above the limit

LEANEST = "This is about the smallest peak that a plan reaches."
FASTEST = "This is the fastest plan that was found with at most this peak."

Ways: TypeAlias = tuple[int, ...]
"""For each group the position of its way."""
Rank: TypeAlias = tuple[bool, float]
"""Whether the limit is exceeded; then the peak, otherwise the time."""


class _Choice(NamedTuple):
    """How each group runs: the position of its way, and whether it is offloaded."""

    ways: Ways
    offloaded: tuple[bool, ...]


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
        choices = [self._plain] if free else _Choices(self.groups, self._counted, self.limit).best()
        plan, ways, fits = None, self._plain, False
        for ways_ in choices:
            # Placement leaves out what the host delays inside of a group; the next is taken if that matters.
            found, result = self._described(ways_, self._leaner(ways_, self._counted(ways_)).plan())
            if plan is None or result.device_peak_bytes < (plan.peak_bytes or 0):
                plan, ways, fits = found, ways_, result.device_peak_bytes <= self.limit
            if fits:
                break
        assert plan is not None
        if not fits:
            return self._about_as_lean(plan)
        if (plan.seconds or 0.0) <= baseline:
            return plan
        for choice in self._changed_one_by_one(ways):
            found, result = self._described(choice.ways, self._placement(choice).plan())
            if result.device_peak_bytes <= self.limit and result.step_time < (plan.seconds or inf):
                return found
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
        for number in dict.fromkeys(numbers):
            placement = self._place(profile, profile.movable[:number], allowed)
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

    def _placement(self, choice: _Choice) -> Placement:
        profile = self._profile(choice.ways)
        return self._place(profile, [k for k in profile.movable if choice.offloaded[k]])

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

    # Annealing

    def _changed_one_by_one(self, ways: Ways) -> list[_Choice]:
        """Return the fastest few choices within the limit that were found by changing single groups, the best first.

        A change that makes the step longer is taken with a probability that falls from change to change
        (S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing", Science 220, 1983).  The
        random numbers are the same each time.
        """
        rate, step_seconds = min(self.link.d2h, self.link.h2d), self.keep.seconds
        known: dict[_Choice, tuple[float, bool]] = {}

        def cost(choice: _Choice) -> float:
            if choice not in known:
                placement = self._placement(choice)
                excess = max(placement.peak_bytes - self.limit, 0.0)
                known[choice] = placement.seconds + PENALTY * excess / rate, not excess
            return known[choice][0]

        released = self._counted(ways, quick=True).released
        now = _Choice(ways, tuple(k in released for k in range(len(ways))))
        rng, seconds, counts = random.Random(0), cost(now), [len(group) for group in self.groups]
        tries = min(CHANGES // len(counts) ** 2, MOST_CHANGES)
        for k in range(tries):
            temperature = step_seconds * HOT * (COLD / HOT) ** (k / tries)
            other = _changed(now, counts, rng)
            then = cost(other)
            if then <= seconds or (temperature and rng.random() < math.exp((seconds - then) / temperature)):
                now, seconds = other, then
        fitting = [choice for choice, (_, fits) in known.items() if fits]
        return sorted(fitting, key=cost)[:FINAL]


def _changed(choice: _Choice, counts: Sequence[int], rng: random.Random) -> _Choice:
    """Return a choice in which one group runs in another way, or two groups have changed places."""
    ways, offloaded = list(choice.ways), list(choice.offloaded)
    one, other = rng.randrange(len(counts)), rng.randrange(len(counts))
    kind = rng.random()
    if kind < 0.2:
        ways[one] = rng.randrange(counts[one])
    elif kind < 0.4:
        ways[one] = min(max(ways[one] + rng.choice((-2, -1, 1, 2)), 0), counts[one] - 1)
    elif kind < 0.6:
        offloaded[one] = not offloaded[one]
    else:
        ways[one], ways[other] = min(ways[other], counts[one] - 1), min(ways[one], counts[other] - 1)
        offloaded[one], offloaded[other] = offloaded[other], offloaded[one]
    return _Choice(tuple(ways), tuple(offloaded))


class _Choices:
    """Searches how many groups run in which way."""

    def __init__(self, groups: Sequence[Sequence[Variant]], counted: Callable[..., Placement], limit: float) -> None:
        self._groups, self._counted, self._limit = groups, counted, limit
        # Backward begins with the last group, which is seldom worth recomputing.
        self._may = [k for k in range(len(groups) - 1) if len(groups[k]) > 1]
        self._known: dict[Ways, Rank] = {}
        self._tries = min(max(WORK // max(len(groups), 1), TRIES), MOST_TRIES)

    def _rank(self, ways: Ways) -> Rank:
        if ways not in self._known:
            placement = self._counted(ways, quick=True)
            exceeds = placement.peak_bytes > self._limit
            self._known[ways] = exceeds, placement.peak_bytes if exceeds else placement.seconds
        return self._known[ways]

    def best(self) -> list[Ways]:
        """Return the best few, the best one first."""
        most = max(len(group) for group in self._groups)
        alike = [self._with((0,) * len(self._groups), self._may, way) for way in range(most)]
        best = min(alike, key=self._rank)
        number = max(len(self._may) // 2, 1)
        while number and len(self._known) < self._tries:
            better = next((found for found in self._near(best, number) if self._rank(found) < self._rank(best)), None)
            if better is None:
                number //= 2
            else:
                best = better
        return sorted(self._known, key=self._rank)[:FINAL]

    def _near(self, ways: Ways, number: int) -> Iterator[Ways]:
        """Yield choices in which a number of groups that run in one way run in another one."""
        most = max(len(group) for group in self._groups)
        for way in sorted({ways[k] for k in self._may}, key=lambda way: -sum(way == other for other in ways)):
            same = [k for k in self._may if ways[k] == way]
            count = min(number, len(same))
            spread = tuple(same[(k + 1) * len(same) // count - 1] for k in range(count))
            for other in sorted((other for other in range(most) if other != way), key=lambda other: abs(other - way)):
                for some in dict.fromkeys((tuple(same[-number:]), spread, tuple(same[:number]))):
                    found = self._with(ways, some, other)
                    if len(self._known) < self._tries or found in self._known:
                        yield found

    def _with(self, ways: Ways, groups: Sequence[int], way: int) -> Ways:
        """Return a choice in which some groups run in another way, or the leanest one if they have fewer."""
        found = list(ways)
        for k in groups:
            found[k] = min(way, len(self._groups[k]) - 1)
        return tuple(found)
