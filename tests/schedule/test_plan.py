"""Plans: what they refuse, their text, their files, and what they are for another sequence of groups."""

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from adversary.plans import plans
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_calls import copied

from actoffload._text import written
from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.schedules import DefaultSchedule, GroupSchedule, remap

FORWARD_START, FORWARD_END = When.FORWARD_START, When.FORWARD_END
BACKWARD_START, BACKWARD_END = When.BACKWARD_START, When.BACKWARD_END
GONE = [(FORWARD_START, 0, Do.OFFLOAD, 0), (FORWARD_END, 0, Do.RELEASE, 0)]


def plan(model_layers: int, *steps: tuple[When, int, Do, int]) -> Plan:
    joined: dict[Event, tuple[Action, ...]] = {}
    for when, at, do, layer in steps:
        event = Event(when, at)
        joined[event] = (*joined.get(event, ()), Action(do, layer))
    return Plan(model_layers, joined)


OFFLOAD, RELEASE, RELOAD = Do
TOO_EARLY = "without, or before, the action '{} layer 0'; add it earlier"
BAD = [
    ([(FORWARD_START, 2, OFFLOAD, 0)], "names the forward start of layer 2, but its layers are 0 to 1"),
    ([(FORWARD_START, 0, OFFLOAD, 2)], "would offload layer 2, but its layers are 0 to 1"),
    ([(FORWARD_START, 0, OFFLOAD, -1)], "would offload layer -1, but its layers are 0 to 1"),
    ([(FORWARD_START, 0, RELEASE, 2)], "would release layer 2, but its layers are 0 to 1"),
    ([*GONE[:1], (FORWARD_END, 0, OFFLOAD, 0)], "would offload layer 0 twice in one pass; once is enough"),
    ([(FORWARD_END, 0, OFFLOAD, 1)], "would offload layer 1 before its forward starts; move it there or later"),
    (GONE[1:], f"would release layer 0 {TOO_EARLY.format('offload')}"),
    ([GONE[1], (FORWARD_END, 0, OFFLOAD, 0)], f"would release layer 0 {TOO_EARLY.format('offload')}"),
    ([*GONE[:1], (FORWARD_END, 0, RELOAD, 0)], f"would reload layer 0 {TOO_EARLY.format('release')}"),
    (
        [*GONE[:1], (FORWARD_START, 0, RELEASE, 0)],
        "would release layer 0 before its forward ends; move it there or later",
    ),
    *(
        (
            [*GONE[:k], (BACKWARD_END, 0, do, 0)],
            f"would {do.value} layer 0 after its backward starts, when it is of no use; move it earlier",
        )
        for k, do in enumerate(Do)
    ),
]


@pytest.mark.parametrize(("steps", "sentence"), BAD)
def test_bad_plans_are_refused_in_one_sentence(steps: list[tuple[When, int, Do, int]], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'The plan {sentence}.')}$"):
        plan(2, *steps)


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


# Plans of models


MIB = 2**20


def example() -> Plan:
    names = tuple(f"h.{k}.{part}" for k in range(3) for part in ("attention", "mlp"))
    calls = copied({k: (k + 1, k + 2) for k in range(3)})
    known = {"seconds": 0.2012, "baseline_seconds": 0.2, "peak_bytes": 10 * MIB, "because": "Why not."}
    return Plan.of(6, calls, names=names, nbytes=(MIB, 3 * MIB) * 3, **known)


def test_the_text_says_that_no_bytes_are_known():
    unknown = replace(example(), nbytes=(0,) * 6)
    assert str(unknown).endswith("Why not. No bytes are known: no pass so far saved a tensor that can be offloaded.")
    assert str(example()).endswith("Why not.")


