"""Search the plan where groups may also be recomputed: which ones and how, beside what is offloaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeAlias

from .._arguments import check_kinds
from ..schedule.costs import Link
from .annealing import Choice, anneal
from .group_plan import GroupPlan
from .placement import Placement
from .profile import Alone, Profile
from .search import Search, check_search
from .variants import Variant

__all__ = ["choose_recomputed"]

TRIES, MOST_TRIES = 80, 400  # choices of variants that are tried: for many groups, for few
WORK = 8000  # choices times groups, between them
NEAR = 0.002  # of the smallest peak, without what is always allocated: plans that differ by less have about the same
FINAL = 2  # of them for which a plan is simulated

Chosen: TypeAlias = tuple[int, ...]
"""For each group the position of its variant."""
Rank: TypeAlias = tuple[bool, float]
"""Whether the limit is exceeded; then the peak, otherwise the time."""


def choose_recomputed(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
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
    """Return the fastest plan within a limit, in which groups are kept, offloaded, recomputed, or both of the latter.

    Parameters
    ----------
    names, link, limit, host_seconds, host_caution, tolerance, among, without_bytes, excess, host_limit
        As in `choose`.
    groups : sequence of sequence of Variant
        The ways to run each group; the first is without recomputation.

    Returns
    -------
    GroupPlan
        Its `recomputed_nbytes` are what the groups save less than without recomputation.

    Notes
    -----
    Without a limit that forces it nothing is recomputed.  Blocks are alike, so the search is for numbers of groups
    first: it begins with the best plan in which all groups run in the same way, and changes as many groups as makes the
    plan better, first a quarter of them, at last single ones: the first, the last, or some at equal distances.  Then
    single groups are changed, as in `annealing`.

    Examples
    --------
    >>> from actoffload.planner import Variant, choose_recomputed
    >>> from actoffload.schedule import LayerCost, Link
    >>> plain = LayerCost.even(2**30, forward=0.010, backward=0.020)
    >>> recomputed = LayerCost.even(2**28, forward=0.010, backward=0.024)
    >>> group = (Variant(plain), Variant(recomputed, saves=("aten.mm.default#0",)))
    >>> plan = choose_recomputed("abcdefgh", [group] * 8, Link(d2h=5e10, h2d=5e10), limit=3 * 2**30)
    >>> plan.peak_bytes <= 3 * 2**30, len(plan.recomputed) > 0, plan.seconds < 0.30
    (True, True, True)
    """
    check_search(names, link, limit, host_seconds, host_caution, tolerance, among, without_bytes, excess, host_limit)
    check_variants(names, groups)
    limit = None if limit is None else limit - excess
    known = {id(variant.cost): Alone.of(variant.cost, link) for group in groups for variant in group}

    def search(chosen: Chosen) -> Search:
        costs = [group[k].cost for group, k in zip(groups, chosen, strict=True)]
        profile = Profile.of(costs, link, among, known, host_limit)
        most = inf if limit is None else limit
        caution = host_seconds * host_caution
        return Search(profile, link, host_seconds, caution, most, tolerance, without_bytes, excess)

    def placement(choice: Choice) -> Placement:
        searched = search(choice.variants)
        offloaded = [k for k in searched.profile.movable if choice.offloaded[k]]
        return searched.place(offloaded, searched.limit)

    plain = (0,) * len(groups)
    without = search(plain)
    baseline, most = without.keep.seconds, inf if limit is None else limit
    placed = without.quick()
    if placed.peak_bytes <= most and placed.seconds <= baseline * (1 + tolerance):
        return without.result(tuple(names))
    found = _Choices(groups, lambda chosen: search(chosen).quick(), most).best()
    # Placement leaves out what the host delays inside of a group; the next one is taken if a limit does not allow that.
    plans = [(search(found[0]).result(tuple(names)), found[0])]
    while (plans[-1][0].peak_bytes or 0) > most and len(plans) < len(found):
        chosen = found[len(plans)]
        plans.append((search(chosen).result(tuple(names)), chosen))
    plan, chosen = min(plans, key=lambda each: each[0].peak_bytes or 0) if len(plans) > 1 else plans[0]
    least = plan.peak_bytes or 0
    if limit is not None and least > limit:  # of the plans with about the smallest peak the fastest
        how: dict[str, Any] = {"host_seconds": host_seconds, "host_caution": host_caution, "tolerance": tolerance}
        always = min(level for group in groups for level in group[0].cost.other_bytes)
        nearly = math.ceil(least + NEAR * (least - always))
        near = choose_recomputed(names, groups, link, limit=nearly, among=among, host_limit=host_limit, **how)
        return replace(near, because=without.beyond())
    placed = search(chosen).quick()
    start = Choice(chosen, tuple(k in placed.released for k in range(len(groups))))
    counts, rate = [len(group) for group in groups], min(link.d2h, link.h2d)
    for choice in anneal(start, placement, counts, limit=most, step_seconds=baseline, rate=rate, few=FINAL):
        searched, better = search(choice.variants), placement(choice).plan()
        result = searched.simulate(better, searched.host_seconds)
        if result.device_peak_bytes <= most and result.step_time < (plan.seconds or inf):
            plan, chosen = searched.described(tuple(names), better, result), choice.variants
            break
    if not any(chosen):
        return plan
    because = without.above("offloading and recomputing")
    return replace(_described(plan, groups, chosen, baseline), because=because)


def check_variants(names: Sequence[str], groups: Sequence[Sequence[Variant]]) -> None:
    """Raise a `TypeError` or `ValueError` if `groups` has not ways to run each of the named groups."""
    check_kinds(Sequence, groups=groups)
    for place, group in enumerate(groups):
        check_kinds(Variant, optional=False, **{f"groups[{place}]": group})
    if not names or len(names) != len(groups) or not all(groups):
        raise ValueError(
            f"There are {len(names)} names and {len(groups)} groups; give one name and at least one Variant for each."
        )


def _described(
    plan: GroupPlan, groups: Sequence[Sequence[Variant]], chosen: Chosen, baseline_seconds: float
) -> GroupPlan:
    """Return a plan that says what is recomputed and what that costs."""
    variants = [group[k] for group, k in zip(groups, chosen, strict=True)]
    pairs = [(variant.cost, group[0].cost) for variant, group in zip(variants, groups, strict=True)]
    return replace(
        plan,
        baseline_seconds=baseline_seconds,
        recomputed_nbytes=tuple(max(own.nbytes - cost.nbytes, 0) for cost, own in pairs),
        recompute_seconds=max(sum(cost.backward - own.backward for cost, own in pairs), 0.0),
        saves=tuple(variant.saves for variant in variants),
    )


class _Choices:
    """Searches which variant of each group is best."""

    def __init__(self, groups: Sequence[Sequence[Variant]], place: Callable[[Chosen], Placement], limit: float) -> None:
        self._groups, self._place, self._limit = groups, place, limit
        # Backward begins with the last group, which is seldom worth recomputing.
        self._may = [k for k in range(len(groups) - 1) if len(groups[k]) > 1]
        self._known: dict[Chosen, Rank] = {}
        self._tries = min(max(WORK // max(len(groups), 1), TRIES), MOST_TRIES)

    def rank(self, chosen: Chosen) -> Rank:
        if chosen not in self._known:
            placement = self._place(chosen)
            exceeds = placement.peak_bytes > self._limit
            self._known[chosen] = exceeds, placement.peak_bytes if exceeds else placement.seconds
        return self._known[chosen]

    def best(self) -> list[Chosen]:
        """Return the best few, the best one first."""
        most = max((len(group) for group in self._groups), default=1)
        alike = [self._changed((0,) * len(self._groups), self._may, variant) for variant in range(most)]
        best = min(alike, key=self.rank)
        size = max(len(self._may) // 2, 1)
        while size and len(self._known) < self._tries:
            better = next((found for found in self._near(best, size) if self.rank(found) < self.rank(best)), None)
            if better is None:
                size //= 2
            else:
                best = better
        return sorted(self._known, key=self.rank)[:FINAL]

    def _near(self, chosen: Chosen, size: int) -> Iterator[Chosen]:
        """Yield choices in which `size` groups of one variant have another one."""
        most = max(len(group) for group in self._groups)
        present = sorted({chosen[k] for k in self._may}, key=lambda variant: -sum(k == variant for k in chosen))
        for variant in present:
            of = [k for k in self._may if chosen[k] == variant]
            others = sorted((other for other in range(most) if other != variant), key=lambda n: abs(n - variant))
            for other in others:
                for some in dict.fromkeys((_last(of, size), _spread(of, size), _first(of, size))):
                    found = self._changed(chosen, some, other)
                    if len(self._known) < self._tries or found in self._known:
                        yield found

    def _changed(self, chosen: Chosen, groups: Sequence[int], variant: int) -> Chosen:
        """Return a choice in which some groups have another variant, or the leanest one if they have fewer."""
        found = list(chosen)
        for k in groups:
            found[k] = min(variant, len(self._groups[k]) - 1)
        return tuple(found)


def _last(of: Sequence[int], number: int) -> Chosen:
    return tuple(of[-number:])


def _first(of: Sequence[int], number: int) -> Chosen:
    return tuple(of[:number])


def _spread(of: Sequence[int], number: int) -> Chosen:
    """Return `number` of them at equal distances, the last one at the end."""
    number = min(number, len(of))
    return tuple(of[(k + 1) * len(of) // number - 1] for k in range(number))
