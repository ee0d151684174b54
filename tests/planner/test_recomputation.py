"""Plans in which groups are recomputed: within the limit, near the best of all, and fast to find."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload.planner import GroupPlan, choose, choose_recomputed
from actoffload.schedule import LayerCost, Link, Saved, simulate

GIB = 2**30


def groups(count: int, part: float = 0.25, again: float = 0.5) -> tuple[list[LayerCost], list[LayerCost]]:
    """Return groups, and the same recomputed: they save a part, and run a part of their forward again."""
    whole = LayerCost.even(GIB, forward=0.010, backward=0.020)
    less = LayerCost.even(int(GIB * part), forward=0.010, backward=0.020 + 0.010 * again)
    return [whole] * count, [less] * count


def names(count: int) -> list[str]:
    return [f"h.{k}" for k in range(count)]


def exhaustive(layers, less, link, limit) -> float:
    """Return the time of the fastest plan of all: any groups recomputed."""
    best = float("inf")
    for number in range(len(layers)):
        for positions in combinations(range(len(layers) - 1), number):
            mixed = [less[k] if k in positions else layers[k] for k in range(len(layers))]
            plan = choose(names(len(layers)), mixed, link, limit=limit)
            if plan.peak_bytes <= limit:
                best = min(best, plan.seconds)
    return best


@pytest.mark.parametrize("rate", [2e10, 5e10, 1e11])
@pytest.mark.parametrize("again", [0.3, 1.0])
def test_near_the_best_of_all(rate, again):
    layers, less = groups(6, again=again)
    link = Link(d2h=rate, h2d=rate)
    smallest = choose_recomputed(names(6), layers, less, link, limit=0).peak_bytes
    for k in range(6):
        limit = smallest + (6 * GIB - smallest) * k // 5
        plan = choose_recomputed(names(6), layers, less, link, limit=limit)
        assert plan.peak_bytes <= limit
        assert plan.seconds <= 1.03 * exhaustive(layers, less, link, limit)


@given(
    sizes=st.lists(st.integers(1, 8), min_size=3, max_size=8),
    part=st.floats(0.0, 0.9),
    again=st.floats(0.0, 1.0),
    rate=st.floats(1.0, 100.0),
    more=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_never_above_the_limit_and_never_slower_than_without_recomputation(sizes, part, again, rate, more):
    layers = [LayerCost.even(size, forward=1.0, backward=2.0, pieces=2) for size in sizes]
    less = [LayerCost(1.0, 2.0 + again, (Saved(round(size * part)),) if round(size * part) else ()) for size in sizes]
    link = Link(d2h=rate, h2d=rate)
    smallest = choose_recomputed(names(len(sizes)), layers, less, link, limit=0)
    limit = smallest.peak_bytes + more
    plan = choose_recomputed(names(len(sizes)), layers, less, link, limit=limit)
    without = choose(names(len(sizes)), layers, link, limit=limit)
    assert plan.peak_bytes <= limit
    if without.peak_bytes <= limit:
        assert plan.seconds <= without.seconds * (1 + 1e-9)
    mixed = [less[k] if k in plan.recomputed else layers[k] for k in range(len(sizes))]
    result = simulate(plan.plan, mixed, link)
    assert (result.step_time, result.device_peak_bytes) == (plan.seconds, plan.peak_bytes)


def test_nothing_is_recomputed_without_need():
    layers, less = groups(8)
    link = Link(d2h=5e10, h2d=5e10)
    for limit in (None, 8 * GIB):
        plan = choose_recomputed(names(8), layers, less, link, limit=limit)
        assert plan == choose(names(8), layers, link, limit=limit)
        assert plan.recomputed == ()


def test_groups_that_may_not_be_recomputed():
    layers, less = groups(8)
    mixed = [None if k % 2 else cost for k, cost in enumerate(less)]
    plan = choose_recomputed(names(8), layers, mixed, Link(d2h=2e10, h2d=2e10), limit=3 * GIB)
    assert plan.recomputed
    assert not any(k % 2 for k in plan.recomputed)


def test_what_is_recomputed_is_printed_saved_and_moved(tmp_path):
    layers, less = groups(8)
    plan = choose_recomputed(names(8), layers, less, Link(d2h=2e10, h2d=2e10), limit=3 * GIB)
    assert "recomputed" in str(plan)
    assert f"{768 * len(plan.recomputed)}.0 MiB" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert GroupPlan.load(tmp_path / "plan.json") == plan
    moved = plan.remapped(names(9)[1:])
    assert moved.recomputed == tuple(k - 1 for k in plan.recomputed if k)


def test_planning_128_groups_takes_at_most_a_second():
    layers, less = groups(128)
    begun = time.process_time()
    plan = choose_recomputed(names(128), layers, less, Link(d2h=2e10, h2d=2e10), limit=40 * GIB)
    assert plan.peak_bytes <= 40 * GIB
    print(time.process_time() - begun)
