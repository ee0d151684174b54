"""Traces keep the rules of the Trace Event Format, and those with which Perfetto goes beyond it."""

from __future__ import annotations

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


def read(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Read a trace as viewers do, and return its slices by the name of their thread.

    The rules are those of the description of the format, and of Perfetto's importer: the keys of the outer object it
    knows, the types that it takes, no thread 0, and slices of a thread that nest when times are cut to nanoseconds.
    """
    assert list(trace)[-1] == "traceEvents", "the events come last"
    assert set(trace) <= {"displayTimeUnit", "otherData", "traceEvents"}, "other keys end the reading"
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns"), "unit of times"
    slices: dict[int, list[dict[str, Any]]] = {}
    threads: dict[int, str] = {}
    order: dict[int, int] = {}
    counted = -math.inf
    for event in trace["traceEvents"]:
        assert not any(isinstance(value, list) for value in event.values()), "no lists in an event"
        assert type(event["pid"]) is int, "process"
        assert event["pid"] > 0, "process"
        assert type(event["tid"]) is int, "thread"
        assert event["tid"] > 0, "thread"
        assert type(event["name"]) is str, "name"
        assert event["name"].isprintable(), "name"
        args = event["args"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index"), "known metadata"
            if event["name"] == "thread_sort_index":
                order[event["tid"]] = args["sort_index"]
            elif event["name"] == "thread_name":
                threads[event["tid"]] = args["name"]
            continue
        assert type(event["ts"]) in (int, float), "time"
        assert 0 <= event["ts"] < math.inf, "time"
        assert type(event["cat"]) is str, "category"
        if event["ph"] == "C":
            assert {type(value) for value in args.values()} <= {int, float}, "counters count"
            assert event["ts"] >= counted, "counters in order"
            counted = event["ts"]
            continue
        assert event["ph"] == "X", "complete events"
        assert type(event["dur"]) in (int, float), "duration"
        assert 0 <= event["dur"] < math.inf, "duration"
        slices.setdefault(event["tid"], []).append(event)
    assert set(slices) <= set(threads), "every thread has a name"
    assert sorted(order, key=order.__getitem__) == sorted(threads), "threads in order"
    assert len(set(threads.values())) == len(threads), "names of threads differ"
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
        assert start >= begin, "slices in order"
        begin = start
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], "slices nest"
        open_until.append(end)


def seconds(events: list[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in events) * 1e-6


# What is in it


def test_the_lanes_are_threads_and_no_time_and_no_byte_is_lost():
    step = timeline()
    lanes = read(chrome_trace(step, NAMES))
    kinds = [(Kind.FORWARD, Kind.BACKWARD), (Kind.D2H,), (Kind.H2D,), (Kind.STALL,)]
    assert list(lanes) == ["compute", "offload (D2H)", "reload (H2D)", "stalls"]
    assert [seconds(lane) for lane in lanes.values()] == [pytest.approx(step.seconds(*kind)) for kind in kinds]
    assert sum(event["args"]["bytes"] for event in lanes["offload (D2H)"]) == step.nbytes(Kind.D2H)
    unnamed = read(chrome_trace(step, ("a",)))["stalls"]
    assert {event["name"] for event in unnamed} <= {"stall a", *(f"stall layer {k}" for k in range(1, 4))}


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
