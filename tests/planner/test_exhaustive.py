"""The greedy search is near the best of all choices of ways and offloaded groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from planning import model_ranks

from actoffload.planner import Variant, choose
from actoffload.planner.placement import place
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


def model() -> list[tuple[Variant, ...]]:
    return [ways(200 * MIB * (GROUPS - k)) for k in range(GROUPS)]


def best_of_all(of: list[tuple[Variant, ...]], limit: float) -> float:
    seconds = inf
    for variants in product(*(range(len(group)) for group in of)):
        ranks = model_ranks([group[k].cost for group, k in zip(of, variants, strict=True)], LINK)
        profile = ranks.choices[0].profile
        for offloaded in product((False, True), repeat=GROUPS - 1):
            placement = place(profile, [k for k in range(GROUPS - 1) if offloaded[k]], (), limit)
            if placement.peak_bytes <= limit:
                seconds = min(seconds, ranks.alone(0, placement, seconds))
    return seconds


@pytest.mark.parametrize("more", [0, 100, 600, 2000])
def test_near_the_best_of_all_choices(more):
    of = model()
    names = [f"h.{k}" for k in range(GROUPS)]
    limit = choose(names, of, LINK, limit=0).peak_bytes + more * MIB
    plan = choose(names, of, LINK, limit=limit)
    assert plan.peak_bytes <= limit
    assert plan.seconds <= 1.03 * best_of_all(of, limit)


def test_the_last_group_is_recomputed_beside_a_loss_that_takes_much_memory():
    """What it saves lies there while the loss runs, as what the others save does."""
    of = model()
    loss = [replace(way, cost=replace(way.cost, gap_backward_temporary=4000 * MIB)) for way in of[-1]]
    names, of = [f"h.{k}" for k in range(GROUPS)], [*of[:-1], tuple(loss)]
    least = choose(names, of, LINK, limit=0).peak_bytes
    plan = choose(names, of, LINK, limit=least + 400 * MIB)
    assert plan.saves[-1] is not None
    assert plan.seconds <= 1.03 * best_of_all(of, least + 400 * MIB)
