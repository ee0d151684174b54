"""The default and the manual schedule, as events."""

from __future__ import annotations

import re

import pytest

from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.schedules import DefaultSchedule, ManualSchedule

SIZES = [(n, m) for m in range(1, 8) for n in range(m)]


def offload(layer: int) -> Action:
    return Action(Do.OFFLOAD, layer)


def release(layer: int) -> Action:
    return Action(Do.RELEASE, layer)


def reload(layer: int) -> Action:
    return Action(Do.RELOAD, layer)


@pytest.mark.parametrize(("num_layers", "model_layers"), SIZES)
def test_the_first_layers_are_offloaded_and_reloaded_by_the_rule(num_layers: int, model_layers: int) -> None:
    schedule = DefaultSchedule(num_layers, model_layers)
    plan, window = schedule.plan(), model_layers - num_layers
    assert schedule.window == window
    assert plan.offloaded == tuple(range(num_layers))
    for i in range(num_layers):
        assert plan.find(Do.OFFLOAD, i) == Event(When.FORWARD_START, i)
        assert plan.find(Do.RELEASE, i) == Event(When.FORWARD_START, i + window)
        assert plan.find(Do.RELOAD, i) == Event(When.BACKWARD_END, i + window)
    assert sum(len(actions) for actions in plan.steps.values()) == 3 * num_layers
    for actions in plan.steps.values():  # a release makes room for what comes
        assert [action.do for action in actions] in ([Do.RELEASE, Do.OFFLOAD], *([do] for do in Do))
    assert schedule.overlaps is not (0 < num_layers == model_layers - 1)  # one resident layer alone prevents it


# Calls by hand


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
            Event(When.FORWARD_END, 0): (offload(0),),
            Event(When.FORWARD_END, 1): (release(0), offload(1)),
            Event(When.BACKWARD_START, 2): (reload(0),),
        },
    )


def test_a_call_does_not_change_its_schedule() -> None:
    first = ManualSchedule(model_layers=2).start_offload_layer(0, after_forward_of=0)
    first.release_activation_forward_gpu_memory(0, after_forward_of=1)
    assert first.plan().find(Do.RELEASE, 0) is None


def test_a_wrong_call_is_named() -> None:
    """All sentences are those of `Plan`."""
    schedule = ManualSchedule(2).start_offload_layer(0, after_forward_of=0)
    sentence = "The plan would offload layer 0 twice in one pass; once is enough."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        schedule.start_offload_layer(0, after_forward_of=1).plan()
