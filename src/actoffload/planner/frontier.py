"""The plans that are worth having: each is faster than all with a smaller peak."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from .._arguments import check_whole
from ..schedule.costs import Link
from ..schedule.plan import Plan
from ..schedule.simulate import simulate
from .group_plan import GroupPlan
from .recomputation import check_variants, choose_recomputed
from .search import check_search
from .variants import Variant

__all__ = ["frontier"]

LEANEST = "This is about the smallest peak that a plan reaches."
FASTEST = "This is the fastest plan that was found with at most this peak."


def frontier(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    *,
    host_seconds: float = 0.0,
    host_caution: float = 1.0,
    among: Collection[int] | None = None,
    host_limit: int | None = None,
    points: int = 16,
) -> tuple[GroupPlan, ...]:
    """Return plans from the smallest peak to that without offloading, each faster than those before it.

    ``because`` says what each plan is among them, and names no limit, because none was given.

    Parameters
    ----------
    names, groups, link, host_seconds, host_caution, among, host_limit
        As in `choose_recomputed`.
    points : int
        Number of limits of device memory, at equal distances, for which a plan is searched.

    Examples
    --------
    >>> from actoffload.planner import Variant, frontier
    >>> from actoffload.schedule import LayerCost, Link
    >>> group = (Variant(LayerCost.even(2**30, forward=0.010, backward=0.020)),)
    >>> for plan in frontier(["a", "b", "c", "d"], [group] * 4, Link(d2h=5e10, h2d=5e10), points=3):
    ...     print(f"{plan.peak_bytes / 2**30:.2f} GiB {plan.seconds * 1e3:.0f} ms")
    1.00 GiB 170 ms
    2.00 GiB 134 ms
    3.00 GiB 120 ms
    """
    check_search(names, link, host_seconds=host_seconds, host_caution=host_caution, among=among, host_limit=host_limit)
    check_variants(names, groups)
    check_whole(points=points, least=1)
    keep, layers = Plan(len(names)), [group[0].cost for group in groups]
    without = simulate(keep, layers, link)
    kept = GroupPlan(
        tuple(names),
        keep,
        tuple(layer.nbytes for layer in layers),
        seconds=without.step_time,
        baseline_seconds=without.baseline,
        peak_bytes=without.device_peak_bytes,
        because="This plan offloads nothing.",
    )

    def search(limit: int | None) -> GroupPlan:
        return choose_recomputed(
            names,
            groups,
            link,
            limit=limit,
            host_seconds=host_seconds,
            host_caution=host_caution,
            among=among,
            host_limit=host_limit,
        )

    leanest, free = search(0), search(None)
    assert leanest.peak_bytes is not None
    assert free.peak_bytes is not None
    width = free.peak_bytes - leanest.peak_bytes
    limits = [leanest.peak_bytes + width * k // max(points - 1, 1) for k in range(1, points - 1)]
    between = (replace(plan, because=FASTEST) for plan in map(search, limits))
    plans = [replace(leanest, because=LEANEST), *between, replace(free, because=FASTEST), kept]
    found: list[GroupPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.seconds)):
        if not found or (plan.seconds or 0.0) < (found[-1].seconds or 0.0):
            found.append(plan)
    return tuple(found)
