"""The engine on the reference device and `simulate` agree to the last bit, also with incremental steps."""

from __future__ import annotations

import pytest
from adversary.plans import plans
from helpers import min_elements
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from virtual_time import agree, costs, eighths, execute, links

from actoffload.schedule import DefaultSchedule, Do, GroupSchedule, LayerCost, Link, When, simulate


@pytest.fixture(autouse=True)
def _offload_every_tensor():
    with min_elements(1):
        yield


@pytest.mark.parametrize("inflight", [1, 2, 3])
def test_a_cap_alone_causes_no_stall(inflight):
    """A copy of a group takes 0.75 of the time of its compute, so that one on its way at a time is enough."""
    each = [LayerCost.even(4096, forward=1.0, backward=1.0, pieces=4)] * 8
    link = Link(4096 / 0.75, 4096 / 0.75)
    plan = GroupSchedule(4, max_inflight=inflight).plan(["layer"] * 8)
    want = simulate(plan, each, link)
    assert (want.forward_stall, want.backward_stall) == (0.0, 0.0)
    agree(execute(plan, each, link), want)


@settings(max_examples=80)
@given(st.data(), links)
def test_any_groups(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=7))
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=len(each), max_size=len(each)))
    most = st.one_of(st.none(), st.integers(0, len(each)))
    schedule = GroupSchedule(data.draw(most), data.draw(eighths), data.draw(st.sampled_from([None, 1, 2])))
    plan = schedule.plan(kinds)
    agree(execute(plan, each, link), simulate(plan, each, link))


@settings(max_examples=120, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), links)
def test_any_plan(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=6))
    plan = data.draw(plans(len(each)))
    # A copy out in backward may wait for host memory that a copy in still reads; `simulate` has host memory for all.
    assume(all(plan.find(Do.OFFLOAD, k).when in (When.FORWARD_START, When.FORWARD_END) for k in plan.offloaded))
    agree(execute(plan, each, link), simulate(plan, each, link))


def test_incremental_release_causes_no_stall_where_release_at_once_does():
    """Layer 1 has until 3.5 s and 4 s for its two tensors, when layer 3 saves its own, and not only until 3 s."""
    each = [LayerCost.even(4096, forward=1.0, backward=2.0, pieces=2)] * 4
    link = Link(2048.0 / 0.75, 1e9)
    assert simulate(DefaultSchedule(2, 4).plan(), each, link).forward_stall > 0
    assert simulate(GroupSchedule(2).plan(["layer"] * 4), each, link).forward_stall == 0
