"""Which plans are tried after others, from what all ranks know: no rank stays above its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actoffload.pipeline.planning import Limits, Measured, Trial, Tried, judge, plans_of
from actoffload.planner import Variant
from actoffload.schedule import LayerCost, Link, StageCost, one_f_one_b

PLAIN = LayerCost.even(1000, forward=1.0, backward=2.0)
AGAIN = LayerCost.even(100, forward=1.0, backward=3.0)
LIMIT = 4500
LIMITS = Limits(memory_budget=LIMIT, may_recompute=True)


def measured(rate: float = 200.0) -> list[Measured]:
    """Return what two ranks have measured, each with a stage of two groups."""
    ways = [(Variant(PLAIN), Variant(AGAIN, ()))] * 2
    return [
        Measured(
            rank, order, {rank: ("a", "b")}, {rank: StageCost((PLAIN,) * 2)}, Link(rate, rate), LIMIT, {rank: ways}
        )
        for rank, order in enumerate(one_f_one_b(2, 8))
    ]


def tried(seconds: float, *peaks: int) -> list[Tried]:
    return [Tried(seconds, None, peak) for peak in peaks]


def test_plans_for_less_follow_those_that_took_more_than_the_limit():
    known = measured()
    plans = plans_of(known, LIMITS)
    first, second = (plan.peak_bytes or 0 for plan in plans)
    trials = [Trial.of(plans, tried(1.0, LIMIT + 300, second), whole=False)]
    verdict = judge(trials, known, LIMITS)
    assert not verdict.final
    assert not verdict.whole
    assert (verdict.plans[0].peak_bytes or 0) <= LIMIT - (LIMIT + 300 - first)


def test_whole_replay_follows_plans_that_are_not_much_faster():
    known = measured()
    plans = plans_of(known, LIMITS)
    peaks = [plan.peak_bytes or 0 for plan in plans]
    assert judge([Trial.of(plans, tried(1.0, *peaks), whole=False)], known, LIMITS).final
    trials = [Trial.of(plans, tried(1000.0, *peaks), whole=False)]
    verdict = judge(trials, known, LIMITS)
    assert (verdict.whole, verdict.final) == (True, False)
    assert all(plan.saves == {plan.rank: ((), ())} and not plan.transfers for plan in verdict.plans)
    for seconds, kept in ((999.0, verdict.plans), (1001.0, plans)):
        both = [*trials, Trial.of(verdict.plans, tried(seconds, *peaks), whole=True)]
        found = judge(both, known, LIMITS)
        assert found.final
        assert [plan.saves for plan in found.plans] == [plan.saves for plan in kept]


@pytest.mark.parametrize("over", [0, 1])
def test_plans_that_fit_win_over_faster_ones(over):
    known = measured()
    plans = plans_of(known, LIMITS)
    peaks = [plan.peak_bytes or 0 for plan in plans]
    others = tuple(replace(plan, saves={plan.rank: ((), ())}, transfers={}) for plan in plans)
    trials = [Trial.of(plans, tried(1.0, LIMIT + over, peaks[1]), whole=False)]
    trials += [replace(trials[0], peaks=tuple(peaks), seconds=2.0, plans=others, whole=True)] * 3
    found = judge(trials, known, LIMITS)
    assert found.final
    assert (found.plans[0].saves == others[0].saves) == bool(over)
