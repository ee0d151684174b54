"""Sphinx extension: the directive ``{schedule-figure} NAME`` draws a schedule as `simulate` predicts it.

Files and captions are as in `drawn_figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drawn_figures import Drawn, DrawnFigure, write
from sphinx.application import Sphinx

import actoffload
from actoffload.report.plots import plot_step
from actoffload.schedule import (
    DefaultSchedule,
    GroupSchedule,
    Kind,
    LayerCost,
    Link,
    ManualSchedule,
    Plan,
    Simulation,
    simulate,
)

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
    return (
        ManualSchedule(LAYERS)
        .start_offload_layer(0, after_forward_of=0)
        .release_activation_forward_gpu_memory(0, after_forward_of=1)
        .start_offload_layer(2, after_forward_of=2)
        .release_activation_forward_gpu_memory(2, after_forward_of=3)
        .start_reload_layer(2, before_backward_of=3)
        .start_reload_layer(0, before_backward_of=1)
        .plan()
    )


def groups() -> Plan:
    """Return a group schedule of 3 of 5 layers, with incremental release, over the link of `stalls`."""
    return GroupSchedule(num_layers=3).plan(["block"] * LAYERS)


FIGURES: dict[str, Callable[[], Plan]] = {
    "sequential": sequential,
    "full-overlap": full_overlap,
    "stalls": stalls,
    "manual": by_hand,
    "groups": groups,
}


def sources() -> list[Path]:
    """Return the files of the library that the figures depend on."""
    package = Path(actoffload.__file__).parent
    return [package / "report" / "plots.py", *sorted((package / "schedule").glob("*.py"))]


def describe(result: Simulation) -> str:
    """Return the alt text of a simulation."""
    numbers = sorted({span.layer for span in result.timeline.of(Kind.D2H)})
    joined = " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), *map(str, numbers[-1:]))))
    who = f"Layer{'s' * (len(numbers) > 1)} {joined} of {LAYERS}" if numbers else "No layer"
    stalled = result.stall_seconds * 1e3
    return (
        f"Timeline of compute, copies and memory over one step of {LAYERS} layers. "
        f"{who} {'are' if len(numbers) > 1 else 'is'} offloaded; "
        f"compute {f'waits {stalled:.1f} ms for copies' if stalled else 'never waits'}, "
        f"the step takes {result.step_time * 1e3:.1f} ms, "
        f"and at most {result.peak_bytes / MIB:.0f} MiB of activations are resident."
    )


def draw(name: str, folder: Path) -> Drawn:
    """Write the SVG files of a schedule into a folder."""
    result = simulate(FIGURES[name](), [COST] * LAYERS, LINK)
    return Drawn(write(f"schedule-{name}", folder, lambda: plot_step(result.timeline)), describe(result))


class ScheduleFigure(DrawnFigure):
    """``{schedule-figure} NAME``."""

    kind = "schedule"
    names = FIGURES

    def draw(self, name: str, folder: Path) -> Drawn:
        """Write the files of a schedule into a folder."""
        return draw(name, folder)

    def sources(self) -> Sequence[Path]:
        """Return the files of the library that the figures depend on."""
        return sources()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("schedule-figure", ScheduleFigure)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
