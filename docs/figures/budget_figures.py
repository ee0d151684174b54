"""Sphinx extension: the directive ``{budget-figure} NAME`` draws time against peak memory, as the planner expects it.

The figures are computed from given costs. Files and captions are as in `drawn_figures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawn_figures import Drawn, DrawnFigure, write
from schedule_figures import GIB
from sphinx.application import Sphinx

import actoffload
from actoffload.planner import Variant, choose, frontier
from actoffload.report.plots import LINES
from actoffload.schedule import LayerCost, Link, Plan, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = 16
COST = LayerCost.even(GIB, forward=0.008, backward=0.016)
# What is not saved is on the device again while the backward of the layer runs.
SELECTIVE = replace(LayerCost.even(GIB // 2, forward=0.008, backward=0.018), backward_temporary=GIB // 2)
CHECKPOINTED = replace(LayerCost.even(GIB // 16, forward=0.008, backward=0.024), backward_temporary=GIB * 15 // 16)
PRODUCTS = tuple(f"aten.mm.default#{k}" for k in range(4))
LINK = Link(d2h=50e9, h2d=50e9)
LIMITS = range(1, 12)  # GiB

Point = tuple[float, float]  # peak in GiB, and time as a ratio to that without offloading and recomputation


def _point(plan: Plan) -> Point:
    assert plan.peak_bytes is not None
    assert plan.seconds is not None
    assert plan.baseline_seconds
    return plan.peak_bytes / GIB, plan.seconds / plan.baseline_seconds


def _names() -> list[str]:
    return [f"layers.{k}" for k in range(LAYERS)]


def offloading() -> list[Point]:
    """Return what plans cost that only offload."""
    return [_point(plan) for plan in frontier(_names(), [(Variant(COST),)] * LAYERS, LINK, points=len(LIMITS))]


def recomputing(cost: LayerCost) -> list[Point]:
    """Return what it costs to recompute the first layers, from all but the last to none, and to offload nothing."""
    found = []
    for number in range(LAYERS - 1, -1, -1):
        result = simulate(Plan(LAYERS), [cost] * number + [COST] * (LAYERS - number), LINK)
        found.append((result.device_peak_bytes / GIB, result.step_time / (LAYERS * (COST.forward + COST.backward))))
    return found


def both() -> list[Point]:
    """Return what plans cost that offload and recompute."""
    group = (Variant(COST), Variant(SELECTIVE, PRODUCTS), Variant(CHECKPOINTED, ()))
    return [_point(choose(_names(), [group] * LAYERS, LINK, limit=limit * GIB)) for limit in LIMITS]


def curves() -> dict[str, list[Point]]:
    """Return the curves by name."""
    return {
        "checkpoint layers": recomputing(CHECKPOINTED),
        "recompute, keep matrix products": recomputing(SELECTIVE),
        "offload": offloading(),
        "offload and recompute": both(),
    }


def plot(points: dict[str, list[Point]]) -> Figure:
    """Draw curves."""
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(7.0, 3.4), layout="constrained")
    styles = (LINES[3], LINES[1], LINES[0], LINES[2])
    for (name, line), (colour, dashes) in zip(points.items(), styles, strict=True):
        peaks, times = zip(*line, strict=True)
        ax.plot(peaks, times, color=colour, linestyle=dashes, marker="o", markersize=3.5, linewidth=1.5, label=name)
    ax.plot(LAYERS, 1.0, "D", color="#888888", markersize=7, label="keep everything")
    ax.set_xlim(left=0)
    ax.set_xlabel("peak of activations (GiB)")
    ax.set_ylabel("time (x keep everything)")
    ax.legend(frameon=False, fontsize=8.5)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def describe(points: dict[str, list[Point]]) -> str:
    """Return the alt text of the curves."""
    ends = []
    for name, line in points.items():
        peak, time = min(line)
        ends.append(f"{name}: {time:.2f} at {peak:.1f} GiB")
    return (
        f"Time against peak of activations for {LAYERS} layers. Keeping everything has {LAYERS} GiB. "
        f"Time at the smallest peak of each curve, as a ratio to keeping everything: {'; '.join(ends)}."
    )


def draw(name: str, folder: Path) -> Drawn:
    """Write the SVG files of a figure into a folder."""
    points = FIGURES[name]()
    return Drawn(write(f"budget-{name}", folder, lambda: plot(points)), describe(points))


FIGURES = {"choices": curves}


class BudgetFigure(DrawnFigure):
    """``{budget-figure} NAME``."""

    kind = "budget"
    names = FIGURES

    def draw(self, name: str, folder: Path) -> Drawn:
        """Write the files of a figure into a folder."""
        return draw(name, folder)

    def sources(self) -> Sequence[Path]:
        """Return the files of the library that the figures depend on."""
        package = Path(actoffload.__file__).parent
        parts = (package / "report" / "plots.py", *package.glob("planner/*.py"), *package.glob("schedule/*.py"))
        return (Path(__file__), *sorted(parts))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("budget-figure", BudgetFigure)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
