"""Which plan is kept where none without offloading fits, and by which costs other plans are told from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from actoffload.model.tuning.findings import Findings
from actoffload.model.tuning.fitting import HOSTS, Fitting
from actoffload.model.tuning.timed_pass import Stage
from actoffload.planner import GroupPlan, Variant, choose_recomputed, frontier
from actoffload.planner.variants import with_host
from actoffload.schedule import LayerCost, Link

GIB = 2**30
LIMIT = 4 * GIB
NAMES = [f"h.{k}" for k in range(8)]
COSTS = (
    NAMES,
    [
        (
            Variant(LayerCost.even(GIB, forward=0.010, backward=0.020)),
            Variant(replace(LayerCost.even(GIB // 4, forward=0.010, backward=0.022), host_forward=0.012), ("mm#0",)),
            Variant(replace(LayerCost.even(GIB // 32, forward=0.010, backward=0.030), host_forward=0.002), ()),
        )
    ]
    * len(NAMES),
    Link(d2h=1e10, h2d=1e10),
)


# The same where the host takes nearly as long as the device, also without recomputation.
SLOW = (
    NAMES,
    [
        tuple(
            replace(way, cost=replace(way.cost, host_forward=forward, host_backward=backward))
            for way, forward, backward in zip(COSTS[1][0], (0.009, 0.012, 0.009), (0.004, 0.012, 0.013), strict=True)
        )
    ]
    * len(NAMES),
    COSTS[2],
)


def fitted(seconds: Callable[[GroupPlan], float], given: Any = COSTS) -> tuple[Findings, GroupPlan]:
    """Return what is found, and the plan that is kept, where passes with a plan take so many seconds."""
    found = Findings(
        limit=LIMIT,
        size=1,
        choose=partial(choose_recomputed, *given, limit=LIMIT),
        search_frontier=partial(frontier, *given),
    )
    script = Fitting(None, found, lambda: False).run(found.chosen())  # type: ignore[arg-type]
    timed: Any = None
    while True:
        try:
            stage = script.send(timed)
        except StopIteration as end:
            found.plan = end.value
            return found, end.value
        assert stage is Stage.PLAN
        assert found.plan is not None
        timed = SimpleNamespace(
            stage=stage,
            wait=lambda backend: None,
            pace=partial(lambda took, backend: took, seconds(found.plan)),
            peak_at=partial(lambda peak, *_: peak, found.plan.peak_bytes),
        )


def plans(factor: float, given: Any = COSTS) -> GroupPlan:
    names, ways, link = given
    return choose_recomputed(names, with_host(ways, factor), link, limit=LIMIT)


@pytest.mark.parametrize("factor", [1.0, *HOSTS])
def test_the_costs_are_those_by_which_the_kept_plan_was_found(factor):
    """A host that takes twice as long makes other plans slower too, also the smaller one that a report names."""
    best = plans(factor)
    found, plan = fitted(lambda of: (of.seconds or 0.0) * (1.0 if of.saves == best.saves else 2.0))
    assert (plan.saves, plan.plan) == (best.saves, best.plan)
    assert found.choose is not None
    assert found.choose.args[1] == with_host(COSTS[1], factor)
    assert plan.seconds == pytest.approx(best.seconds)
    smaller = [of for of in found.frontier() if (of.peak_bytes or 0) <= (plan.peak_bytes or 0)]
    assert min(of.seconds or 0.0 for of in smaller) >= 0.99 * (plan.seconds or 0.0)


@pytest.mark.parametrize("longer", [1.0, 0.78, 1.3])
def test_passes_without_offloading_are_told_by_the_costs_of_the_kept_plan_too(longer):
    """A slower host makes them longer as well; so the kept plan and the others have one baseline."""
    best = plans(2.0, SLOW)
    assert best.baseline_seconds > 1.2 * plans(1.0, SLOW).baseline_seconds
    kept = longer * best.seconds
    found, plan = fitted(lambda of: kept if (of.saves, of.plan) == (best.saves, best.plan) else 1.02 * kept, SLOW)
    assert (plan.saves, plan.plan) == (best.saves, best.plan)
    assert plan.seconds == pytest.approx(kept)
    assert plan.baseline_seconds == pytest.approx(longer * best.baseline_seconds)
    others = found.frontier()
    assert {of.baseline_seconds for of in others} == {plan.baseline_seconds}
    assert [of.seconds for of in others] == sorted((of.seconds for of in others), reverse=True)
    assert min(of.seconds for of in others if of.peak_bytes <= plan.peak_bytes) >= 0.99 * plan.seconds


def test_plans_for_other_hosts_differ():
    """Otherwise the tests above show nothing."""
    assert len({plans(factor).saves for factor in (1.0, *HOSTS)}) == 3
