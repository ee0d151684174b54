"""Sphinx extension: the directive ``{schedule-figure} NAME`` draws a schedule as `simulate` predicts it.

Files and captions are as in `drawn_figures`; the caption ends with what was simulated.  ``{overlap-figure} NAME`` draws
a simulated step above a recorded one of the benchmark `overlap`, with device and versions, if there is a result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from drawn_figures import Drawn, DrawnFigure, write
from sphinx.application import Sphinx

import actoffload
from actoffload.report.plots import LINES, add_legend, plot_timeline
from actoffload.schedule import (
    Action,
    DefaultSchedule,
    Do,
    Event,
    Kind,
    LayerCost,
    Link,
    Plan,
    Saved,
    Simulation,
    Span,
    Timeline,
    When,
    simulate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "overlap.json"
LAYERS = 5
MIB, GIB = 2**20, 2**30
COST = LayerCost.even(256 * MIB, forward=0.010, backward=0.020)
LINK = Link(d2h=13.5 * GIB, h2d=13.5 * GIB)


def sequential() -> Plan:
    """Return a plan without offloading."""
    return Plan(LAYERS)


def full_overlap() -> Plan:
    """Return a default schedule of 2 of 5 layers."""
    return DefaultSchedule(num_layers=2, model_layers=LAYERS).plan()


def stalls() -> Plan:
    """Return a default schedule of 3 of 5 layers, for which the link is too slow."""
    return DefaultSchedule(num_layers=3, model_layers=LAYERS).plan()


def by_hand() -> Plan:
    """Return a manual schedule of every second layer, each reloaded one layer early."""
    calls = [
        (Event(When.FORWARD_END, 0), Action(Do.OFFLOAD, 0)),
        (Event(When.FORWARD_END, 1), Action(Do.RELEASE, 0)),
        (Event(When.FORWARD_END, 2), Action(Do.OFFLOAD, 2)),
        (Event(When.FORWARD_END, 3), Action(Do.RELEASE, 2)),
        (Event(When.BACKWARD_START, 3), Action(Do.RELOAD, 2)),
        (Event(When.BACKWARD_START, 1), Action(Do.RELOAD, 0)),
    ]
    return Plan.of(LAYERS, calls)


FIGURES: dict[str, Callable[[], Plan]] = {
    "sequential": sequential,
    "full-overlap": full_overlap,
    "stalls": stalls,
    "manual": by_hand,
}


def sources() -> list[Path]:
    """Return the files of the library that the figures depend on."""
    package = Path(actoffload.__file__).parent
    return [package / "report" / "plots.py", *sorted((package / "schedule").glob("*.py"))]


def describe(result: Simulation, rows: str) -> str:
    """Return the alt text of a simulation, of which a figure shows some rows."""
    numbers = sorted({span.layer for span in result.timeline.of(Kind.D2H)})
    joined = " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), *map(str, numbers[-1:]))))
    who = f"Layer{'s' * (len(numbers) > 1)} {joined} of {LAYERS}" if numbers else "No layer"
    stalled = result.stall_seconds * 1e3
    return (
        f"Timeline of {rows} over one step of {LAYERS} layers. "
        f"{who} {'are' if len(numbers) > 1 else 'is'} offloaded; "
        f"compute {f'waits {stalled:.1f} ms for copies' if stalled else 'never waits'}, "
        f"the step takes {result.step_time * 1e3:.1f} ms, "
        f"and at most {result.peak_bytes / MIB:.0f} MiB of activations are resident."
    )


def origin(cost: LayerCost, link: Link, peak: int = 0) -> str:
    """Return a sentence with what is simulated, in the unit of memory of a figure with that peak."""
    forward, backward = cost.forward * 1e3, cost.backward * 1e3
    nbytes = f"{cost.nbytes / GIB:.4g} GiB" if peak >= GIB else f"{cost.nbytes / MIB:.0f} MiB"
    return (
        f"Simulated: a layer saves {nbytes}, its forward takes {forward:.1f} ms and its backward "
        f"{backward:.1f} ms; the link carries {link.d2h / 1e9:.1f} GB/s in each direction."
    )


def plot_memory(timelines: dict[str, Timeline], ax: Axes) -> None:
    """Draw the bytes of activations that are resident over time, with the peak of each step."""
    ax.spines[["top", "right"]].set_visible(False)
    end = max(timeline.end for timeline in timelines.values())
    highest = max(nbytes for timeline in timelines.values() for _, nbytes in timeline.resident)
    unit, unit_name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    for (name, timeline), (colour, dashes) in zip(timelines.items(), cycle(LINES), strict=False):
        points = [(0.0, 0), *timeline.resident]
        points.append((timeline.end, points[-1][1]))
        x, y = [seconds * 1e3 for seconds, _ in points], [nbytes / unit for _, nbytes in points]
        label = f"{name + ', ' if name else ''}peak {max(y):.4g} {unit_name}"
        ax.step(x, y, where="post", color=colour, linestyle=dashes, linewidth=1.8, label=label)
        if len(timelines) == 1:
            ax.fill_between(x, y, step="post", color=colour, alpha=0.22, linewidth=0)
        ax.plot(x[y.index(max(y))], max(y), "o", color=colour, markersize=5, zorder=4)
        ax.axhline(max(y), color=colour, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
    ax.set_xlim(0, end * 1e3)
    ax.set_ylim(0, highest / unit * 1.08)
    ax.set_xlabel("time (ms)")
    ax.set_ylabel(f"memory ({unit_name})")
    add_legend(ax, None, columns=min(len(timelines), 2))


def plot_step(timeline: Timeline) -> Figure:
    """Return a figure with compute, copies and resident bytes of one step."""
    from matplotlib import pyplot

    copies = bool(timeline.of(Kind.D2H, Kind.H2D))
    ratios, size = ((3, 2.4), (7.5, 4.0)) if copies else ((1.2, 2.4), (7.5, 2.9))
    figure, (lanes, memory) = pyplot.subplots(2, sharex=True, figsize=size, height_ratios=ratios, layout="constrained")
    plot_memory({"": timeline}, memory)
    plot_timeline(timeline, lanes)
    lanes.set_xlabel("")
    figure.align_ylabels()
    return figure


def draw(name: str, folder: Path) -> Drawn:
    """Write the SVG files of a schedule into a folder."""
    result = simulate(FIGURES[name](), [COST] * LAYERS, LINK)
    rows = "compute, copies and memory" if result.bytes_offloaded else "compute and memory"
    return Drawn(write(f"schedule-{name}", folder, lambda: plot_step(result.timeline)), describe(result, rows))


class ScheduleFigure(DrawnFigure):
    """``{schedule-figure} NAME``."""

    kind = "schedule"
    names = FIGURES

    def draw(self, name: str, folder: Path) -> Drawn:
        """Write the files of a schedule into a folder."""
        return draw(name, folder)

    def origin(self, name: str) -> str:
        """Return the sentence with which the caption ends."""
        result = simulate(FIGURES[name](), [COST] * LAYERS, LINK)
        sentence = origin(COST, LINK, result.peak_bytes)
        return sentence if result.bytes_offloaded else sentence.partition(";")[0] + "."

    def sources(self) -> Sequence[Path]:
        """Return the files of the library that the figures depend on."""
        return sources()

    def run(self) -> list[nodes.Node]:
        """Draw the figure and return its nodes."""
        if self.content and self.arguments[0] in self.names:
            self.content.append(self.origin(self.arguments[0]), *self.content.info(-1))
        return super().run()


# -- Simulated beside recorded, links, memory -------------------------------------------------------------


def recorded() -> dict[str, Any] | None:
    """Return the recorded steps, or None if there are none of a GPU."""
    data: dict[str, Any] | None = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else None
    return data if data is not None and not data["device"]["reference"] else None


def measured_input(data: dict[str, Any]) -> tuple[list[LayerCost], Link]:
    """Return the measured costs and link."""
    layers = [
        LayerCost(cost["forward"], cost["backward"], tuple(Saved(**saved) for saved in cost["saved"]))
        for cost in data["costs"]
    ]
    return layers, Link(**data["link"])


def measured_timeline(data: dict[str, Any], name: str) -> Timeline:
    """Return a recorded step."""
    run = data["runs"][str(len(FIGURES[name]().offloaded))]
    spans = [Span(Kind[kind], layer, start, end, nbytes) for kind, layer, start, end, nbytes in run["spans"]]
    return Timeline.build(spans, [(seconds, nbytes) for seconds, nbytes in run["resident"]])


def stacked(timelines: dict[str, Timeline]) -> Figure:
    """Draw timelines one above the other, over the same time."""
    from matplotlib import pyplot

    size = (7.5, 0.4 + 2.2 * len(timelines))
    figure, axes = pyplot.subplots(len(timelines), sharex=True, figsize=size, layout="constrained", squeeze=False)
    end = max(timeline.end for timeline in timelines.values())
    for ax, (title, timeline) in zip(axes.flat, timelines.items(), strict=True):
        # An empty span at the common end: plot_timeline takes the unit, the limit and the labels that fit from the end.
        plot_timeline(replace(timeline, spans=(*timeline.spans, Span(Kind.BACKWARD, 0, end, end))), ax)
        ax.set_title(title, fontsize=9.5, loc="right")
    for ax in axes.flat[1:]:
        ax.get_legend().remove()
    for ax in axes.flat[:-1]:
        ax.set_xlabel("")
    return figure


def overlap(name: str) -> tuple[dict[str, Timeline], str, str]:
    """Return timelines by title, the alt text and the end of the caption: simulated, and recorded if there is a run.

    A run in which compute waits is not shown for full overlap, and one in which it does not wait not for stalls.
    """
    data, plan = recorded(), FIGURES[name]()
    layers, link = measured_input(data) if data else ([COST] * LAYERS, LINK)
    result = simulate(plan, layers, link)
    if (result.stall_seconds > 0.01 * result.step_time) != (name == "stalls"):
        data, link = None, LINK
        result = simulate(plan, [COST] * LAYERS, LINK)
    found, alt = {"simulated": result.timeline}, describe(result, "compute and copies")
    if data is None:
        return found, alt, origin(COST, LINK)
    found["measured"] = measured_timeline(data, name)
    seconds, device = data["seconds"][str(len(plan.offloaded))], data["device"]
    alt += f" Below it a measured step; {seconds * 1e3:.1f} ms is the median of several."
    where = f"{device['name']}, driver {device['driver']}, torch {device['torch']}, {data['date'][:10]}"
    both = f"{result.step_time * 1e3:.1f} ms simulated, {seconds * 1e3:.1f} ms measured"
    copies = found["measured"].of(Kind.D2H)
    rate = sum(span.nbytes for span in copies) / sum(span.seconds for span in copies)
    rates = f"run at {rate / 1e9:.1f} GB/s in the step, and are simulated with the {link.d2h / 1e9:.1f}"
    why = f"{LAYERS} GPT blocks; copies to the host {rates} that they have alone."
    return found, alt, f"{why} A step takes {both} (median). Measured on {where}."


LINKS = {"PCIe Gen5 x16": 64e9, "NVLink-C2C": 450e9}
WIDE = LayerCost.even(1536 * MIB, forward=0.008, backward=0.016)


def links() -> tuple[dict[str, Timeline], str, str]:
    """Return the same plan over two links, with the bandwidths of the vendors for one direction."""
    plan = stalls()
    results = {name: simulate(plan, [WIDE] * LAYERS, Link(rate, rate)) for name, rate in LINKS.items()}
    alt = "; ".join(
        f"over {name} the step takes {result.step_time * 1e3:.1f} ms, {result.stall_seconds * 1e3:.1f} ms of it stalled"
        for name, result in results.items()
    )
    note = (
        f"Simulated with the vendors' bandwidths in one direction: a layer saves {WIDE.nbytes / MIB:.0f} MiB, its "
        f"forward takes {WIDE.forward * 1e3:.0f} ms and its backward {WIDE.backward * 1e3:.0f} ms."
    )
    titles = {f"{name}, {LINKS[name] / 1e9:.0f} GB/s": result.timeline for name, result in results.items()}
    return titles, f"Two timelines of a step that offloads 3 of {LAYERS} layers: {alt}.", note


OVERLAPS: dict[str, Callable[[], tuple[dict[str, Timeline], str, str]]] = {
    "full-overlap": lambda: overlap("full-overlap"),
    "stalls": lambda: overlap("stalls"),
    "links": links,
}


def memory_plot(results: dict[str, Simulation]) -> Figure:
    """Draw the memory of several steps."""
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(7.5, 2.6), layout="constrained")
    plot_memory({name: result.timeline for name, result in results.items()}, ax)
    return figure


def memory() -> tuple[dict[str, Simulation], str]:
    """Return the steps whose memory is compared, and the alt text."""
    plans = {"no offload": sequential(), "2 of 5 layers": full_overlap(), "3 of 5 layers": stalls()}
    results = {name: simulate(plan, [COST] * LAYERS, LINK) for name, plan in plans.items()}
    peaks = ", ".join(f"{name} {result.peak_bytes / GIB:.4g} GiB" for name, result in results.items())
    return results, f"Memory of activations over a step. It rises in forward and falls in backward. Peaks: {peaks}."


class OverlapFigure(ScheduleFigure):
    """``{overlap-figure} NAME``; the name ``memory`` stands for memory over a step with several plans."""

    kind = "overlap"
    names = (*OVERLAPS, "memory")

    def draw(self, name: str, folder: Path) -> Drawn:
        """Write the files of a figure into a folder."""
        if name == "memory":
            results, alt = memory()
            return Drawn(write("overlap-memory", folder, lambda: memory_plot(results)), alt)
        timelines, alt, _ = OVERLAPS[name]()
        return Drawn(write(f"overlap-{name}", folder, lambda: stacked(timelines)), alt)

    def origin(self, name: str) -> str:
        """Return the sentence with which the caption ends."""
        return origin(COST, LINK, LAYERS * COST.nbytes) if name == "memory" else OVERLAPS[name]()[2]

    def sources(self) -> Sequence[Path]:
        """Return the files that the figures depend on."""
        return [Path(__file__), RESULT, *sources()] if RESULT.is_file() else [Path(__file__), *sources()]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("schedule-figure", ScheduleFigure)
    app.add_directive("overlap-figure", OverlapFigure)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
