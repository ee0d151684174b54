"""Show the timeline of a recorded step, with the names of its layers: times by layer, figure and trace file.

[Note: trace files]  They have the JSON object form of the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).  Perfetto drops events of one thread
that cross, so a lane whose spans overlap (two passes in flight, nested groups) is spread over several threads.  Times
are whole nanoseconds, so that rounding makes no neighbours overlap.  Perfetto stops at an unknown key of the outer
object, so ``traceEvents`` is last.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schedule.timeline import Kind, Span, Timeline, milliseconds
from .plots import plot_step, plot_timeline, resident_points, without_stalls

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LayerTimes", "StepTimeline", "chrome_trace"]

LANES = {
    "compute": (Kind.FORWARD, Kind.BACKWARD),
    Kind.D2H.value: (Kind.D2H,),
    Kind.H2D.value: (Kind.H2D,),
    "stalls": (Kind.STALL,),
}
TITLES = {kind: kind.name.lower() for kind in Kind} | {Kind.D2H: "offload", Kind.H2D: "reload"}
PROCESS = 1  # also its first thread; for Perfetto 0 is the idle process of a kernel


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer in a step: compute without stalls, and stalls for copies of this layer.

    Compute stalls for copies to the host in forward, and for copies to the device in backward.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_stall: float = 0.0
    backward_stall: float = 0.0


class StepTimeline:
    """Compute, copies and stalls of a step over time.

    Parameters
    ----------
    timeline : Timeline
        The recorded step.
    names : sequence of str
        Names of the layers by their index in the timeline.
    """

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        self.timeline = timeline
        self.names = tuple(names)

    @property
    def seconds(self) -> dict[Kind, float]:
        """Seconds of each kind; compute without stalls.  Kinds overlap, so their sum may exceed the step."""
        spans = without_stalls(self.timeline)
        return {kind: sum(span.seconds for span in spans if span.kind is kind) for kind in Kind}

    @property
    def bandwidth(self) -> dict[Kind, float]:
        """Bytes per second while copies ran, for each direction with copies."""
        seconds = {kind: self.timeline.seconds(kind) for kind in (Kind.D2H, Kind.H2D)}
        return {kind: self.timeline.nbytes(kind) / busy for kind, busy in seconds.items() if busy}

    def by_layer(self) -> tuple[LayerTimes, ...]:
        """Return compute and stalls of each layer, by index."""
        compute = self.timeline.of(Kind.FORWARD, Kind.BACKWARD)
        known = [span.layer + 1 for span in (*compute, *self.timeline.of(Kind.STALL))]
        sums = [defaultdict[str, float](float) for _ in range(max([len(self.names), *known]))]
        for span in without_stalls(self.timeline):
            if span.kind is Kind.STALL:
                sums[span.layer][f"{_direction(span, compute).value}_stall"] += span.seconds
            elif span.kind in (Kind.FORWARD, Kind.BACKWARD):
                sums[span.layer][span.kind.value] += span.seconds
        return tuple(LayerTimes(**entry) for entry in sums)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw compute and copies over time, with the names of layers where they fit; see `plot_timeline`."""
        return plot_timeline(self.timeline, ax, self.names)

    def figure(self) -> Figure:
        """Draw compute and copies, and the resident bytes under them; see `plot_step`."""
        return plot_step(self.timeline, self.names)

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing, and return its path."""
        # Names keep their letters: Perfetto does not read \u escapes everywhere.
        text = json.dumps(chrome_trace(self.timeline, self.names), ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text, encoding="utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return f"<StepTimeline of {len(self.names)} layers, {milliseconds(self.timeline.end)} {self.timeline.source}>"


def _direction(stall: Span, compute: Sequence[Span]) -> Kind:
    """Return whether compute stalled in forward or backward: by the span around the stall, else the next one."""
    around = [span for span in compute if span.start <= stall.start and stall.end <= span.end]
    behind = sorted((span for span in compute if span.start >= stall.end), key=lambda span: span.start)
    found = [*around, *behind, *compute[-1:]]
    return found[0].kind if found else Kind.BACKWARD


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
        at = _nanoseconds(seconds) / 1000
        events.append(_event("C", "resident", PROCESS, {"bytes": nbytes}, cat="memory", ts=at))
    return {"displayTimeUnit": "ms", "otherData": {"source": timeline.source}, "traceEvents": [*events, *spans]}


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few rows as possible, at least one, so that those in a row do not overlap."""
    rows: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        free = (row for row in rows if not row or _nanoseconds(row[-1].end) <= _nanoseconds(span.start))
        if (row := next(free, None)) is None:
            rows.append(row := [])
        row.append(span)
    return rows


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
