"""Show the timeline of a recorded step, with the names of its layers: times by layer, figure and trace file."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..schedule.timeline import Kind, Span, Timeline, milliseconds
from .plots import plot_step, plot_timeline, without_stalls
from .trace import write_chrome_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LayerTimes", "StepTimeline"]


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

    Examples
    --------
    >>> from actoffload.report.step_timeline import StepTimeline
    >>> layers = [LayerCost.even(2**28, forward=0.010, backward=0.020)] * 3
    >>> link = Link(d2h=2**28 / 0.012, h2d=2**28 / 0.012)
    >>> predicted = simulate(DefaultSchedule(num_layers=2, model_layers=3).plan(), layers, link)
    >>> step = StepTimeline(predicted.timeline, ["stem", "body", "head"])
    >>> [round(times.backward_stall, 5) for times in step.by_layer()]
    [0.0015, 0.0015, 0.0]
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
        return write_chrome_trace(self.timeline, path, self.names)

    def __repr__(self) -> str:
        return f"<StepTimeline of {len(self.names)} layers, {milliseconds(self.timeline.end)} {self.timeline.source}>"


def _direction(stall: Span, compute: Sequence[Span]) -> Kind:
    """Return whether compute stalled in forward or backward: by the span around the stall, else the next one."""
    around = [span for span in compute if span.start <= stall.start and stall.end <= span.end]
    behind = sorted((span for span in compute if span.start >= stall.end), key=lambda span: span.start)
    found = [*around, *behind, *compute[-1:]]
    return found[0].kind if found else Kind.BACKWARD
