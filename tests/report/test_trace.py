"""Traces keep the rules of the Trace Event Format, and those with which Perfetto goes beyond it."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actoffload.report.step_timeline import StepTimeline, chrome_trace
from actoffload.schedule import DefaultSchedule, Kind, LayerCost, Link, Span, Timeline, simulate

MIB = 2**20
NAMES = ("model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3")


def timeline(num_layers: int = 3, model_layers: int = 4) -> Timeline:
    layers = [LayerCost.even(256 * MIB, forward=0.010, backward=0.020, pieces=4)] * model_layers
    link = Link(d2h=256 * MIB / 0.013, h2d=256 * MIB / 0.013)
    return simulate(DefaultSchedule(num_layers, model_layers).plan(), layers, link).timeline


class BrokenRuleError(AssertionError):
    """A trace that a viewer would not show as it was meant."""


def check(condition: object, rule: str) -> None:
    if not condition:
        raise BrokenRuleError(rule)


def read(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Read a trace as viewers do, and return its slices by the name of their thread.

    The rules are those of the description of the format, and of Perfetto's importer: the keys of the outer object it
    knows, the types that it takes, no thread 0, and slices of a thread that nest when times are cut to nanoseconds.
    """
    check(list(trace)[-1] == "traceEvents", "the events come last")
    check(set(trace) <= {"displayTimeUnit", "otherData", "traceEvents"}, "other keys end the reading")
    check(trace.get("displayTimeUnit", "ms") in ("ms", "ns"), "unit of times")
    slices: dict[int, list[dict[str, Any]]] = {}
    threads: dict[int, str] = {}
    order: dict[int, int] = {}
    counted = -math.inf
    for event in trace["traceEvents"]:
        check(not any(isinstance(value, list) for value in event.values()), "no lists in an event")
        check(type(event["pid"]) is int and event["pid"] > 0, "process")
        check(type(event["tid"]) is int and event["tid"] > 0, "thread")
        check(type(event["name"]) is str and event["name"].isprintable(), "name")
        args = event["args"]
        if event["ph"] == "M":
            check(event["name"] in ("process_name", "thread_name", "thread_sort_index"), "known metadata")
            if event["name"] == "thread_sort_index":
                order[event["tid"]] = args["sort_index"]
            elif event["name"] == "thread_name":
                threads[event["tid"]] = args["name"]
            continue
        check(type(event["ts"]) in (int, float) and 0 <= event["ts"] < math.inf, "time")
        check(type(event["cat"]) is str, "category")
        if event["ph"] == "C":
            check(args and all(type(value) in (int, float) for value in args.values()), "counters count")
            check(event["ts"] >= counted, "counters in order")
            counted = event["ts"]
            continue
        check(event["ph"] == "X", "complete events")
        check(type(event["dur"]) in (int, float) and 0 <= event["dur"] < math.inf, "duration")
        slices.setdefault(event["tid"], []).append(event)
    check(set(slices) <= set(threads), "every thread has a name")
    check(sorted(order, key=order.__getitem__) == sorted(threads), "threads in order")
    check(len(set(threads.values())) == len(threads), "names of threads differ")
    for events in slices.values():
        _nest(events)
    return {threads[tid]: slices.get(tid, []) for tid in sorted(threads)}


def _nest(events: list[dict[str, Any]]) -> None:
    """Check that no two slices cross, in nanoseconds as Perfetto counts them: ts as written, dur cut off."""
    open_until: list[int] = []
    begin = -1
    for event in events:
        start = round(event["ts"] * 1000)
        end = start + math.floor(event["dur"] * 1000)
        check(start >= begin, "slices in order")
        begin = start
        while open_until and open_until[-1] <= start:
            open_until.pop()
        check(not open_until or end <= open_until[-1], "slices nest")
        open_until.append(end)


