"""A host that is slower than it was when the costs were measured.

Where steps are short, the host decides what a plan takes: a group of which outputs of operators are saved is work for
it.  A machine that others use is up to twice as slow from one step to the next.  So what a whole step takes with a plan
says how slow the host is, and the next plan is chosen for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedule.costs import Link
from ..schedule.simulate import simulate
from .group_plan import GroupPlan
from .variants import Variant

__all__ = ["host_factor", "with_slower_host"]

MOST, STEPS = 4.0, 12  # the largest factor that is looked for, and in how many steps
ROUNDING = 1e-6


def with_slower_host(groups: Sequence[Sequence[Variant]], factor: float) -> list[tuple[Variant, ...]]:
    """Return the ways to run groups with the times of the host multiplied by a factor."""
    return [
        tuple(
            replace(
                way,
                cost=replace(
                    way.cost,
                    host_forward=factor * way.cost.host_forward,
                    host_backward=factor * way.cost.host_backward,
                ),
            )
            for way in group
        )
        for group in groups
    ]


def host_factor(
    plan: GroupPlan, groups: Sequence[Sequence[Variant]], link: Link, seconds: float, *, host_seconds: float = 0.0
) -> float:
    """Return by what factor the host is slower if a step with a plan takes some seconds.

    Parameters
    ----------
    plan : GroupPlan
        Of `choose_recomputed`, for the same groups.
    groups, link, host_seconds
        As in `choose_recomputed`.
    seconds : float
        What a step takes with the plan.

    Returns
    -------
    float
        Between 1 and `MOST`, rounded up a little; 1 if a slower host does not explain it.

    Examples
    --------
    >>> from actoffload.planner import GroupPlan, Variant, host_factor
    >>> from actoffload.schedule import LayerCost, Link, Plan
    >>> group = (Variant(LayerCost(0.010, 0.020, host_forward=0.010, host_backward=0.020)),)
    >>> plan = GroupPlan(("a", "b"), Plan(2), (0, 0))
    >>> round(host_factor(plan, [group] * 2, Link(d2h=5e10, h2d=5e10), 0.120), 3)
    2.0
    """
    ways = plan.saves or (None,) * len(groups)
    chosen = [[next(of for of in group if of.saves == way)] for group, way in zip(groups, ways, strict=True)]
    for step in range(STEPS + 1):
        factor: float = MOST ** (step / STEPS)
        costs = [of.cost for (of,) in with_slower_host(chosen, factor)]
        if simulate(plan.plan, costs, link, host_seconds=factor * host_seconds).step_time >= seconds * (1 - ROUNDING):
            return factor
    return 1.0
