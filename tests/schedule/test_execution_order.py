"""The order in which the groups of a model run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
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


def follow(expected: Sequence[str], comes: str) -> tuple[list[bool], str]:
    order = ExecutionOrder(expected)
    as_expected = [order.start(key) for key in comes]
    return as_expected, "".join(order.sequence)


@pytest.mark.parametrize(
    ("expected", "comes", "right", "sequence"),
    [
        ("abcd", "", [], "abcd"),
        ("abcd", "ab", [True, True], "abcd"),
        ("abcd", "abcd", [True] * 4, "abcd"),
        # Skipped: the first, some in between, the last (which may still come).
        ("abcd", "bc", [False, True], "bcd"),
        ("abcd", "ad", [True, False], "ad"),
        ("abcd", "abc", [True] * 3, "abcd"),
        # Repeated: once more than expected, as often as expected, less often.
        ("abcd", "aab", [True, False, True], "aabcd"),
        ("aab", "aab", [True] * 3, "aab"),
        ("aaab", "ab", [True, False], "ab"),
        ("abab", "aab", [True, False, True], "aab"),
        # Inserted: a stranger, one that was skipped before, one behind the end.
        ("abcd", "axb", [True, False, True], "axbcd"),
        ("abcd", "acbd", [True, False, False, True], "acbd"),
        ("ab", "abc", [True, True, False], "abc"),
        ("", "a", [False], "a"),
    ],
)
def test_what_is_expected_follows_what_comes(expected: str, comes: str, right: list[bool], sequence: str) -> None:
    assert follow(expected, comes) == (right, sequence)


@given(orders, orders)
def test_against_a_list_that_is_cut_down(expected: list[str], comes: list[str]) -> None:
    order, slow = ExecutionOrder(expected), Slow(expected)
    for key in comes:
        assert order.start(key) == slow.start(key)
        assert order.started == slow.started
        assert order.sequence == (*slow.started, *slow.ahead)
        assert order.complete == (not slow.ahead)


@given(orders, orders)
def test_what_has_come_is_never_rewritten(expected: list[str], comes: list[str]) -> None:
    """The sequence begins with what has come and ends with a part of what was expected, in its order."""
    order = ExecutionOrder(expected)
    ahead = len(expected)
    for k, key in enumerate(comes):
        before = order.sequence
        right = order.start(key)
        assert order.sequence[: k + 1] == tuple(comes[: k + 1])
        rest = order.sequence[k + 1 :]
        assert len(rest) <= ahead
        assert rest == tuple(expected[len(expected) - len(rest) :])
        assert right == (order.sequence == before)
        ahead = len(rest)


@given(orders, orders)
def test_the_next_pass_is_expected_as_this_one_was(expected: list[str], comes: list[str]) -> None:
    first = ExecutionOrder(expected)
    for key in comes:
        first.start(key)
    second = ExecutionOrder(tuple(first.started))
    assert all(second.start(key) for key in comes)
    assert second.complete
    assert second.sequence == tuple(comes)


@given(orders, orders)
def test_the_expected_order_is_not_changed(expected: list[str], comes: list[str]) -> None:
    given = list(expected)
    order = ExecutionOrder(given)
    for key in comes:
        order.start(key)
    assert given == expected


def test_a_model_whose_order_always_changes_has_a_limited_number_of_plans():
    plans = GroupPlans(GroupSchedule(), "a" * 6)
    sequences = [tuple(GroupKey(k) for k in order) for order in itertools.permutations(range(6), 4)]
    for sequence in sequences:
        roles = plans.roles(sequence)
        assert plans.roles(sequence) is roles
    assert len(sequences) == 360
    assert len(plans._known) <= 64


def test_the_order_of_the_last_pass_is_expected():
    plans = GroupPlans(GroupSchedule(), "aaa")
    assert plans.order == (GroupKey(0), GroupKey(1), GroupKey(2))
    plans.learn([GroupKey(2), GroupKey(0)])
    assert plans.order == (GroupKey(2), GroupKey(0))
    plans.learn([])  # nothing ran
    assert plans.order == (GroupKey(2), GroupKey(0))
