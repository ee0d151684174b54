"""Which groups of a sequence are offloaded, and the plan for them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actoffload.schedule.costs import LayerCost, Link
from actoffload.schedule.plan import Do, Event, When
from actoffload.schedule.schedules import GroupSchedule
from actoffload.schedule.simulate import simulate

sequences = st.lists(st.sampled_from("abc"), min_size=1, max_size=14)
schedules = st.builds(
    GroupSchedule,
    st.one_of(st.none(), st.integers(0, 14)),
    st.integers(0, 16).map(lambda k: k / 16),
    st.one_of(st.none(), st.integers(1, 14)),
)


# Which groups are offloaded


@pytest.mark.parametrize(
    ("kinds", "options", "offloaded"),
    [
        ("aaaaa", {}, (0, 1, 2)),
        ("aaaaa", {"num_layers": 0}, ()),
        ("aaaaa", {"num_layers": 4}, (0, 1, 2, 3)),
        ("aaaaa", {"num_layers": 9}, (0, 1, 2, 3)),
        ("aa", {"num_layers": 1}, (0,)),
        ("a", {"num_layers": 1}, ()),
        # Of each kind the last one stays, wherever it is.
        ("ababab", {}, (0, 1, 2, 3)),
        ("ababab", {"num_layers": 1}, (0, 1)),
        ("aabbb", {"num_layers": 3}, (0, 2, 3)),
        ("abcabc", {}, (0, 1, 2)),
        ("abcde", {"num_layers": 3}, ()),
        # A fraction of the eligible groups of each kind; halves count up.
        ("a" * 10, {"fraction": 0.5}, (0, 1, 2, 3)),
        ("a" * 10, {"fraction": 0.05}, ()),
        ("a" * 10, {"fraction": 0.0625}, (0,)),
        ("a" * 10, {"fraction": 0.5, "num_layers": 5}, (0, 1, 2)),
        ("aaaaabb", {"fraction": 0.5}, (0, 1)),
    ],
)
def test_offloaded_groups(kinds: str, options: dict[str, Any], offloaded: tuple[int, ...]) -> None:
    assert GroupSchedule(**options).offloaded(kinds) == offloaded


@given(sequences, schedules)
def test_offloaded_groups_by_counting(kinds: list[str], schedule: GroupSchedule) -> None:
    """A group is offloaded if fewer than so many of its kind come before it, and some of its kind comes behind it."""
    offloaded = schedule.offloaded(kinds)
    assert list(offloaded) == sorted(set(offloaded))
    for k, kind in enumerate(kinds):
        earlier, later = kinds[:k].count(kind), kinds[k + 1 :].count(kind)
        if schedule.num_layers is None:
            many = kinds[:-2].count(kind) - (kind not in kinds[-2:])
        else:
            many = min(kinds.count(kind) - 1, schedule.num_layers)
        quota = int(Fraction(schedule.fraction) * many + Fraction(1, 2))
        assert (k in offloaded) == (earlier < quota and later > 0)


# When


def release_distance(schedule: GroupSchedule, kinds: Sequence[str]) -> int:
    """Return after how many more groups an offloaded one is released."""
    offloaded = schedule.offloaded(kinds)
    resident = len(kinds) - 1 - offloaded[-1] if offloaded else len(kinds)
    return resident if schedule.max_inflight is None else min(resident, schedule.max_inflight + 1)


@given(sequences, schedules)
def test_every_sequence_has_a_plan(kinds: list[str], schedule: GroupSchedule) -> None:
    plan, offloaded = schedule.plan(kinds), schedule.offloaded(kinds)  # making it checks that it can be carried out
    assert plan.model_layers == len(kinds)
    assert plan.offloaded == offloaded
    if not offloaded:
        assert not plan.steps
        return
    d = release_distance(schedule, kinds)
    back = min(d, 2) if len(set(kinds)) > 1 else d
    for i in offloaded:
        assert plan.find(Do.OFFLOAD, i) == Event(When.FORWARD_START, i)
        assert plan.find(Do.RELEASE, i) == Event(When.FORWARD_START, i + d)
        assert plan.find(Do.RELOAD, i) == Event(When.BACKWARD_END, i + back)
    assert sum(map(len, plan.steps.values())) == 3 * len(offloaded)
    # Each makes room for one other, which starts its own copies only then.
    for actions in plan.steps.values():
        does = [action.do for action in actions]
        assert does in ([Do.RELEASE, Do.OFFLOAD], *([do] for do in Do))


# What it comes to


@given(sequences, schedules, st.sampled_from([0.125, 1.0, 8.0]))
def test_memory_is_that_of_the_groups_that_stay_and_of_a_few_more(
    kinds: list[str], schedule: GroupSchedule, speed: float
) -> None:
    """At most `d` of the offloaded groups are resident at once."""
    size = 1024
    layers = [LayerCost.even(size, forward=1.0, backward=1.0, pieces=4)] * len(kinds)
    result = simulate(schedule.plan(kinds), layers, Link(size * speed, size * speed))
    offloaded = schedule.offloaded(kinds)
    staying = [k for k in range(len(kinds)) if k not in offloaded]
    d = release_distance(schedule, kinds)
    most = max(sum(k <= at for k in staying) + sum(at - d < k <= at for k in offloaded) for at in range(len(kinds)))
    assert result.peak_bytes <= most * size
    assert result.bytes_offloaded == result.bytes_reloaded == len(offloaded) * size
    assert result.reloaded_on_demand == 0