def seconds(events: list[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in events) * 1e-6


# What is in it


def test_the_lanes_are_threads_with_names_in_order():
    lanes = read(chrome_trace(timeline(), NAMES))
    assert list(lanes) == ["compute", "offload (D2H)", "reload (H2D)", "stalls"]
    assert all(lanes.values())


def test_no_time_and_no_byte_is_lost():
    step = timeline()
    lanes = read(chrome_trace(step, NAMES))
    assert seconds(lanes["compute"]) == pytest.approx(step.seconds(Kind.FORWARD, Kind.BACKWARD))
    assert seconds(lanes["offload (D2H)"]) == pytest.approx(step.seconds(Kind.D2H))
    assert seconds(lanes["reload (H2D)"]) == pytest.approx(step.seconds(Kind.H2D))
    assert seconds(lanes["stalls"]) == pytest.approx(step.seconds(Kind.STALL))
    assert sum(event["args"]["bytes"] for event in lanes["offload (D2H)"]) == step.nbytes(Kind.D2H)


def test_events_name_their_layer_and_their_bytes():
    span = Span(Kind.H2D, 2, 0.5, 0.75, nbytes=10**9)
    (event,) = read(chrome_trace(Timeline.build([span]), NAMES))["reload (H2D)"]
    assert (event["name"], event["cat"]) == ("reload model.layers.2", "reload")
    assert (event["ts"], event["dur"]) == (500_000.0, 250_000.0)
    assert event["args"] == {"layer": "model.layers.2", "index": 2, "bytes": 10**9, "GB/s": 4.0}


def test_times_are_whole_nanoseconds_and_events_in_order_of_time():
    spans = [Span(Kind.H2D, 0, 1 / 3, 2 / 3), Span(Kind.D2H, 1, 1 / 7, 1 / 3), Span(Kind.FORWARD, 2, 0.2, 0.3)]
    events = [event for event in chrome_trace(Timeline.build(spans))["traceEvents"] if event["ph"] == "X"]
    times = [(event["ts"], event["dur"]) for event in events]
    assert times == [(142857.143, 190476.19), (200000.0, 100000.0), (333333.333, 333333.334)]


def test_layers_without_a_name_have_their_number():
    spans = [Span(Kind.FORWARD, 7, 0.0, 1.0), Span(Kind.STALL, 0, 1.0, 2.0)]
    lanes = read(chrome_trace(Timeline.build(spans), ("a",)))
    assert [event["name"] for events in lanes.values() for event in events] == ["forward layer 7", "stall a"]


def test_resident_bytes_are_a_counter_from_the_start_to_the_end():
    spans = [Span(Kind.FORWARD, 0, 0.0, 0.004)]
    trace = chrome_trace(Timeline.build(spans, [(0.001, 5), (0.002, 9)]))
    counter = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [(event["ts"], event["args"]["bytes"]) for event in counter] == [(0, 0), (1000, 5), (2000, 9), (4000, 9)]
    assert not [event for event in chrome_trace(Timeline(()))["traceEvents"] if event["ph"] in "CX"]


def test_a_stall_inside_of_measured_compute_cuts_it():
    spans = [Span(Kind.BACKWARD, 0, 0.0, 0.010), Span(Kind.STALL, 0, 0.004, 0.006)]
    lanes = read(chrome_trace(Timeline.build(spans), NAMES))
    assert [(event["ts"], event["dur"]) for event in lanes["compute"]] == [(0, 4000), (6000, 4000)]
    assert [(event["ts"], event["dur"]) for event in lanes["stalls"]] == [(4000, 2000)]


def test_work_that_overlaps_goes_to_threads_of_its_own():
    spans = [
        Span(Kind.FORWARD, 0, 0.0, 0.010),
        Span(Kind.FORWARD, 1, 0.002, 0.004),  # inside
        Span(Kind.FORWARD, 2, 0.003, 0.012),  # across both
        Span(Kind.FORWARD, 3, 0.010, 0.011),
    ]
    lanes = read(chrome_trace(Timeline.build(spans), NAMES))
    where = {lane: [event["args"]["index"] for event in events] for lane, events in lanes.items() if events}
    assert where == {"compute": [0, 3], "compute (2)": [1], "compute (3)": [2]}


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Kind)), st.floats(0, 100), st.floats(0, 0.1), st.integers(0, 10**10)),
        max_size=20,
    )
)
def test_any_spans_make_a_trace_that_can_be_read(drawn):
    spans = [Span(kind, k, start, start + length, nbytes) for k, (kind, start, length, nbytes) in enumerate(drawn)]
    read(json.loads(json.dumps(chrome_trace(Timeline.build(spans), NAMES), allow_nan=False)))


