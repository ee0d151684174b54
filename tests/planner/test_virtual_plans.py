"""Planner, `simulate` and the engine on the reference device agree to the last bit."""

from dataclasses import replace

import pytest
from helpers import min_elements
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import choose_plain, leanest, links
from virtual_time import agree, costs, execute, seconds

from actoffload.schedule import LayerCost, simulate


@pytest.fixture(autouse=True)
def _offload_every_tensor():
    with min_elements(1):
        yield


@st.composite
def any_costs(draw: st.DrawFn) -> LayerCost:
    """Draw a group with gaps around it; a compiled one saves everything when its forward ends."""
    cost = draw(costs())
    cost = replace(cost, forward=cost.forward + 0.25, backward=cost.backward + 0.25)
    cost = replace(cost, gap_forward=draw(seconds))
    if draw(st.booleans()):
        return cost
    saved = tuple(replace(each, saved_at=1.0, needed_at=0.0) for each in cost.saved)
    return replace(cost, saved=saved, unpacks_at_once=True)


@settings(max_examples=100)
@given(st.data(), links)
def test_plans_take_what_was_predicted(data, link):
    kinds = data.draw(st.lists(any_costs(), min_size=1, max_size=6))
    each = [kinds[k % len(kinds)] for k in range(data.draw(st.integers(1, 6)))]
    each[0] = replace(each[0], gap_forward=0.0)  # a recording begins with the first group
    # Recorded spans have no gaps between backwards, so only that behind the last forward is compared.
    each[-1] = replace(each[-1], gap_backward=data.draw(seconds))
    smallest = leanest(each, link)
    limit = data.draw(st.one_of(st.none(), st.integers(smallest, 2 * smallest)))
    plan = choose_plain(each, link, limit=limit)
    want = simulate(plan, each, link)
    got = execute(plan, each, link)
    agree(got, want)
    assert (plan.seconds, plan.peak_bytes) == (got[2], got[1].peak_resident_bytes)