def test_the_text_has_equal_groups_in_one_line():
    assert [" ".join(line.split()) for line in str(example()).splitlines() if "---" not in line] == [
        "group number kept offloaded",
        "h.0.attention, h.1.attention 2 - 2.0 MiB",
        "h.0.mlp 1 - 3.0 MiB",
        "h.1.mlp, h.2.mlp 2 6.0 MiB -",
        "h.2.attention 1 1.0 MiB -",
        "6 7.0 MiB 5.0 MiB",
        "",
        "Expected: peak 10.0 MiB; pass 201.20 ms, 200.00 ms without offloading. Why not.",
    ]
    unknown = replace(example(), seconds=None, peak_bytes=None, because="")
    assert "Expected" not in str(unknown)
    assert unknown.expected == ""
    assert example().expected == "peak 10.0 MiB; pass 201.20 ms, 200.00 ms without offloading"
    assert (example().offloaded_bytes, example().kept_bytes) == (5 * MIB, 7 * MIB)
    assert replace(example(), peak_bytes=1536, seconds=None).expected == "peak 1.5 KiB"


@settings(max_examples=25)
@given(st.data(), st.integers(1, 5))
def test_a_saved_plan_is_the_same(tmp_path_factory, data, groups):
    plan = data.draw(plans(groups))
    seconds = data.draw(st.one_of(st.none(), st.floats(0, 1e6)))
    names = tuple(data.draw(st.text(max_size=3)) for _ in range(groups))
    peak, holds = data.draw(st.one_of(st.none(), st.just(5))), data.draw(st.booleans())
    saved = replace(plan, names=names, nbytes=tuple(range(groups)), seconds=seconds, peak_bytes=peak, holds=holds)
    path = tmp_path_factory.getbasetemp() / "plan.json"
    saved.save(path)
    loaded = Plan.load(str(path))
    assert loaded == saved


def changed(**changes: object) -> str:
    """Return the text of a file with a plan of which some entries are others."""
    content = json.loads(written(Plan(2, names=("a", "b"), nbytes=(1, 2), seconds=1.0, peak_bytes=3)))
    content["Plan"] |= changes
    return json.dumps(content)