@given(st.lists(st.floats(1e-9, 1e-3), min_size=1, max_size=50))
def test_neighbours_that_touch_stay_in_one_thread(lengths):
    spans, at = [], 0.0
    for k, length in enumerate(lengths):
        spans.append(Span(Kind.FORWARD, k, at, at + length))
        at += length
    lanes = read(chrome_trace(Timeline.build(spans)))
    assert [event["args"]["index"] for event in lanes["compute"]] == list(range(len(lengths)))


# The file


def test_the_file_holds_the_trace(tmp_path):
    file = StepTimeline(timeline(), NAMES).save_trace(tmp_path / "step.json")
    text = file.read_text(encoding="utf-8")
    assert file == tmp_path / "step.json"
    assert json.loads(text) == chrome_trace(timeline(), NAMES)
    assert list(json.loads(text)) == ["displayTimeUnit", "otherData", "traceEvents"]  # as they lie in the file


def test_names_survive_the_file_without_escapes(tmp_path):
    names = ['größe "x" \\ \n\x00\u2028|', "слой", "<script>", "d"]
    file = StepTimeline(timeline(), names).save_trace(str(tmp_path / "step.json"))
    text = file.read_text(encoding="utf-8")
    read(json.loads(text))
    shown = {event["args"]["layer"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"}
    assert shown == {'größe "x" \\    |', "слой", "<script>", "d"}
    assert "\\u" not in text
    assert "e-" not in text.replace("process_name", "")  # no exponents in numbers


def test_an_empty_step_makes_an_empty_trace(tmp_path):
    lanes = read(
        json.loads(StepTimeline(Timeline(()), ()).save_trace(tmp_path / "empty.json").read_text(encoding="utf-8"))
    )
    assert list(lanes.values()) == [[], [], [], []]


# The reader above, which has to find what is wrong


def _edit(trace: dict[str, Any], change: str) -> None:
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    if change == "crossing":
        slices[0]["dur"] = slices[1]["ts"] + slices[1]["dur"] / 2 - slices[0]["ts"]
    elif change == "one nanosecond":
        slices[0]["dur"] += 0.002
    elif change == "no name":
        trace["traceEvents"] = [event for event in events if event["name"] != "thread_name"]
    elif change == "thread 0":
        slices[0]["tid"] = 0
    elif change == "no duration":
        slices[0]["dur"] = math.nan
    elif change == "time as text":
        slices[0]["ts"] = "12.5"
    elif change == "text counted":
        next(event for event in events if event["ph"] == "C")["args"] = {"bytes": "5"}
    elif change == "other keys":
        trace["schema"] = 1
    elif change == "a list":
        slices[0]["stack"] = ["0x1"]
    elif change == "control character":
        slices[0]["name"] = "a\nb"


@pytest.mark.parametrize(
    "change",
    [
        "crossing",
        "one nanosecond",
        "no name",
        "thread 0",
        "no duration",
        "time as text",
        "text counted",
        "other keys",
        "a list",
        "control character",
    ],
)
def test_a_trace_that_breaks_a_rule_is_not_read(change):
    trace = copy.deepcopy(chrome_trace(timeline(2), NAMES))  # its first two layers follow each other at once
    read(trace)
    _edit(trace, change)
    with pytest.raises(BrokenRuleError):
        read(trace)
