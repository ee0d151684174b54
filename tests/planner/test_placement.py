"""Releases and reloads of given groups: what `place` predicts is what `simulate` predicts for its plan."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import links, steps

from actoffload.planner.placement import Profile, place
from actoffload.schedule import LayerCost, Link, Saved, simulate


@settings(max_examples=200)
@given(st.data(), steps(), links, st.sampled_from([inf, 40000, 20000, 10000, 5000, 0]))
def test_time_and_peak_are_those_of_the_simulation(data, costs, link, limit):
    profile = Profile.of(costs, link)
    number = data.draw(st.integers(0, len(profile.movable)))
    placement = place(profile, profile.movable[:number], limit)
    result = simulate(placement.plan(), costs, link)
    offloaded = placement.plan().offloaded
    assert offloaded == tuple(profile.movable[: len(offloaded)])
    assert result.device_peak_bytes == placement.peak_bytes
    assert result.step_time == pytest.approx(placement.seconds)
    assert result.reloaded_on_demand == 0


@given(st.data(), steps(), links)
def test_no_placement_has_a_smaller_peak_than_the_leanest(data, costs, link):
    profile = Profile.of(costs, link, data.draw(st.one_of(st.none(), st.sets(st.integers(0, 8)))))
    number = data.draw(st.integers(0, len(profile.movable)))
    groups, least = profile.movable[:number], profile.leanest[number]
    limit = data.draw(st.integers(0, 2 * least))
    placement = place(profile, groups, limit)
    assert placement.peak_bytes >= least
    lean = place(profile, groups, least)
    assert lean.peak_bytes == least
    if limit >= least:
        assert placement.peak_bytes <= limit
        assert placement.seconds <= lean.seconds * (1 + 1e-9)


def test_groups_are_released_when_they_are_copied_and_reloaded_just_in_time():
    """A copy of a group takes a half of its forward and a quarter of its backward."""
    costs = [LayerCost.even(1000, 1.0, 2.0, pieces=4)] * 8
    placement = place(Profile.of(costs, Link(2000.0, 2000.0)), range(6))
    assert placement.released == {k: k + 1 for k in range(6)}
    assert placement.reloaded == {k: k + 1 for k in range(6)}
    # Within the smallest limit each waits for its copies.
    least = place(Profile.of(costs, Link(2000.0, 2000.0)), range(7), 1000)
    assert least.released == least.reloaded == {k: k for k in range(7)}
    assert least.seconds > placement.seconds


@pytest.mark.parametrize(("seconds", "later"), [(0.9, 0), (0.98, 1)])
def test_a_group_whose_copy_hardly_ends_in_time_is_released_at_the_next_event(seconds, later):
    """A forward takes a second, and copies are as fast as measured or a little slower."""
    costs = [LayerCost(1.0, 2.0, (Saved(1000, 0.0),))] * 8
    placement = place(Profile.of(costs, Link(1000 / seconds, 1000 / seconds)), range(4))
    assert placement.released == {k: k + later for k in range(4)}


def test_a_group_that_cannot_be_copied_in_time_is_kept():
    """Nor is it released in a later backward that needs more than the limit."""
    costs = [LayerCost(1.0, 2.0, backward_temporary=5000), *[LayerCost.even(1000, 1.0, 2.0, pieces=4)] * 2]
    placement = place(Profile.of(costs, Link(1.0, 1.0)), [1], 4000)
    assert placement.plan().offloaded == ()
    assert (placement.seconds, placement.peak_bytes) == (9.0, 5000)
