"""A plan refuses what cannot be carried out, and says so in one sentence."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from itertools import product

import pytest

from actoffload.schedule.execution_order import Roles
from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.schedules import DefaultSchedule, GroupSchedule

FORWARD_START, FORWARD_END = When.FORWARD_START, When.FORWARD_END
BACKWARD_START, BACKWARD_END = When.BACKWARD_START, When.BACKWARD_END
GONE = [(FORWARD_START, 0, Do.OFFLOAD, 0), (FORWARD_END, 0, Do.RELEASE, 0)]


def plan(model_layers: int, *steps: tuple[When, int, Do, int]) -> Plan:
    joined: dict[Event, tuple[Action, ...]] = {}
    for when, at, do, layer in steps:
        event = Event(when, at)
        joined[event] = (*joined.get(event, ()), Action(do, layer))
    return Plan(model_layers, joined)


def test_events_of_a_pass_come_forward_then_backward() -> None:
    assert list(Plan(2).events()) == [
        Event(FORWARD_START, 0),
        Event(FORWARD_END, 0),
        Event(FORWARD_START, 1),
        Event(FORWARD_END, 1),
        Event(BACKWARD_START, 1),
        Event(BACKWARD_END, 1),
        Event(BACKWARD_START, 0),
        Event(BACKWARD_END, 0),
    ]


def test_actions_are_found_by_event_and_event_by_action() -> None:
    made = plan(3, (FORWARD_START, 0, Do.OFFLOAD, 0), (FORWARD_END, 1, Do.RELEASE, 0))
    assert made.at(FORWARD_END, 1) == (Action(Do.RELEASE, 0),)
    assert made.at(FORWARD_END, 0) == ()
    assert made.find(Do.RELEASE, 0) == Event(FORWARD_END, 1)
    assert made.find(Do.RELOAD, 0) is None
    assert made.offloaded == (0,)


@pytest.mark.parametrize(
    ("model_layers", "steps", "sentence"),
    [
        (0, [], "model_layers is 0; expected a whole number, at least 1."),
        (
            2,
            [(FORWARD_START, 2, Do.OFFLOAD, 0)],
            "The plan names the forward start of layer 2, but its layers are 0 to 1.",
        ),
        *(
            (2, [(FORWARD_START, 0, do, layer)], f"The plan would {text}, but its layers are 0 to 1.")
            for do, layer, text in (
                (Do.OFFLOAD, 2, "offload layer 2"),
                (Do.OFFLOAD, -1, "offload layer -1"),
                (Do.RELEASE, 2, "release layer 2"),
            )
        ),
        (
            2,
            [*GONE[:1], (FORWARD_END, 0, Do.OFFLOAD, 0)],
            "The plan would offload layer 0 twice in one pass; once is enough.",
        ),
        (
            2,
            [(FORWARD_END, 0, Do.OFFLOAD, 1)],
            "The plan would offload layer 1 before its forward starts; move it there or later.",
        ),
        *(
            (
                2,
                steps,
                "The plan would release layer 0 without, or before, the action 'offload layer 0'; add it earlier.",
            )
            for steps in (GONE[1:], [GONE[1], (FORWARD_END, 0, Do.OFFLOAD, 0)])
        ),
        (
            2,
            [*GONE[:1], (FORWARD_END, 0, Do.RELOAD, 0)],
            "The plan would reload layer 0 without, or before, the action 'release layer 0'; add it earlier.",
        ),
        (
            2,
            [*GONE[:1], (FORWARD_START, 0, Do.RELEASE, 0)],
            "The plan would release layer 0 before its forward ends; move it there or later.",
        ),
        *(
            (
                1,
                [*GONE[:number], (BACKWARD_END, 0, do, 0)],
                f"The plan would {do.value} layer 0 after its backward starts, when it is of no use; move it earlier.",
            )
            for number, do in enumerate((Do.OFFLOAD, Do.RELEASE, Do.RELOAD))
        ),
    ],
)
def test_bad_plans_are_refused_in_one_sentence(
    model_layers: int, steps: list[tuple[When, int, Do, int]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        plan(model_layers, *steps)


def test_a_layer_may_leave_and_come_back_at_one_event() -> None:
    at = (FORWARD_START, 1)
    made = plan(2, (*at, Do.OFFLOAD, 0), (*at, Do.RELEASE, 0), (*at, Do.RELOAD, 0))
    assert made.at(*at) == tuple(Action(do, 0) for do in (Do.OFFLOAD, Do.RELEASE, Do.RELOAD))
    assert made.find(Do.RELEASE, 0) == Event(*at)


@pytest.mark.parametrize("number", range(1, 4))
def test_the_rules_in_full(number: int) -> None:
    """Every way to offload, release and reload one layer: those of the rules are allowed."""
    events = list(Plan(number).events())
    for layer, offload, release, reload in product(range(number), *[range(len(events))] * 3):
        places = zip((offload, release, reload), (Do.OFFLOAD, Do.RELEASE, Do.RELOAD), strict=True)
        first, end, last = (events.index(Event(w, layer)) for w in (FORWARD_START, FORWARD_END, BACKWARD_START))
        allowed = first <= offload <= release <= reload <= last and end <= release
        calls = [(events[k].when, events[k].layer, do, layer) for k, do in places]
        if allowed:
            made = plan(number, *calls)
            assert all(made.find(do, layer) == Event(when, at) for when, at, do, layer in calls)
        else:
            with pytest.raises(ValueError, match=r"^(The plan would|In the plan) .+; .+\.$"):
                plan(number, *calls)


def test_a_plan_cannot_be_changed_from_outside() -> None:
    steps = {Event(FORWARD_START, 0): (Action(Do.OFFLOAD, 0),)}
    made = Plan(2, steps)
    steps.clear()
    assert made.offloaded == (0,)
    with pytest.raises(TypeError):
        made.steps[Event(FORWARD_END, 0)] = ()  # type: ignore[index]


@pytest.mark.parametrize("schedule", [lambda: DefaultSchedule(2, 5).plan(), lambda: GroupSchedule(2).plan("aaaaa")])
def test_equal_plans_have_equal_hashes_and_survive_copies(schedule: Callable[[], Plan]) -> None:
    made, again = (schedule() for _ in range(2))
    assert made == again
    assert hash(made) == hash(again)
    assert made != DefaultSchedule(1, 5).plan()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made
        assert hash(other) == hash(made)


def test_a_plan_reads_in_the_order_of_the_pass() -> None:
    steps = {
        Event(BACKWARD_END, 1): (Action(Do.RELOAD, 0),),
        Event(FORWARD_END, 1): (Action(Do.RELEASE, 0),),
        Event(FORWARD_START, 0): (Action(Do.OFFLOAD, 0),),
    }
    assert str(Plan(2, steps)) == (
        "forward start of layer 0: offload layer 0\n"
        "forward end of layer 1: release layer 0\n"
        "backward end of layer 1: reload layer 0"
    )
    assert str(Plan(3)) == "nothing is offloaded in 3 layers"


def test_layers_that_are_on_the_device_when_backward_begins():
    at_end, in_backward = Event(When.FORWARD_END, 4), Event(When.BACKWARD_START, 4)
    calls = [(Event(When.FORWARD_START, k), Action(Do.OFFLOAD, k)) for k in range(4)]
    calls += [(at_end, Action(Do.RELEASE, 0)), (in_backward, Action(Do.RELEASE, 1))]
    calls += [(at_end, Action(Do.RELEASE, 2)), (at_end, Action(Do.RELOAD, 2)), (in_backward, Action(Do.RELOAD, 0))]
    assert Roles.of(Plan.of(5, calls)).freed_later == {1, 2, 3}  # released later, reloaded before, never released
