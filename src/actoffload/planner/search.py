"""Search the plan: the fastest within a limit of memory, and among equally fast ones the one with the smallest peak."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, isfinite

from .._arguments import check_bytes, check_fits, check_kind, check_kinds, check_limit, check_seconds
from ..schedule.costs import LayerCost, Link
from ..schedule.plan import Plan
from ..schedule.simulate import simulate
from ..schedule.timeline import Simulation, size
from .group_plan import GroupPlan
from .placement import Placement, place
from .profile import Profile

__all__ = ["Search", "choose"]

ROUNDING = 1e-9  # relative; of two plans that differ by less the one with fewer copies is as fast
QUICK, FEW, SOME = 2, 4, 16  # numbers of groups that are tried for one limit


def choose(
    names: Sequence[str],
    layers: Sequence[LayerCost],
    link: Link,
    *,
    limit: int | None = None,
    host_seconds: float = 0.0,
    host_caution: float = 1.0,
    tolerance: float = 0.002,
    among: Collection[int] | None = None,
    without_bytes: int | None = None,
    excess: int = 0,
    host_limit: int | None = None,
) -> GroupPlan:
    """Return the fastest plan whose peak is within a limit.

    Of the plans that are at most `tolerance` slower than the fastest, it is the one with the smallest peak.  If no plan
    is within the limit, it is the one with the smallest peak of all.

    Parameters
    ----------
    names : sequence of str
        The groups, in execution order.
    layers : sequence of LayerCost
        The cost of each.
    link : Link
        How fast copies are.
    limit : int, optional
        Bytes of device memory in forward and backward; None for no limit.
    host_seconds : float
        Seconds that the host spends on each saved tensor of an offloaded group, in forward and again in backward.
    host_caution : float
        Factor of `host_seconds` in the choice, for a host that may be as much slower; not in the expected time.
    tolerance : float
        Part of the time of a step.
    among : collection of int, optional
        Positions of the groups that may be offloaded; None for all.
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

    Notes
    -----
    The plans that are tried offload the first groups of the sequence that save anything, for each number of them, or
    those of the first groups that fit beside each other without a cost; never the last group, because backward begins
    there.

    Raises
    ------
    ValueError
        If there are not as many names as costs, or none.

    Examples
    --------
    >>> from actoffload.planner import choose
    >>> from actoffload.schedule import LayerCost, Link
    >>> layers = [LayerCost.even(256 * 2**20, forward=0.010, backward=0.020)] * 8
    >>> plan = choose([f"h.{k}" for k in range(8)], layers, Link(d2h=25.6 * 2**30, h2d=25.6 * 2**30))
    >>> plan.offloaded
    (0, 1, 2, 3, 4, 5)
    """
    check_search(names, link, limit, host_seconds, host_caution, tolerance, among, without_bytes, excess, host_limit)
    check_kinds(LayerCost, layers=layers)
    if not names or len(names) != len(layers):
        raise ValueError(f"There are {len(names)} groups but {len(layers)} costs; give one cost for each group.")
    search = Search(
        Profile.of(layers, link, among, host_limit=host_limit),
        link,
        host_seconds,
        host_seconds * host_caution,
        inf if limit is None else limit - excess,
        tolerance,
        without_bytes,
        excess,
    )
    return search.result(tuple(names))


def check_search(
    names: Sequence[str],
    link: Link,
    limit: int | None = None,
    host_seconds: float = 0.0,
    host_caution: float = 1.0,
    tolerance: float = 0.0,
    among: Collection[int] | None = None,
    without_bytes: int | None = None,
    excess: int = 0,
    host_limit: int | None = None,
) -> None:
    """Raise a `TypeError` or `ValueError` for the first argument of `choose` that is of another type."""
    check_kinds(str, names=names)
    check_kind(Link, link=link)
    check_limit(limit=limit)
    check_limit(host_limit=host_limit)
    check_seconds(host_seconds=host_seconds)
    check_fits("a number, 0 or more", lambda value: value >= 0, host_caution=host_caution, tolerance=tolerance)
    if among is not None:
        expected = "positions of groups, or None for all"
        check_fits(expected, lambda value: all(place >= 0 for place in value), among=among)
    if without_bytes is not None:
        check_bytes(without_bytes=without_bytes)
    check_fits("a number of bytes", isfinite, excess=excess)


@dataclass
class Search:
    """The search for one limit."""

    profile: Profile
    link: Link
    expected_host_seconds: float
    host_seconds: float
    limit: float
    tolerance: float
    without_bytes: int | None = None
    excess: int = 0  # by which the limit that was given is larger

    def __post_init__(self) -> None:
        self.place = partial(place, self.profile, host_seconds=self.host_seconds)

    @cached_property
    def keep(self) -> Placement:
        """The placement that offloads nothing."""
        return self.place(())

    def result(self, names: tuple[str, ...]) -> GroupPlan:
        """Return the best of the few best plans, by `simulate`."""
        plans = [placement.plan() for placement in self.finalists()]
        found = [(plan, self.simulate(plan, self.host_seconds)) for plan in plans]
        fitting = [(plan, result) for plan, result in found if result.device_peak_bytes <= self.limit]
        fastest = min((result.step_time for _, result in fitting), default=inf)
        good = [(plan, result) for plan, result in fitting if result.step_time <= fastest * (1 + self.tolerance)]
        plan, result = min(good or found, key=lambda each: (each[1].device_peak_bytes, each[1].step_time))
        return self.described(names, plan, result)

    def described(self, names: tuple[str, ...], plan: Plan, result: Simulation) -> GroupPlan:
        """Return a plan with the reason for it and what is expected of it; `result` is from its simulation."""
        because, expected = self.because(plan, result), result
        if self.expected_host_seconds != self.host_seconds:
            expected = self.simulate(plan, self.expected_host_seconds)
        return GroupPlan(
            names,
            plan,
            tuple(self.profile.nbytes),
            seconds=expected.step_time,
            baseline_seconds=expected.baseline,
            peak_bytes=expected.device_peak_bytes,
            because=because,
        )

    def simulate(self, plan: Plan, host_seconds: float) -> Simulation:
        """Return what a plan gives."""
        return simulate(plan, self.profile.costs, self.link, host_seconds=host_seconds)

    def finalists(self) -> Iterator[Placement]:
        """Yield the fastest plan, and the one with the smallest peak that is about as fast."""
        smallest = min(self.profile.leanest)
        fastest = self.keep if self.keep.peak_bytes <= self.limit else self.within(self.limit)
        if fastest is None:
            yield self.place(self.first(self.profile.leanest.index(smallest)), smallest)
            return
        yield fastest
        allowed = fastest.seconds * (1 + self.tolerance)
        low, best = smallest, fastest
        while best.peak_bytes - low > max(best.peak_bytes >> 8, 1):
            middle = (low + best.peak_bytes) // 2
            lean = self.within(middle, allowed, len(best.released))
            low, best = (middle, best) if lean is None else (low, lean)
        if best is not fastest:
            yield best
        if fastest is self.keep and self.host_seconds:
            yield self.free(allowed)

    def quick(self) -> Placement:
        """Return about the fastest placement within the limit, or the one with the smallest peak."""
        if self.keep.peak_bytes <= self.limit:
            return self.keep
        found = self.within(self.limit, few=QUICK)
        smallest = min(self.profile.leanest)
        return self.place(self.first(self.profile.leanest.index(smallest)), smallest) if found is None else found

    def free(self, allowed: float) -> Placement:
        """Return the placement of each group, one after the other, that fits beside those before it without a cost.

        The first groups of a sequence may have to stay: a host that waits for the device between two steps is not yet
        ahead of it, and the time of the hooks shows.
        """
        found, chosen, refused = self.keep, list[int](), 0
        for k in self.profile.movable:
            placement = self.place((*chosen, k), self.limit, allowed=allowed)
            if placement.seconds < inf and placement.peak_bytes <= found.peak_bytes:
                chosen.append(k)
                found, refused = placement, 0
                continue
            refused += 1
            if refused >= (SOME if chosen else 2 * SOME):
                break
        return found

    def first(self, number: int) -> Sequence[int]:
        """Return the first groups that can be offloaded."""
        return self.profile.movable[:number]

    def within(
        self, limit: float, allowed: float = inf, known: int | None = None, few: int | None = None
    ) -> Placement | None:
        """Return the fastest placement within a limit; with `known`, the first that takes at most `allowed` seconds.

        Few groups more than must be offloaded are best, since each costs copies: these are tried first, then `known`
        or, without it, some of the others; with `few`, only that number.
        """
        found, leanest = None, self.profile.leanest
        least = next((k for k, peak in enumerate(leanest) if peak <= limit), len(leanest))
        numbers = [*range(least, len(leanest))[: few or FEW]]
        if known is None and few is None:
            numbers += range(least, len(leanest), max(1, len(leanest) // SOME))
        elif known is not None and known >= least:
            numbers.append(known)
        for number in dict.fromkeys(numbers):
            placement = self.place(self.first(number), limit, allowed=allowed)
            if placement.peak_bytes > limit or placement.seconds == inf:
                continue
            if known is not None:
                return placement
            if found is None or placement.seconds < found.seconds:
                found, allowed = placement, placement.seconds * (1 - ROUNDING)
        return found

    def beyond(self) -> str:
        """Return the reason for a plan that exceeds the limit."""
        return f"No plan is within the limit of {self.given}; this one has the smallest peak."

    @property
    def given(self) -> str:
        """The limit as it was given."""
        return size(int(self.limit) + self.excess)

    @property
    def without(self) -> int:
        """The peak without offloading, in bytes."""
        return self.keep.peak_bytes if self.without_bytes is None else self.without_bytes

    def above(self, action: str) -> str:
        """Return the reason for a plan that costs time, where memory would be too small without an action."""
        return f"Without {action} the peak would be {size(self.without)}, above the limit of {self.given}."

    def because(self, plan: Plan, result: Simulation) -> str:
        """Return why this plan was chosen."""
        allowed = self.keep.seconds * (1 + self.tolerance)
        if result.device_peak_bytes > self.limit:
            return self.beyond()
        if self.without > self.limit and result.step_time > allowed:
            return self.above("offloading")
        if plan.offloaded:
            return ""
        if not self.profile.movable:
            return "No group before the last one saves anything that can be offloaded."
        movable = self.profile.movable
        ones = [(k,) for k in {movable[0], movable[len(movable) // 2], movable[-1]}]
        alone = [place(self.profile, one, allowed=allowed) for one in ones]
        if not any(placement.released and placement.seconds < inf for placement in alone):
            return "Nothing is offloaded, because no copy fits beside the compute."
        if all(self.place(one, allowed=allowed).seconds == inf for one in ones):
            return "Nothing is offloaded, because the host is as slow as the device, so that hooks would cost time."
        return "Nothing is offloaded, because no plan without a cost in time has a smaller peak."