def does(when: str, layer: object, do: str, other: int) -> dict[str, object]:
    """Return the steps of a plan with one action, as in a file."""
    event = {"Event": {"when": {"When": when}, "layer": layer}}
    action = {"Action": {"do": {"Do": do}, "layer": other}}
    return {"dict": [[event, {"tuple": [action]}]]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        "[" * 100_000,
        '{"Plan": {}}',
        changed(more=2),
        changed(model_layers=None),
        changed(names=["a"]),
        changed(names=[1, 2]),
        changed(names=None),
        changed(nbytes=[1, -2]),
        changed(nbytes=[1, True]),
        changed(recomputed_nbytes=[1, "2"]),
        changed(saves=[None, [1]]),
        changed(holds=1),
        changed(seconds="1"),
        changed(seconds=float("nan")),
        changed(peak_bytes=1.5),
        changed(because=None),
        changed(steps=does("FORWARD_START", 0, "OFFLOAD", 5)),
        changed(steps=does("FORWARD_START", 0, "RELEASE", 0)),
        changed(steps=does("SOMETIME", 0, "OFFLOAD", 0)),
        changed(steps=does("FORWARD_START", "0", "OFFLOAD", 0)),
        changed(steps=[]),
    ],
)
def test_a_file_that_is_no_plan_is_a_value_error(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan.json is no plan that this version of actoffload can read .*; write it"):
        Plan.load(path)


def steps_of(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the actions by the names of the groups."""
    return [
        (f"{event.when.name} {plan.names[event.layer]}", action.do.name, plan.names[action.layer])
        for event in plan.events()
        for action in plan.at(event.when, event.layer)
    ]


def test_the_next_event_takes_the_place_of_that_of_a_group_that_is_skipped():
    plan = replace(example(), names=tuple("abcdef"), nbytes=(1, 2, 3, 4, 5, 6))
    skipped = remap(plan, list("acdef"))
    assert steps_of(skipped) == [
        ("FORWARD_START a", "OFFLOAD", "a"),
        ("FORWARD_START c", "RELEASE", "a"),  # instead of the end of b
        ("FORWARD_START c", "OFFLOAD", "c"),
        ("FORWARD_END d", "RELEASE", "c"),
        ("BACKWARD_START e", "RELOAD", "c"),
        ("BACKWARD_START c", "RELOAD", "a"),
    ]
    assert skipped.nbytes == (1, 3, 4, 5, 6)
    assert (skipped.seconds, skipped.baseline_seconds, skipped.peak_bytes) == (None, None, None)


def test_actions_move_behind_those_before_them():
    plan = Plan.of(4, copied({0: (1, 2)}), names=tuple("abcd"), nbytes=(1, 2, 3, 4))
    own = ("FORWARD_START a", "OFFLOAD", "a")
    assert steps_of(remap(plan, list("bacd"))) == [
        own,
        ("FORWARD_END a", "RELEASE", "a"),  # the forward of b is over
        ("BACKWARD_START c", "RELOAD", "a"),
    ]
    assert steps_of(remap(plan, list("cabd"))) == [
        own,
        ("FORWARD_END b", "RELEASE", "a"),
        ("BACKWARD_START a", "RELOAD", "a"),  # that of c comes too late
    ]


def test_unknown_groups_and_the_last_one_are_kept():
    plan = replace(example(), names=tuple("abcdef"), nbytes=(1, 2, 3, 4, 5, 6))
    assert remap(plan, list("abcdef")) is plan
    more = remap(plan, ["new", *"abcdef", "a"])
    assert more.offloaded == (1, 2, 3)
    assert more.nbytes == (0, 1, 2, 3, 4, 5, 6, 0)
    assert remap(plan, ["a"]).offloaded == ()
    assert remap(plan, ["b", "a"]).offloaded == ()


def test_unknown_groups_may_be_offloaded_and_then_so_is_the_one_that_was_last():
    plan = replace(DefaultSchedule(1, 2).plan(), names=tuple("ab"))
    more = remap(plan, list("axby"), offload_others=True)
    assert steps_of(more) == [
        ("FORWARD_START a", "OFFLOAD", "a"),
        ("FORWARD_START x", "OFFLOAD", "x"),
        ("FORWARD_END x", "RELEASE", "x"),
        ("FORWARD_START b", "RELEASE", "a"),
        ("FORWARD_START b", "OFFLOAD", "b"),
        ("FORWARD_END b", "RELEASE", "b"),
        ("BACKWARD_END y", "RELOAD", "b"),
        ("BACKWARD_END b", "RELOAD", "x"),
        ("BACKWARD_END b", "RELOAD", "a"),
    ]


@given(st.data(), st.lists(st.sampled_from("abcd"), min_size=1, max_size=6))
def test_every_sequence_has_a_valid_plan(data, names):
    plan = data.draw(plans(len(names)))
    others = data.draw(st.lists(st.sampled_from("abcdx"), min_size=1, max_size=8))
    earlier = replace(plan, names=tuple(names), nbytes=tuple(range(1, len(names) + 1)))
    moved = remap(earlier, others)  # an invalid plan is a ValueError
    if tuple(others) != tuple(names):
        assert set(moved.offloaded) <= set(remap(earlier, others, offload_others=True).offloaded)
    assert moved.names == tuple(others)
    if tuple(others) == tuple(names):
        return
    assert len(others) - 1 not in moved.offloaded
    assert set(moved.offloaded) <= {k for k, nbytes in enumerate(moved.nbytes) if nbytes}
    for k in moved.offloaded:
        was = moved.nbytes[k] - 1
        assert was in plan.offloaded
        for do in (Do.RELEASE, Do.RELOAD):
            assert (moved.find(do, k) is None) == (plan.find(do, was) is None)


def test_bytes_that_are_no_text_and_missing_files(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ValueError, match="is no plan"):
        Plan.load(tmp_path / "binary")
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "right.json").write_text(changed())
    assert Plan.load(tmp_path / "right.json").names == ("a", "b")
