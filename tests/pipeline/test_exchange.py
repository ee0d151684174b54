"""What the ranks of a pipeline plan with."""

from __future__ import annotations

from actoffload.pipeline.planning import Measured, agreed
from actoffload.schedule import Link


def measured(rank: int, limit: int | None, *, bare: bool = True) -> Measured:
    return Measured(rank, (), {}, {}, Link(1e9 + rank, 1e9), limit, bare=bare)


def test_of_copies_of_a_stage_the_least_memory_counts_and_the_costs_of_the_first():
    first = [measured(0, 5), measured(1, None), measured(2, 7)]
    second = [measured(3, 4, bare=False), measured(4, 9), measured(5, 8)]
    found = agreed([first, second])
    assert found is not None
    assert [each.limit for each in found] == [4, 9, 7]
    assert [each.rank for each in found] == [0, 1, 2]
    assert [each.link.d2h - 1e9 for each in found] == [0, 1, 2]
    assert [each.bare for each in found] == [False, True, True]
    assert agreed([first, [*second[:2], None]]) is None


def test_plans_are_made_for_the_slowest_link_of_all_ranks():
    links = [Link(1e9, 3e9, 1e-5, both=2e9), Link(2e9, 2e9, 2e-5), Link(3e9, 4e9, 0.0, both=4e9)]
    assert Link.slowest(links) == Link(1e9, 2e9, 2e-5, both=2e9)
