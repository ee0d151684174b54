"""Releases and reloads of given groups: what `place` predicts is what `simulate` predicts for its plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import links, model_ranks, steps

from actoffload.planner.placement import Placement, place
from actoffload.planner.search import Ranks
from actoffload.schedule import Do, Event, LayerCost, Link, Plan, Saved, When, simulate
from actoffload.schedule.simulate import model_plan


def placed(ranks: Ranks, groups: Collection[int], limit: float = inf) -> tuple[Placement, float]:
    """Return the placement of some groups, and the time of a step."""
    profile = ranks.choices[0].profile
    found = place(profile, [k for k, spot in enumerate(profile.spots.all) if spot.chunk.stage in groups], (), limit)
    return found, ranks.alone(0, found)


def plan_of(costs: Sequence[LayerCost], link: Link, groups: Collection[int], limit: float = inf) -> Plan:
    """Return the plan for some groups."""
    return model_plan(len(costs), placed(model_ranks(costs, link), groups, limit)[0].actions())


@given(st.data(), steps(), links)
def test_no_placement_has_a_smaller_peak_than_the_leanest(data, costs, link):
    ranks = model_ranks(costs, link, data.draw(st.one_of(st.none(), st.sets(st.integers(0, 8)))))
    choices = ranks.choices[0]
    parts = choices.parts[: data.draw(st.integers(0, len(choices.parts)))]
    groups = {choices.profile.spots.all[k].chunk.stage for part in parts for k in part}
    least = choices.leanest(parts)
    limit = data.draw(st.integers(0, 2 * least))
    found, seconds = placed(ranks, groups, limit)
    assert found.peak_bytes >= least
    lean, lean_seconds = placed(ranks, groups, least)
    assert lean.peak_bytes == least
    if limit >= least:
        assert found.peak_bytes <= limit
        assert seconds <= lean_seconds * (1 + 1e-9)


def test_groups_are_released_when_they_are_copied_and_reloaded_just_in_time():
    """A copy of a group takes a half of its forward and a quarter of its backward."""
    costs, link = [LayerCost.even(1000, 1.0, 2.0, pieces=4)] * 8, Link(2000.0, 2000.0)
    plan = plan_of(costs, link, range(6))
    assert [plan.find(Do.RELEASE, k) for k in range(6)] == [Event(When.FORWARD_END, k + 1) for k in range(6)]
    assert [plan.find(Do.RELOAD, k) for k in range(6)] == [Event(When.BACKWARD_START, k + 1) for k in range(6)]
    # Within the smallest limit each waits for its copies.
    least = plan_of(costs, link, range(7), 1000)
    assert [least.find(Do.RELEASE, k) for k in range(7)] == [Event(When.FORWARD_START, k + 1) for k in range(7)]
    assert [least.find(Do.RELOAD, k) for k in range(7)] == [Event(When.BACKWARD_END, k + 1) for k in range(7)]
    assert simulate(least, costs, link).step_time > simulate(plan, costs, link).step_time


@pytest.mark.parametrize(("seconds", "later"), [(0.9, 0), (0.98, 1)])
def test_a_group_whose_copy_hardly_ends_in_time_is_released_at_the_next_event(seconds, later):
    """A forward takes a second, and copies are as fast as measured or a little slower."""
    costs = [LayerCost(1.0, 2.0, (Saved(1000, 0.0),))] * 8
    plan = plan_of(costs, Link(1000 / seconds, 1000 / seconds), range(4))
    ends = [plan.find(Do.RELEASE, k) for k in range(4)]
    assert ends == [Event(When.FORWARD_END, k + later) for k in range(4)]


def test_a_group_that_cannot_be_copied_in_time_is_kept():
    """Nor is it released in a later backward that needs more than the limit."""
    costs = [LayerCost(1.0, 2.0, backward_temporary=5000), *[LayerCost.even(1000, 1.0, 2.0, pieces=4)] * 2]
    found, seconds = placed(model_ranks(costs, Link(1.0, 1.0)), [1], 4000)
    assert found.placed == {}
    assert (seconds, found.peak_bytes) == (9.0, 5000)
