"""The engine on the reference device and `simulate` agree: every copy and stall, to the last bit.

All times are multiples of a power of two, so that sums and quotients are exact and `==` is meant.
"""

import pytest
import torch
from adversary.plans import plans
from helpers import make_manual, min_elements
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from virtual_time import agree, costs, execute, links, run

from actoffload.context import OffloadContext
from actoffload.device import ReferenceDevice
from actoffload.engine.engine import Engine
from actoffload.report import Statistics
from actoffload.schedule import (
    DefaultSchedule,
    Do,
    LayerCost,
    Link,
    ManualSchedule,
    Timeline,
    When,
    simulate,
)


@pytest.fixture(autouse=True)
def _offload_every_tensor():
    with min_elements(1):
        yield


@st.composite
def manual_schedules(draw, count: int) -> ManualSchedule:
    """Any valid order of calls."""
    schedule = ManualSchedule(count)
    calls = []
    for layer in range(count):
        stage = draw(st.integers(0, 3))
        offload = draw(st.integers(layer, count - 1))
        release = draw(st.integers(offload, count - 1))
        reload = draw(st.integers(layer, count - 1))
        if stage >= 1:
            calls.append((offload, 0, "start_offload_layer", layer))
        if stage >= 2:
            calls.append((release, 1, "release_activation_forward_gpu_memory", layer))
        if stage >= 3:
            calls.append((2 * count - reload, 2, "start_reload_layer", layer))
    for when, _, name, layer in sorted(calls):
        if name == "start_reload_layer":
            schedule = schedule.start_reload_layer(layer, before_backward_of=2 * count - when)
        else:
            schedule = getattr(schedule, name)(layer, after_forward_of=when)
    return schedule


def by_controller(schedule: ManualSchedule, each, link) -> tuple[Timeline, Statistics, float]:
    """Make the calls of a schedule on a controller, after a layer or in a hook before its backward."""
    device = ReferenceDevice(link.d2h, link.h2d)
    context, sync, controller = make_manual(len(each), device=device)
    plan = schedule.plan()
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


@settings(max_examples=40)
@given(st.data(), links)
def test_any_layers_under_a_manual_schedule(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=6))
    schedule = data.draw(manual_schedules(len(each)))
    plan = schedule.plan()
    want = simulate(plan, each, link)
    agree(by_controller(schedule, each, link), want)
    agree(execute(plan, each, link), want)


def test_a_second_step_is_like_the_first():
    each = [LayerCost.even(4096, 1.0, 2.0, pieces=4)] * 5
    link = Link(1024.0, 1024.0)
    device = ReferenceDevice(link.d2h, link.h2d)
    plan = DefaultSchedule(3, 5).plan()
    context = OffloadContext(Engine(plan, device))
    want = simulate(plan, each, link)
    for step in range(1, 4):
        context.reset_statistics()
        timeline, statistics, end = run(context, context.synchronize, device, each)
        agree((timeline, statistics, end - (step - 1) * want.step_time), want)


# Groups, and any plan


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), links)
def test_any_plan(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=6))
    plan = data.draw(plans(len(each)))
    # A copy out in backward may wait for host memory that a copy in still reads; `simulate` has host memory for all.
    assume(all(plan.find(Do.OFFLOAD, k).when in (When.FORWARD_START, When.FORWARD_END) for k in plan.offloaded))
    agree(execute(plan, each, link), simulate(plan, each, link))
