"""Figures of steps, measurements and plans.

The same functions draw a simulated `Timeline` and a measured one.  They draw into the matplotlib Axes `ax`, or into a
new figure, and return the Axes.  Text, axes and background follow matplotlib's rcParams.  Matplotlib is imported on the
first call; without it that raises an ImportError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import TYPE_CHECKING, Any

from .._text import Table, byte_unit, milliseconds, size_or_dash
from ..schedule.plan import Plan
from ..schedule.timeline import Kind, Span, Timeline

__all__ = ["Frontier", "plot_timeline", "plot_trace"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe and Ito's palette, distinct with any colour vision; all light enough for dark labels.
COLOURS = {Kind.FORWARD: "#56b4e9", Kind.BACKWARD: "#e69f00", Kind.D2H: "#cc79a7", Kind.H2D: "#2fb28a"}
INK = "#101418"
# The same hues for lines, dark enough for a white page; distinct without colour by their dashes.
LINES = (("#2b8cc4", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#b8659a", ":"))

COMPUTE = Kind.FORWARD, Kind.BACKWARD, Kind.STALL
LANES = ("compute", COMPUTE), ("D2H", (Kind.D2H,)), ("H2D", (Kind.H2D,))
HEIGHT = 0.72  # of a box, where lanes are 1 apart
LABEL_SIZE = 8.0  # points
DIGIT = 3.8  # points: before the figure has its layout, axes seem a little narrower than they will be


def make_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return axes to draw into, new ones by default."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            need = "Plots need matplotlib, which is not installed"
            raise ImportError(f"{need}; install it with pip install 'actoffload[plots]'.") from error
        ax = pyplot.subplots(figsize=(width, height), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_timeline(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Draw compute and copies over time, one lane each.

    The copies of one layer share a box.  Stalls, in which compute waits for a copy, are hatched.

    Parameters
    ----------
    timeline : Timeline
        Simulated or measured; one of the reference device has no times.
    """
    ax = make_axes(ax, 7.5, 2.4)
    from matplotlib import rcParams
    from matplotlib.patches import Patch

    units = (1.0, "s"), (1e3, "ms")
    scale, unit = next((unit for unit in units if timeline.end * unit[0] >= 1.0), (1e6, "µs"))  # the largest that fits
    ax.set_xlim(0, timeline.end * scale or 1.0)
    ax.set_xlabel(f"time ({unit})")
    lanes = LANES if timeline.of(Kind.D2H, Kind.H2D) or not timeline.spans else LANES[:1]  # none that stays empty
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    ax.tick_params(axis="y", length=0)
    stall = {"facecolor": "none", "edgecolor": rcParams["axes.edgecolor"], "hatch": "//////", "linewidth": 0.5}
    styles = {**{kind: {"facecolor": colour} for kind, colour in COLOURS.items()}, Kind.STALL: stall}
    text: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": INK, "fontsize": LABEL_SIZE}
    figure, cut = ax.get_figure(root=True), without_stalls(timeline)
    assert figure is not None
    seconds_per_point = timeline.end / (ax.get_window_extent().width * 72 / figure.dpi)
    for lane, (_, kinds) in enumerate(lanes):
        place = lane - HEIGHT / 2, HEIGHT
        ax.axhspan(lane - HEIGHT / 2, lane + HEIGHT / 2, color="#808080", alpha=0.12, linewidth=0)
        # Neighbours that belong to one layer, the copies of its tensors, are one box.
        of_lane = (span for span in cut if span.kind in kinds)
        for (kind, layer), group in groupby(of_lane, lambda span: (span.kind, span.layer)):
            spans = list(group)
            start, end = spans[0].start, spans[-1].end
            whole = [(start * scale, (end - start) * scale)]
            if kind is Kind.STALL:
                ax.broken_barh(whole, place, **stall)
                continue
            ax.broken_barh(whole, place, facecolor=COLOURS[kind], edgecolor=(INK, 0.5), linewidth=0.8)
            if end - start > (DIGIT * len(str(layer)) + 2) * seconds_per_point:
                ax.text((start + end) / 2 * scale, lane, str(layer), clip_on=True, **text)
    patches = [Patch(label=kind.value, **styles[kind]) for kind in Kind if timeline.of(kind)]
    add_legend(ax, patches, columns=len(Kind))
    if timeline.source == "reference device":  # its clock says nothing about a GPU
        ax.set_xticks([])
        ax.set_xlabel("order of the step on the reference device")
    return ax


