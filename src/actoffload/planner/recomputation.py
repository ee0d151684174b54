"""Search the plan where groups may also be recomputed: which ones, beside what is offloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from ..schedule.costs import LayerCost, Link
from .group_plan import GroupPlan
from .search import choose

__all__ = ["choose_recomputed"]

TRIES = 12  # numbers of recomputed groups that are tried for each pattern


def choose_recomputed(
    names: Sequence[str],
    layers: Sequence[LayerCost],
    recomputed: Sequence[LayerCost | None],
    link: Link,
    *,
    limit: int | None = None,
    **more: Any,
) -> GroupPlan:
    """Return the fastest plan within a limit, in which groups are kept, offloaded, recomputed, or both of the latter.

    Parameters
    ----------
    names, layers, link, limit, **more
        As in `choose`.
    recomputed : sequence of LayerCost or None
        The cost of each group if it is recomputed: what it saves then, and the longer backward.  None if it may not be.

    Returns
    -------
    GroupPlan
        Its `recomputed_nbytes` are what the groups save less than without recomputation.

    Notes
    -----
    Without a limit that forces it nothing is recomputed.  Blocks are alike, so the search is for a number: the last
    groups are recomputed, for whose copies there is the least time, or groups at equal distances.  The time of the step
    first falls with that number, because compute waits less for copies, and then rises.

    Examples
    --------
    >>> from actoffload.planner import choose_recomputed
    >>> from actoffload.schedule import LayerCost, Link
    >>> layers = [LayerCost.even(2**30, forward=0.010, backward=0.020)] * 8
    >>> less = [LayerCost.even(2**28, forward=0.010, backward=0.024)] * 8
    >>> plan = choose_recomputed("abcdefgh", layers, less, Link(d2h=5e10, h2d=5e10), limit=3 * 2**30)
    >>> plan.peak_bytes <= 3 * 2**30, sum(map(bool, plan.recomputed_nbytes)) > 0, plan.seconds < 0.30
    (True, True, True)
    """

    def search(positions: tuple[int, ...]) -> GroupPlan:
        mixed, less = list(layers), [0] * len(layers)
        for k in positions:
            cost = recomputed[k]
            assert cost is not None
            mixed[k], less[k] = cost, layers[k].nbytes - cost.nbytes
        found = choose(names, mixed, link, limit=limit, **more)
        return replace(found, recomputed_nbytes=tuple(less)) if positions else found

    def rank(plan: GroupPlan) -> tuple[float, float]:
        """Return what is to be small: the time of a plan within the limit; of the others the peak."""
        peak, seconds = plan.peak_bytes or 0, plan.seconds or 0.0
        return (0.0, seconds) if limit is None or peak <= limit else (1.0, float(peak))

    best = search(())
    without = best.baseline_seconds or inf
    may = [k for k in range(len(layers) - 1) if (of := recomputed[k]) is not None and of.nbytes < layers[k].nbytes]
    if limit is None or not may or (rank(best)[0] == 0.0 and rank(best)[1] <= without * (1 + more.get("tolerance", 0))):
        return best
    for pattern in (_last, _spread, _first):
        positions = [pattern(may, number) for number in range(1, len(may) + 1)]
        best = min(best, _smallest(search, positions, rank), key=rank)
    best = _improved(search, best, may, rank)
    return replace(best, baseline_seconds=without) if best.recomputed_nbytes else best


def _improved(
    search: Callable[[tuple[int, ...]], GroupPlan],
    best: GroupPlan,
    may: Sequence[int],
    rank: Callable[[GroupPlan], tuple[float, float]],
) -> GroupPlan:
    """Return a plan that is as good or better, in which single groups were moved, left out or added."""
    left, tried = 2 * TRIES, {best.recomputed}
    better = True
    while better and left > 0:
        better, now = False, set(best.recomputed)
        moves = [now ^ {k, other} for k in now for other in (k - 1, k + 1) if other in may and other not in now]
        moves += [now ^ {k} for k in may]
        for move in moves:
            positions = tuple(sorted(move))
            if positions in tried or left <= 0:
                continue
            tried.add(positions)
            left -= 1
            found = search(positions)
            if rank(found) < rank(best):
                best, better = found, True
                break
    return best


def _last(may: Sequence[int], number: int) -> tuple[int, ...]:
    return tuple(may[len(may) - number :])


def _first(may: Sequence[int], number: int) -> tuple[int, ...]:
    return tuple(may[:number])


def _spread(may: Sequence[int], number: int) -> tuple[int, ...]:
    """Return so many at equal distances, the last of them at the end."""
    return tuple(may[(k + 1) * len(may) // number - 1] for k in range(number))


def _smallest(
    search: Callable[[tuple[int, ...]], GroupPlan],
    positions: Sequence[tuple[int, ...]],
    rank: Callable[[GroupPlan], tuple[float, float]],
) -> GroupPlan:
    """Return the plan with the smallest rank, if ranks along the sequence first fall and then rise."""
    known: dict[int, GroupPlan] = {}

    def at(number: int) -> tuple[float, float]:
        if number not in known:
            known[number] = search(positions[number])
        return rank(known[number])

    low, high = 0, len(positions) - 1
    while high - low > TRIES // 2 and len(known) < TRIES:
        third = max((high - low) // 3, 1)
        left, right = low + third, high - third
        if at(left) <= at(right):
            high = right
        else:
            low = left
    for number in {*range(low, high, max((high - low) // (TRIES // 2), 1)), high}:
        at(number)
    return min(known.values(), key=rank)
