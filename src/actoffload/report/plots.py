"""Pictures of a step: what ran when, and how many bytes were resident.

A predicted `Timeline` and a measured one are drawn by the same code.  Text, axes and background follow
matplotlib's rcParams, so the pictures fit a light page and a dark one.  Matplotlib is imported when a picture
is asked for, and is needed for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from ..schedule.timeline import Kind, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_memory", "plot_step", "plot_timeline"]

Curve: TypeAlias = Timeline | Sequence[tuple[float, int]]
"""Resident bytes over time: a timeline, or (seconds, bytes) as they were measured."""

# Okabe and Ito's palette, told apart with any colour vision; all light enough for dark figures on them.
COLOURS = {
    Kind.FORWARD: "#56b4e9",
    Kind.BACKWARD: "#e69f00",
    Kind.D2H: "#cc79a7",
    Kind.H2D: "#2fb28a",
}
INK = "#101418"
# The same hues for lines, dark enough for a white page; told apart without colour by their dashes.
LINES = (("#2b8cc4", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#b8659a", ":"))

LANES: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("compute", (Kind.FORWARD, Kind.BACKWARD, Kind.STALL)),
    ("D2H", (Kind.D2H,)),
    ("H2D", (Kind.H2D,)),
)
HEIGHT = 0.72  # of a box, where lanes are 1 apart
LABEL_SIZE = 8.0  # points


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib, which is not installed; add it with pip install 'actoffload[plots]'."
        ) from error
    return pyplot


def plot_timeline(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Draw compute and copies over time, one lane each.

    Boxes carry the number of their layer where it fits.  The copies of one layer share a box; it is paler
    where the link is idle between two of them.  Hatched stretches are stalls: compute waits for a copy.

    Parameters
    ----------
    timeline : Timeline
        Simulated or measured.
    ax : matplotlib Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib Axes
        With time on the x axis in the unit that its label names.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    if ax is None:
        ax = _pyplot().subplots(figsize=(7.5, 2.4), layout="constrained")[1]
    scale, unit = _time_unit(timeline.end)
    ax.set_xlim(0, timeline.end * scale or 1.0)
    ax.set_ylim(len(LANES) - 0.5, -0.5)
    ax.set_yticks(range(len(LANES)), [name for name, _ in LANES])
    ax.set_xlabel(f"time ({unit})")
    _bare(ax)
    ax.tick_params(axis="y", length=0)
    labels = []
    for lane, (_, kinds) in enumerate(LANES):
        ax.axhspan(lane - HEIGHT / 2, lane + HEIGHT / 2, color="#808080", alpha=0.12, linewidth=0)
        for boxes in _boxes(_apart(timeline.of(*kinds))):
            labels += _draw_boxes(ax, boxes, lane, scale)
    _legend(ax, _kind_handles(timeline), columns=len(Kind))
    _drop_labels_that_do_not_fit(ax, labels)
    return ax


def plot_memory(curves: Curve | Sequence[Timeline] | Mapping[str, Curve], ax: Axes | None = None) -> Axes:
    """Draw resident bytes over time as staircases, with their peaks.

    Parameters
    ----------
    curves : Timeline, sequence of (float, int), sequence of Timeline, or mapping
        One curve, several timelines that are named by their source, or curves by name.  Pairs are seconds and
        the bytes held from then on.
    ax : matplotlib Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib Axes
        With time on the x axis and memory on the y axis, in the units that their labels name.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If there is nothing to draw.
    """
    named = {name: _points(curve) for name, curve in _named(curves).items()}
    if not any(named.values()):
        raise ValueError("There is no memory to draw; give at least one curve with at least one point.")
    if ax is None:
        ax = _pyplot().subplots(figsize=(7.5, 2.6), layout="constrained")[1]
    end = max(points[-1][0] for points in named.values() if points)
    peaks = {name: max((nbytes for _, nbytes in points), default=0) for name, points in named.items()}
    scale, unit = _time_unit(end)
    divisor, byte_unit = _byte_unit(max(peaks.values()))
    handles = []
    for k, (name, points) in enumerate(named.items()):
        colour, dashes = LINES[k % len(LINES)]
        x = [seconds * scale for seconds, _ in points]
        y = [nbytes / divisor for _, nbytes in points]
        (line,) = ax.step(x, y, where="post", color=colour, linestyle=dashes, linewidth=1.8)
        text = f"peak {_bytes(peaks[name])}"
        line.set_label(f"{name}, {text}" if name else text)
        if len(named) == 1:
            ax.fill_between(x, y, step="post", color=colour, alpha=0.22, linewidth=0)
        if y:
            top = max(y)
            ax.plot(x[y.index(top)], top, "o", color=colour, markersize=5, zorder=4)
            ax.axhline(top, color=colour, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        handles.append(line)
    ax.set_xlim(0, end * scale or 1.0)
    ax.set_ylim(0, max(peaks.values()) / divisor * 1.08 or 1.0)
    ax.set_xlabel(f"time ({unit})")
    ax.set_ylabel(f"memory ({byte_unit})")
    _bare(ax)
    _legend(ax, handles, columns=2 if len(named) > 1 else 1)
    return ax


def plot_step(timeline: Timeline) -> Figure:
    """Draw lanes and resident bytes of one step under each other, over the same time axis.

    Parameters
    ----------
    timeline : Timeline
        Simulated or measured, with its resident bytes.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    figure, (lanes, memory) = _pyplot().subplots(
        2, sharex=True, figsize=(7.5, 4.0), height_ratios=(3, 2.4), layout="constrained"
    )
    plot_memory(timeline, memory)
    plot_timeline(timeline, lanes)
    lanes.set_xlabel("")
    figure.align_ylabels()
    return figure  # type: ignore[no-any-return]


