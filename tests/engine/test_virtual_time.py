"""The engine on the reference device and `simulate` agree: every copy and stall, to the last bit.

All times are multiples of a power of two, so that sums and quotients are exact and `==` is meant.
"""

from dataclasses import replace

import pytest
import torch
from adversary.plans import plans
from helpers import make_manual, min_elements
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from virtual_time import agree, costs, execute, links, run, seconds

from actoffload.device import ReferenceDevice
from actoffload.report import Statistics
from actoffload.schedule import Action, Do, Event, LayerCost, Link, Plan, Timeline, When, simulate


@pytest.fixture(autouse=True)
def _offload_every_tensor():
    with min_elements(1):
        yield


def by_controller(plan: Plan, each, link) -> tuple[Timeline, Statistics, float]:
    """Make the calls of a plan on a controller, after a layer or in a hook before its backward."""
    device = ReferenceDevice(link.d2h, link.h2d)
    context, sync, controller = make_manual(len(each), device=device)
    names = {
        Do.OFFLOAD: controller.start_offload_layer,
        Do.RELEASE: controller.release_activation_forward_gpu_memory,
        Do.RELOAD: controller.start_reload_layer,
    }

    def call(when: When, k: int) -> None:
        for action in plan.at(when, k):
            names[action.do](action.layer)

    def after(k: int, x: torch.Tensor) -> None:
        call(When.FORWARD_END, k)
        x.register_hook(lambda grad: call(When.BACKWARD_START, k))

    return run(context, sync, device, each, after=after)


def test_calls_of_a_controller_do_what_their_plan_says():
    calls = []
    for layer, (offload, release, reload) in enumerate([(0, 2, 1), (1, 1, 3), (3, 4, 4), (4, 4, 4)]):
        calls += [
            (Event(When.FORWARD_END, offload), Action(Do.OFFLOAD, layer)),
            (Event(When.FORWARD_END, release), Action(Do.RELEASE, layer)),
            (Event(When.BACKWARD_START, reload), Action(Do.RELOAD, layer)),
        ]
    plan = Plan.of(5, calls)
    each, link = [LayerCost.even(4096, 1.0, 2.0, pieces=4)] * 5, Link(1024.0, 2048.0)
    want = simulate(plan, each, link)
    assert want.bytes_reloaded > 0
    agree(by_controller(plan, each, link), want)
    agree(execute(plan, each, link), want)


@st.composite
def any_costs(draw: st.DrawFn) -> LayerCost:
    """Draw a layer with a gap before it; a compiled one saves everything when its forward ends."""
    cost = replace(draw(costs()), gap_forward=draw(seconds))
    if draw(st.booleans()):
        return cost
    saved = tuple(replace(each, saved_at=1.0, needed_at=0.0) for each in cost.saved)
    return replace(cost, saved=saved, unpacks_at_once=True)


@settings(max_examples=100, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), links)
def test_any_plan(data, link):
    each = data.draw(st.lists(any_costs(), min_size=1, max_size=6))
    each[0] = replace(each[0], gap_forward=0.0)  # a recording begins with the first layer
    # Recorded spans have no gaps between backwards, so only that behind the last forward is compared.
    each[-1] = replace(each[-1], gap_backward=data.draw(seconds))
    plan = data.draw(plans(len(each)))
    # A copy out in backward may wait for host memory that a copy in still reads; `simulate` has host memory for all.
    assume(all(plan.find(Do.OFFLOAD, k).when in (When.FORWARD_START, When.FORWARD_END) for k in plan.offloaded))
    agree(execute(plan, each, link), simulate(plan, each, link))
