"""The greedy search is near the best of all choices of ways and offloaded groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from planning import MIB, convex, model_ranks

from actoffload.planner import Variant, choose
from actoffload.planner.placement import place
from actoffload.schedule import Link

LINK = Link(d2h=5e10, h2d=5e10)
GROUPS = 5


def model() -> list[tuple[Variant, ...]]:
    return [convex(200 * (GROUPS - k)) for k in range(GROUPS)]


def best_of_all(of: list[tuple[Variant, ...]], link: Link, limit: float) -> float:
    seconds = inf
    for variants in product(*(range(len(group)) for group in of)):
        ranks = model_ranks([group[k].cost for group, k in zip(of, variants, strict=True)], link)
        profile = ranks.choices[0].profile
        for offloaded in product((False, True), repeat=GROUPS - 1):
            placement = place(profile, [k for k in range(GROUPS - 1) if offloaded[k]], (), limit)
            if placement.peak_bytes <= limit:
                seconds = min(seconds, ranks.alone(0, placement, seconds))
    return seconds


@pytest.mark.parametrize(("rate", "more"), [(5e10, 0), (5e10, 100), (5e10, 2000), (2e10, 600), (1e11, 600)])
def test_near_the_best_of_all_choices(rate, more):
    of, link = model(), Link(rate, rate)
    names = [f"h.{k}" for k in range(GROUPS)]
    limit = choose(names, of, link, limit=0).peak_bytes + more * MIB
    plan = choose(names, of, link, limit=limit)
    assert plan.peak_bytes <= limit
    assert plan.seconds <= 1.03 * best_of_all(of, link, limit)


def test_the_last_group_is_recomputed_beside_a_loss_that_takes_much_memory():
    """What it saves lies there while the loss runs, as what the others save does."""
    of = model()
    loss = [replace(way, cost=replace(way.cost, gap_backward_temporary=4000 * MIB)) for way in of[-1]]
    names, of = [f"h.{k}" for k in range(GROUPS)], [*of[:-1], tuple(loss)]
    least = choose(names, of, LINK, limit=0).peak_bytes
    plan = choose(names, of, LINK, limit=least + 400 * MIB)
    assert plan.saves[-1] is not None
    assert plan.seconds <= 1.03 * best_of_all(of, LINK, least + 400 * MIB)
