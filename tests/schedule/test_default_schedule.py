"""The default schedule, as events."""

from __future__ import annotations

import re

import pytest

from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.schedules import DefaultSchedule

SIZES = [(n, m) for m in range(1, 8) for n in range(m)]


def offload(layer: int) -> Action:
    return Action(Do.OFFLOAD, layer)


def release(layer: int) -> Action:
    return Action(Do.RELEASE, layer)


def reload(layer: int) -> Action:
    return Action(Do.RELOAD, layer)


def test_two_of_five_written_out() -> None:
    assert DefaultSchedule(num_layers=2, model_layers=5).plan() == Plan(
        5,
        {
            Event(When.FORWARD_START, 0): (offload(0),),
            Event(When.FORWARD_START, 1): (offload(1),),
            Event(When.FORWARD_START, 3): (release(0),),
            Event(When.FORWARD_START, 4): (release(1),),
            Event(When.BACKWARD_END, 4): (reload(1),),
            Event(When.BACKWARD_END, 3): (reload(0),),
        },
    )


def test_three_of_five_written_out_release_makes_room_first() -> None:
    assert DefaultSchedule(num_layers=3, model_layers=5).plan() == Plan(
        5,
        {
            Event(When.FORWARD_START, 0): (offload(0),),
            Event(When.FORWARD_START, 1): (offload(1),),
            Event(When.FORWARD_START, 2): (release(0), offload(2)),
            Event(When.FORWARD_START, 3): (release(1),),
            Event(When.FORWARD_START, 4): (release(2),),
            Event(When.BACKWARD_END, 4): (reload(2),),
            Event(When.BACKWARD_END, 3): (reload(1),),
            Event(When.BACKWARD_END, 2): (reload(0),),
        },
    )


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


@pytest.mark.parametrize(("num_layers", "model_layers"), SIZES)
def test_only_one_resident_layer_prevents_overlap(num_layers: int, model_layers: int) -> None:
    alone = 0 < num_layers == model_layers - 1
    assert DefaultSchedule(num_layers, model_layers).overlaps is not alone


@pytest.mark.parametrize(
    ("num_layers", "model_layers", "sentence"),
    [
        (0, 0, "model_layers is 0; expected the number of layers, at least 1."),
        (-1, 5, "num_layers is -1; expected 0 or more."),
        (
            5,
            5,
            "num_layers is 5 but model_layers is 5: the last layer's activations are needed at once, "
            "so offload at most model_layers - 1 layers.",
        ),
        (
            7,
            5,
            "num_layers is 7 but model_layers is 5: the last layer's activations are needed at once, "
            "so offload at most model_layers - 1 layers.",
        ),
    ],
)
def test_impossible_numbers_are_refused(num_layers: int, model_layers: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        DefaultSchedule(num_layers, model_layers)
