"""A manual schedule is the plan that its calls spell."""

from __future__ import annotations

import re

import pytest

from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.schedules import ManualSchedule


def test_calls_become_actions_at_their_events_in_order() -> None:
    schedule = (
        ManualSchedule(model_layers=4)
        .start_offload_layer(0, after_forward_of=0)
        .release_activation_forward_gpu_memory(0, after_forward_of=1)
        .start_offload_layer(1, after_forward_of=1)
        .start_reload_layer(0, before_backward_of=2)
    )
    assert schedule.plan() == Plan(
        4,
        {
            Event(When.FORWARD_END, 0): (Action(Do.OFFLOAD, 0),),
            Event(When.FORWARD_END, 1): (Action(Do.RELEASE, 0), Action(Do.OFFLOAD, 1)),
            Event(When.BACKWARD_START, 2): (Action(Do.RELOAD, 0),),
        },
    )


def test_a_call_does_not_change_its_schedule() -> None:
    first = ManualSchedule(model_layers=2).start_offload_layer(0, after_forward_of=0)
    first.release_activation_forward_gpu_memory(0, after_forward_of=1)
    assert first.plan().find(Do.RELEASE, 0) is None


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (
            ManualSchedule(2).release_activation_forward_gpu_memory(0, after_forward_of=0),
            "The plan would release layer 0 without, or before, the action 'offload layer 0'; add it earlier.",
        ),
        (
            ManualSchedule(2).start_offload_layer(0, after_forward_of=0).start_offload_layer(0, after_forward_of=1),
            "The plan would offload layer 0 twice in one pass; once is enough.",
        ),
        (
            ManualSchedule(2).start_offload_layer(2, after_forward_of=0),
            "The plan would offload layer 2, but its layers are 0 to 1.",
        ),
        (
            ManualSchedule(2).start_offload_layer(0, after_forward_of=5),
            "The plan names the forward end of layer 5, but its layers are 0 to 1.",
        ),
    ],
)
def test_wrong_calls_are_named(schedule: ManualSchedule, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        schedule.plan()