def _named(curves: Curve | Sequence[Timeline] | Mapping[str, Curve]) -> dict[str, Curve]:
    if isinstance(curves, Mapping):
        return dict(curves)
    if isinstance(curves, Timeline):
        return {"": curves}
    timelines = [curve for curve in curves if isinstance(curve, Timeline)]
    if timelines:
        return {timeline.source: timeline for timeline in timelines}
    return {"": [(float(point[0]), int(point[1])) for point in curves if not isinstance(point, Timeline)]}


def _points(curve: Curve) -> list[tuple[float, int]]:
    """Return the corners of a staircase; that of a timeline reaches from the start of the step to its end."""
    if not isinstance(curve, Timeline):
        return list(curve)
    points = list(curve.resident)
    if points and points[0][0] > 0:
        points.insert(0, (0.0, 0))
    if points and points[-1][0] < curve.end:
        points.append((curve.end, points[-1][1]))
    return points


def _apart(spans: Sequence[Span]) -> list[Span]:
    """Cut the stalls out of the work around them: a measured span runs from a layer's start to its end."""
    stalls = [span for span in spans if span.kind is Kind.STALL]
    cut = list(stalls)
    for span in spans:
        if span.kind is Kind.STALL:
            continue
        start = span.start
        for stall in stalls:
            if start <= stall.start and stall.end <= span.end:
                cut.append(replace(span, start=start, end=stall.start))
                start = stall.end
        cut.append(replace(span, start=start))
    return sorted((span for span in cut if span.seconds > 0), key=lambda span: span.start)


def _boxes(spans: Iterable[Span]) -> Iterable[list[Span]]:
    """Join neighbours in a lane that belong to one layer: the copies of its tensors are one box."""
    for _, group in groupby(spans, key=lambda span: (span.kind, span.layer)):
        yield list(group)


def _draw_boxes(ax: Axes, spans: list[Span], lane: int, scale: float) -> list[tuple[Any, float]]:
    """Draw one box; return its label and the width that the label may have, in units of the x axis."""
    start, end = spans[0].start * scale, spans[-1].end * scale
    bottom = lane - HEIGHT / 2
    if spans[0].kind is Kind.STALL:
        ax.broken_barh([(start, end - start)], (bottom, HEIGHT), **_stall_style())
        return []
    colour = COLOURS[spans[0].kind]
    edge = _mixed(colour, INK, 0.45)
    if len(spans) > 1:
        ax.broken_barh([(start, end - start)], (bottom, HEIGHT), facecolor=_mixed(colour, "#ffffff", 0.6))
        pieces = [(span.start * scale, span.seconds * scale) for span in spans]
        seam = (*edge, 0.4)
        ax.broken_barh(pieces, (bottom, HEIGHT), facecolor=colour, edgecolor=seam, linewidth=0.4)
    face = colour if len(spans) == 1 else "none"
    ax.broken_barh([(start, end - start)], (bottom, HEIGHT), facecolor=face, edgecolor=edge, linewidth=0.8)
    label = ax.text(
        (start + end) / 2,
        lane,
        str(spans[0].layer),
        color=INK,
        fontsize=LABEL_SIZE,
        ha="center",
        va="center_baseline",
        clip_on=True,
    )
    if len(spans) > 1:  # no seam through a number
        label.set_bbox({"facecolor": colour, "linewidth": 0, "pad": 1.0})
    return [(label, end - start)]


def _drop_labels_that_do_not_fit(ax: Axes, labels: list[tuple[Any, float]]) -> None:
    """Remove the labels that are wider than their boxes, at the size that the figure has now."""
    from matplotlib.textpath import TextPath

    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # gives the axes the width that the layout leaves them
    left, right = ax.get_xlim()
    points_per_unit = ax.get_window_extent().width * 72 / figure.dpi / (right - left)
    for label, width in labels:
        needed = TextPath((0, 0), label.get_text(), size=LABEL_SIZE).get_extents().width
        if needed + 2 > width * points_per_unit:
            label.remove()


def _stall_style() -> dict[str, Any]:
    from matplotlib import rcParams

    colour = rcParams["axes.edgecolor"]
    return {"facecolor": "none", "edgecolor": colour, "hatch": "//////", "linewidth": 0.5}


def _kind_handles(timeline: Timeline) -> list[Any]:
    from matplotlib.patches import Patch

    present = {span.kind for span in timeline.spans}
    return [
        Patch(label=kind.value, **(_stall_style() if kind is Kind.STALL else {"facecolor": COLOURS[kind]}))
        for kind in Kind
        if kind in present
    ]


def _legend(ax: Axes, handles: list[Any], columns: int) -> None:
    """Put a legend above the axes, where it covers nothing."""
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=LABEL_SIZE + 0.5,
        borderaxespad=0.2,
        borderpad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _bare(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _mixed(colour: str, other: str, share: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple((1 - share) * a + share * b for a, b in zip(to_rgb(colour), to_rgb(other), strict=True))


def _time_unit(end: float) -> tuple[float, str]:
    """Return what to multiply seconds with, and the name of the unit that it gives."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if end * scale >= 1.0:
            return scale, unit
    return 1e6, "µs"


def _byte_unit(nbytes: float) -> tuple[int, str]:
    """Return what to divide bytes by, and the name of the unit that it gives."""
    for divisor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= divisor:
            return divisor, unit
    return 1, "bytes"


def _bytes(nbytes: int) -> str:
    divisor, unit = _byte_unit(nbytes)
    return f"{nbytes / divisor:.4g} {unit}"
