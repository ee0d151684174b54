"""Write a timeline as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is the JSON object form of Google's Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).

[Note: trace viewers]  Events of one thread must nest; Perfetto drops those that cross.  A lane whose spans overlap (two
passes in flight, nested groups) is therefore spread over several threads.  Times are whole nanoseconds, written as
microseconds with three decimals, so that rounding makes no neighbours overlap.  Perfetto reads the keys of the outer
object in order and stops at an unknown one, so ``traceEvents`` is last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..schedule.timeline import Kind, Span, Timeline
from .plots import resident_points, without_stalls

__all__ = ["chrome_trace", "write_chrome_trace"]

LANES = {
    "compute": (Kind.FORWARD, Kind.BACKWARD),
    Kind.D2H.value: (Kind.D2H,),
    Kind.H2D.value: (Kind.H2D,),
    "stalls": (Kind.STALL,),
}
TITLES = {kind: kind.name.lower() for kind in Kind} | {Kind.D2H: "offload", Kind.H2D: "reload"}
PROCESS = 1  # also its first thread; for Perfetto 0 is the idle process of a kernel


def chrome_trace(timeline: Timeline, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a timeline with the names of its layers in the Trace Event Format, ready for JSON; times are microseconds.

    Compute, offloads, reloads and stalls are threads of one process, resident bytes are a counter.  The ``args`` of an
    event have its layer, and the bytes and the bandwidth of a copy.
    """
    events = [_event("M", "process_name", PROCESS, {"name": f"training step, {timeline.source}"})]
    spans: list[dict[str, Any]] = []
    thread = 0
    cut = without_stalls(timeline)
    for title, kinds in LANES.items():
        for k, row in enumerate(_rows(span for span in cut if span.kind in kinds)):
            thread += 1
            events.append(_event("M", "thread_name", thread, {"name": f"{title} ({k + 1})" if k else title}))
            events.append(_event("M", "thread_sort_index", thread, {"sort_index": thread}))
            spans += [_complete(span, thread, names) for span in row]
    spans.sort(key=lambda event: event["ts"])  # stable: events that begin together are in order of their lanes
    for seconds, nbytes in resident_points(timeline):
        resident = {"cat": "memory", "ts": _nanoseconds(seconds) / 1000}
        events.append(_event("C", "resident", PROCESS, {"bytes": nbytes}, **resident))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source},
        "traceEvents": [*events, *spans],
    }


def write_chrome_trace(timeline: Timeline, path: str | os.PathLike[str], names: Sequence[str] = ()) -> Path:
    """Write a timeline to a trace file for Perfetto and chrome://tracing and return its path; see `chrome_trace`."""
    file = Path(path)
    # Names keep their letters: Perfetto does not read \u escapes everywhere.
    text = json.dumps(chrome_trace(timeline, names), ensure_ascii=False, allow_nan=False)
    file.write_text(text, encoding="utf-8")
    return file


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few rows as possible, at least one, so that those in a row do not overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        free = next((row for row in rows if _nanoseconds(row[-1].end) <= _nanoseconds(span.start)), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows or [[]]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _event(phase: str, name: str, thread: int, args: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": thread, "args": args, **more}


def _complete(span: Span, thread: int, names: Sequence[str]) -> dict[str, Any]:
    start, end = _nanoseconds(span.start), _nanoseconds(span.end)
    name = names[span.layer] if 0 <= span.layer < len(names) else f"layer {span.layer}"
    name = "".join(letter if letter.isprintable() else " " for letter in name)  # Perfetto stops at control characters
    args: dict[str, Any] = {"layer": name, "index": span.layer}
    if span.nbytes:
        args |= {"bytes": span.nbytes, "GB/s": round(span.nbytes / max(end - start, 1), 3)}
    kind, times = TITLES[span.kind], {"ts": start / 1000, "dur": (end - start) / 1000}
    return _event("X", f"{kind} {name}", thread, args, cat=kind, **times)