def plot_trace(traces: Mapping[str, Sequence[int]], ax: Axes | None = None) -> Axes:
    """Draw memory at the borders of layers; peaks in between are not drawn.

    Parameters
    ----------
    traces : mapping of str to sequence of int
        Bytes by name, as `actoffload.measure.trace_memory` returns them; all of the same length.
    """
    ax = make_axes(ax, 5.4, 3.2)
    highest, length = max(map(max, traces.values())), max(map(len, traces.values()))
    unit, unit_name = byte_unit(highest)
    for (name, trace), (colour, dashes) in zip(traces.items(), cycle(LINES), strict=False):
        ax.plot([nbytes / unit for nbytes in trace], color=colour, linestyle=dashes, linewidth=2.2, label=name)
    ax.axvline((length - 1) / 2, color="#808080", linewidth=0.8, linestyle=":")
    ax.set_xlim(0, length - 1)
    ax.set_ylim(0, 1.08 * highest / unit or 1.0)
    ax.set_xticks([(length - 1) / 4, 3 * (length - 1) / 4], ["forward, layer by layer", "backward, layer by layer"])
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("read where layers begin and end; peaks in between are not drawn")
    ax.set_ylabel(f"memory ({unit_name})")
    add_legend(ax, None, columns=min(len(traces), 2))
    return ax


def without_stalls(timeline: Timeline) -> list[Span]:
    """Return the spans with stalls cut out of compute, as a measured span runs from a layer's start to its end."""
    stalls = timeline.of(Kind.STALL)
    cut = []
    for span in timeline.spans:
        start = span.start
        if span.kind in (Kind.FORWARD, Kind.BACKWARD):
            for stall in stalls:
                if start <= stall.start and stall.end <= span.end:
                    cut.append(replace(span, start=start, end=stall.start))
                    start = stall.end
        cut.append(replace(span, start=start))
    return sorted((span for span in cut if span.seconds > 0 or span.nbytes), key=lambda span: span.start)


def add_legend(ax: Axes, handles: list[Any] | None, columns: int) -> None:
    """Add a legend above the axes; without `handles`, of all that has a label."""
    space: dict[str, Any] = {"borderaxespad": 0.2, "borderpad": 0.2, "handlelength": 1.6, "columnspacing": 1.4}
    space |= {"bbox_to_anchor": (0.0, 1.0), "ncols": columns, "fontsize": LABEL_SIZE + 0.5}
    ax.legend(handles=handles, loc="lower left", frameon=False, **space)


# Time against peak memory


@dataclass(frozen=True)
class Frontier:
    """The plans that are worth having: each is expected to be faster than all with a smaller peak.

    `plans` are in the order of their peaks, `present` is the plan that is used; ``print`` gives a table.
    """

    plans: tuple[Plan, ...]
    present: Plan

    def __str__(self) -> str:
        rows = []
        for name, plan in (*(("", plan) for plan in self.plans), ("present plan", self.present)):
            seconds, baseline = plan.seconds, plan.baseline_seconds
            time = "-" if seconds is None else milliseconds(seconds)
            ratio = "-" if seconds is None or not baseline else f"{seconds / baseline:.3f}"
            copied, again = size_or_dash(plan.offloaded_bytes), size_or_dash(sum(plan.recomputed_nbytes))
            rows.append((name, size_or_dash(plan.peak_bytes or 0), time, ratio, copied, again))
        header = "", "peak", "forward and backward", "x no offload", "offloaded", "recomputed"
        return str(Table(header, tuple(rows), left=1))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw time against peak, with the present plan marked; neither axis begins at 0.  Needs matplotlib."""
        ax = make_axes(ax, 5.6, 3.4)
        known = [(plan.peak_bytes, plan.seconds) for plan in self.plans if plan.peak_bytes is not None and plan.seconds]
        unit, unit_name = byte_unit(max((peak for peak, _ in known), default=0))
        peaks, times = [peak / unit for peak, _ in known], [seconds * 1e3 for _, seconds in known]
        ax.plot(peaks, times, color=LINES[0][0], marker="o", markersize=4, linewidth=1.2, label="plans")
        if self.present.peak_bytes is not None and self.present.seconds:
            style: dict[str, Any] = {"color": LINES[1][0], "marker": "D", "markersize": 7, "linestyle": "none"}
            ax.plot(self.present.peak_bytes / unit, self.present.seconds * 1e3, label="present plan", **style)
        ax.set_xlabel(f"peak of device memory ({unit_name})")
        ax.set_ylabel("forward and backward (ms)")
        ax.margins(y=0.1)
        ax.ticklabel_format(useOffset=False)
        add_legend(ax, None, 2)
        return ax
