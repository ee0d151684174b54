"""Single groups that run in another way than the others: near the best of all choices, where counting groups is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from actoffload.planner import Variant, choose, search
from actoffload.planner.placement import Profile, place
from actoffload.schedule import LayerCost, Link

MIB = 2**20
LINK = Link(d2h=5e10, h2d=5e10)
GROUPS = 5


def ways(other: int) -> tuple[Variant, ...]:
    """Return the ways to run a group beside `other` bytes in its backward; the gradients grow from group to group."""

    def cost(nbytes: int, more: float, temporary: int) -> LayerCost:
        even = LayerCost.even(nbytes, forward=0.009, backward=0.019 + more, pieces=4)
        levels = {"forward_temporary": temporary, "backward_temporary": temporary, "other_bytes": (0, 0, other, other)}
        return LayerCost(even.forward, even.backward, even.saved, **levels)

    return (
        Variant(cost(1568 * MIB, 0.0, 560 * MIB)),
        Variant(cost(736 * MIB, 0.001, 1392 * MIB), ("mm#0",)),
        Variant(cost(192 * MIB, 0.004, 1936 * MIB), ("mm#1",)),
        Variant(cost(64 * MIB, 0.008, 2064 * MIB), ()),
    )


def slow_host(other: int) -> tuple[Variant, ...]:
    """Return the ways to run a group whose recomputation keeps the host busy for longer than the device."""

    def cost(nbytes: int, more: float, temporary: int) -> LayerCost:
        even = LayerCost.even(nbytes * MIB, forward=0.009, backward=0.019 + more, pieces=4)
        return LayerCost(
            even.forward,
            even.backward,
            even.saved,
            forward_temporary=(temporary - 500 * (nbytes < 1000)) * MIB,
            backward_temporary=temporary * MIB,
            other_bytes=(3108 * MIB, 3108 * MIB, other, other - 200 * MIB),
            host_forward=0.008 if more else 0.0,
            host_backward=0.027 if more else 0.003,
        )

    table = ((737, 0.0011, 1456), (417, 0.0027, 1776), (193, 0.0039, 2000), (64, 0.0060, 2065))
    again = [Variant(cost(*row), (f"mm#{k}",)) for k, row in enumerate(table)]
    return Variant(cost(1569, 0.0, 560)), *again


def model() -> list[tuple[Variant, ...]]:
    return [ways(200 * MIB * (GROUPS - k)) for k in range(GROUPS)]


def best_of_all(of: list[tuple[Variant, ...]], limit: float) -> float:
    seconds = inf
    for variants in product(*(range(len(group)) for group in of)):
        profile = Profile.of([group[k].cost for group, k in zip(of, variants, strict=True)], LINK)
        for offloaded in product((False, True), repeat=GROUPS - 1):
            placement = place(profile, [k for k in profile.movable if offloaded[k]], limit)
            if placement.peak_bytes <= limit:
                seconds = min(seconds, placement.seconds)
    return seconds


@pytest.mark.parametrize("more", [0, 100, 600, 2000])
def test_near_the_best_of_all_choices(more):
    of = model()
    names = [f"h.{k}" for k in range(GROUPS)]
    limit = choose(names, of, LINK, limit=0).peak_bytes + more * MIB
    plan = choose(names, of, LINK, limit=limit)
    assert plan.peak_bytes <= limit
    assert plan.seconds <= 1.01 * best_of_all(of, limit)


def test_the_last_group_is_recomputed_beside_a_loss_that_takes_much_memory():
    """What it saves lies there while the loss runs, as what the others save does."""
    of = model()
    loss = [replace(way, cost=replace(way.cost, gap_backward_temporary=4000 * MIB)) for way in of[-1]]
    names, of = [f"h.{k}" for k in range(GROUPS)], [*of[:-1], tuple(loss)]
    least = choose(names, of, LINK, limit=0).peak_bytes
    plan = choose(names, of, LINK, limit=least + 400 * MIB)
    assert plan.saves[-1] is not None
    assert plan.seconds <= 1.01 * best_of_all(of, least + 400 * MIB)


def test_faster_than_counting_groups_where_the_host_is_slow(monkeypatch):
    """A group that is kept gives the host time for one that is recomputed: the best plan alternates."""
    of, names = [slow_host(3500 * MIB + 200 * MIB * (12 - k)) for k in range(12)], [f"h.{k}" for k in range(12)]
    least = choose(names, of, LINK, limit=0).peak_bytes
    limits = [least + more * MIB for more in (0, 200, 1000, 4000)]
    plans = [choose(names, of, LINK, limit=limit) for limit in limits]
    monkeypatch.setattr(search, "MOST_CHANGES", 0)
    counted = [choose(names, of, LINK, limit=limit) for limit in limits]
    assert all(plan.peak_bytes <= limit for plan, limit in zip(plans, limits, strict=True))
    assert all(plan.seconds <= other.seconds for plan, other in zip(plans, counted, strict=True))
    assert plans[1].seconds < 0.95 * counted[1].seconds
