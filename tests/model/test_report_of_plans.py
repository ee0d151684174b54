"""Reports of models whose plan was given."""

from __future__ import annotations

import pytest
from timed_device import Timed, TimedModel, offload, step

from actoffload.planner import GroupPlan
from actoffload.schedule import Action, Do, Event, Plan, When

MIB = 2**20
BLOCK = 4 * MIB


def test_a_step_with_a_plan_that_was_given_is_recorded():
    """Also when groups alone are followed."""
    device = Timed(1e6, 1e6, memory=2**40)
    model = TimedModel(device)
    calls = [
        (Event(When.FORWARD_START, 0), Action(Do.OFFLOAD, 0)),
        (Event(When.FORWARD_END, 5), Action(Do.RELEASE, 0)),
        (Event(When.BACKWARD_START, 2), Action(Do.RELOAD, 0)),
    ]
    plan = GroupPlan(tuple(f"blocks.{k}" for k in range(8)), Plan.of(8, calls), (BLOCK,) * 8)
    handle = offload(model, device, layers=None, plan=plan)
    for _ in range(3):
        step(model)
    with handle.recording():
        step(model)
    assert handle.report().step_seconds == pytest.approx(24.0)
