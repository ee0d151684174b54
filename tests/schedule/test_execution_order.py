"""The order in which the groups of a model run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from actoffload.schedule.execution_order import ExecutionOrder, GroupKey, GroupPlans
from actoffload.schedule.schedules import GroupSchedule

orders = st.lists(st.sampled_from("abcd"), max_size=8)


class Slow:
    """What is expected as a list that is cut down as groups come."""

    def __init__(self, expected: Sequence[str]) -> None:
        self.started: list[str] = []
        self.ahead = list(expected)

    def start(self, key: str) -> bool:
        self.started.append(key)
        if key not in self.ahead:
            return False
        skipped = 0
        while self.ahead.pop(0) != key:
            skipped += 1
        return skipped == 0


@given(orders, orders)
def test_against_a_list_that_is_cut_down(expected: list[str], comes: list[str]) -> None:
    order, slow = ExecutionOrder(expected), Slow(expected)
    for key in comes:
        assert order.start(key) == slow.start(key)
        assert order.started == slow.started
        assert order.sequence == (*slow.started, *slow.ahead)
        assert order.complete == (not slow.ahead)


def test_a_model_whose_order_always_changes_has_a_limited_number_of_plans():
    plans = GroupPlans(GroupSchedule(), "a" * 6)
    sequences = [tuple(GroupKey(k) for k in order) for order in itertools.permutations(range(6), 4)]
    made = [plans.roles(sequence) for sequence in sequences]
    kept = [plans.roles(sequence) is roles for sequence, roles in zip(sequences[::-1], made[::-1], strict=True)]
    assert kept[0]
    assert 0 < sum(kept) <= 64


def test_the_order_of_the_last_pass_is_expected():
    plans = GroupPlans(GroupSchedule(), "aaa")
    assert plans.order == (GroupKey(0), GroupKey(1), GroupKey(2))
    plans.learn([GroupKey(2), GroupKey(0)])
    assert plans.order == (GroupKey(2), GroupKey(0))
    plans.learn([])  # nothing ran
    assert plans.order == (GroupKey(2), GroupKey(0))
