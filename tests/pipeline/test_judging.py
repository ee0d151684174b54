"""Which plans are tried after others, from what all ranks know: no rank stays above its limit."""

from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest

from actoffload.pipeline.first_steps import FirstSteps, Limits, Plans, RankCosts, agreed, plans_of
from actoffload.planner import Variant
from actoffload.schedule import LayerCost, Link, Plan, StageCost, one_f_one_b
from actoffload.schedule.simulate import rank_plans
from actoffload.tune.meter import Shown
from actoffload.tune.script import Stage, Trial

PLAIN = LayerCost.even(1000, forward=1.0, backward=2.0)
AGAIN = LayerCost.even(100, forward=1.0, backward=3.0)
LIMIT = 4500
LIMITS = Limits(memory_budget=LIMIT, may_recompute=True)


def measured(rate: float = 200.0) -> list[RankCosts]:
    """Return what two ranks have measured, each with a stage of two groups."""
    ways = [(Variant(PLAIN), Variant(AGAIN, ()))] * 2
    return [
        RankCosts(plan, {rank: StageCost((PLAIN,) * 2)}, Link(rate, rate), LIMIT, {rank: ways})
        for rank, plan in enumerate(rank_plans(one_f_one_b(2, 8), [StageCost((PLAIN,) * 2)] * 2))
    ]


class Judge(FirstSteps):
    """First steps whose trials are asked for: seconds, and the peak of each rank."""

    def __init__(self, known: list[RankCosts], limits: Limits = LIMITS) -> None:
        self.known, self._limits, self.limits = known, limits, [each.limit for each in known]

    def _try(self, plans: Plans, once: bool) -> Generator[Any, Any, Trial]:
        seconds, *peaks = yield plans
        return Trial(plans, seconds, peaks, self.limits)

    def judge(self) -> Generator[Any, Any, Plans]:
        return self.keep_best(plans_of(self.known, self._limits))


class Timing(Judge):
    """First steps whose passes are asked for: the seconds of the slower rank, and the peak of each."""

    def _pass(self, stage: Stage) -> Generator[Any, Any, Any]:
        seconds, *peaks = yield stage
        return None, [Shown(seconds, peak) for peak in peaks]

    _try, follow = FirstSteps._try, lambda self, plans: None


@pytest.mark.parametrize(("over", "seconds", "passes"), [(0, 1.0, 1), (0, 1e4, 2), (1, 1.0, 3), (1, 1e4, 3)])
def test_at_most_three_passes_are_tried(over, seconds, passes):
    """A first plan that is slow runs twice; behind one above its limit a smaller one and whole replay run once."""
    script, tried = Timing(measured()).judge(), 0
    with suppress(StopIteration):
        for tried in range(9):
            script.send((seconds, LIMIT + over * (tried == 1), LIMIT) if tried else None)
    assert tried == passes


def judged(*trials: tuple[float, ...]) -> tuple[list[Plans], Plans | None]:
    """Return the plans that are tried, and those that are kept after some trials; None if others follow."""
    script = Judge(measured()).judge()
    found = [next(script)]
    try:
        for trial in trials:
            found.append(script.send(trial))
    except StopIteration as stop:
        return found, stop.value
    return found, None


def peaks(plans: Plans) -> list[int]:
    return [plan.peak_bytes or 0 for plan in plans]


@pytest.mark.parametrize("over", [0, 1])
def test_plans_that_fit_win_over_faster_ones(over):
    """Those that are tried for as much less memory need all of it, too, so whole replay follows."""
    most = peaks(plans_of(measured(), LIMITS))
    first, second = (1000.0, LIMIT + over, most[1]), (2000.0, *most)
    found, kept = judged(first, *[second] * (1 + over))
    assert kept is not None
    fitting = found[1] if over else found[0]
    assert [plan.saves for plan in kept] == [plan.saves for plan in fitting]


# Copies of a stage


def copied(rank: int, limit: int | None) -> RankCosts:
    return RankCosts(Plan(0, rank=rank), {}, Link(1e9 + rank, 1e9), limit)


def test_of_copies_of_a_stage_the_least_memory_counts_and_the_costs_of_the_first():
    first = [copied(0, 5), copied(1, None), copied(2, 7)]
    second = [copied(3, 4), copied(4, 9), copied(5, 8)]
    found = agreed([first, second])
    assert [each.limit for each in found] == [4, 9, 7]
    assert [each.plan.rank for each in found] == [0, 1, 2]
    assert [each.link.d2h - 1e9 for each in found] == [0, 1, 2]
    assert agreed([first, [*second[:2], None]]) is None
