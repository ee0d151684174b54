"""The order in which the groups of a model run."""

from __future__ import annotations

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


def test_sequences_of_the_same_kinds_have_the_same_roles():
    plans = GroupPlans(GroupSchedule(), "aaaab")
    first, second, other = (tuple(map(GroupKey, order)) for order in ((0, 1, 2, 3), (3, 1, 0, 2), (0, 1, 2, 4)))
    assert plans.roles(first) is plans.roles(second)
    assert plans.roles(first).plan == GroupSchedule().plan("aaaa")
    assert plans.roles(other).plan == GroupSchedule().plan("aaab")


def test_the_order_of_the_last_pass_is_expected():
    plans = GroupPlans(GroupSchedule(), "aaa")
    assert plans.order == (GroupKey(0), GroupKey(1), GroupKey(2))
    plans.learn([GroupKey(2), GroupKey(0)])
    assert plans.order == (GroupKey(2), GroupKey(0))
    plans.learn([])  # nothing ran
    assert plans.order == (GroupKey(2), GroupKey(0))
