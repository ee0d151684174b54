"""The schedules: which layers and groups of a sequence are offloaded and when, and the order in which groups run."""

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actoffload.schedule.costs import LayerCost, Link
from actoffload.schedule.plan import Do, Event, When
from actoffload.schedule.schedules import DefaultSchedule, ExecutionOrder, GroupSchedule
from actoffload.schedule.simulate import simulate

sequences = st.lists(st.sampled_from("abc"), min_size=1, max_size=14)
schedules = st.builds(
    GroupSchedule,
    st.one_of(st.none(), st.integers(0, 14)),
    st.integers(0, 16).map(lambda k: k / 16),
    st.one_of(st.none(), st.integers(1, 14)),
)


# Which groups are offloaded


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


# The default schedule


SIZES = [(n, m) for m in range(1, 8) for n in range(m)]


@pytest.mark.parametrize(("num_layers", "model_layers"), SIZES)
def test_the_default_schedule_is_that_of_groups_of_one_kind(num_layers: int, model_layers: int) -> None:
    schedule = DefaultSchedule(num_layers, model_layers)
    assert schedule.plan() == GroupSchedule(num_layers).plan("a" * model_layers)
    assert schedule.window == model_layers - num_layers
    assert schedule.overlaps is not (0 < num_layers == model_layers - 1)  # one resident layer alone prevents it


# The order in which groups run


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
