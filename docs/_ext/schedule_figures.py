"""Sphinx extension: the directive ``{schedule-figure} NAME`` draws a schedule as `simulate` predicts it.

The figures are drawn during the build of the site, so they always agree with the library.  Each figure is two
SVG files with a transparent background, for light and dark pages.  The page gives the caption; the alt text is
written from the simulation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = 5
MIB, GIB = 2**20, 2**30
COST = LayerCost.even(256 * MIB, forward=0.010, backward=0.020)
LINK = Link(d2h=13.5 * GIB, h2d=13.5 * GIB)

INK = {"light": "#24292f", "dark": "#ced6dd"}


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


@dataclass(frozen=True)
class Drawn:
    """A figure on disk: its files by colour scheme, and its alt text."""

    files: dict[str, Path]
    alt: str


def style(ink: str) -> dict[str, Any]:
    """Return the settings of matplotlib for text and axes in one colour on a transparent background."""
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(coloured, ink),
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "font.size": 9.5,
        "svg.fonttype": "path",  # the same widths on every machine, independent of its fonts
        "svg.hashsalt": "actoffload",  # the same ids in every build
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


def write(title: str, folder: Path, plot: Callable[[], Figure]) -> dict[str, Path]:
    """Write the SVG files of a figure into a folder, one for each colour scheme; return them by scheme."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = {page: folder / f"{title}-{page}.svg" for page in INK}
    for page, file in files.items():
        # Reset to the defaults of matplotlib: examples of the gallery run in this process and may change settings.
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style(INK[page]), "backend": "agg"}):
            figure = plot()
            figure.savefig(file, metadata={"Date": None})
            pyplot.close(figure)
    return files


def draw(name: str, folder: Path) -> Drawn:
    """Write the SVG files of a schedule into a folder."""
    result = simulate(FIGURES[name](), [COST] * LAYERS, LINK)
    return Drawn(write(f"schedule-{name}", folder, lambda: plot_step(result.timeline)), describe(result))


class DrawnFigure(SphinxDirective):
    """``{KIND-figure} NAME`` with the caption as its content; a subclass says which figures there are."""

    required_arguments = 1
    has_content = True
    option_spec = {"name": directives.unchanged}
    kind: str
    names: Collection[str]

    def draw(self, name: str, folder: Path) -> Drawn:
        """Write the files of a figure into a folder."""
        raise NotImplementedError

    def sources(self) -> Sequence[Path]:
        """Return the files that the figures depend on."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Draw the figure and return its nodes."""
        name = self.arguments[0]
        if name not in self.names:
            raise self.error(f"There is no {self.kind} figure {name!r}; expected one of {', '.join(self.names)}.")
        if not self.content:
            raise self.error(f"The {self.kind} figure {name!r} has no caption; write one as the directive's text.")
        for file in (Path(__file__), *self.sources()):
            self.env.note_dependency(str(file))
        drawn = self.draw(name, Path(self.env.doctreedir) / f"{self.kind}_figures")
        figure = nodes.figure(classes=[f"{self.kind}-figure"])
        # Separate from the caption: the theme hides a caption that follows the image of the other colour scheme.
        images = nodes.container()
        figure += images
        for page, file in drawn.files.items():
            # Sphinx requires a path relative to the source folder, although the file is in the build folder.
            uri = "/" + Path(os.path.relpath(file, self.env.srcdir)).as_posix()
            images += nodes.image(uri=uri, alt=drawn.alt, classes=[f"only-{page}"])
        lines, _ = self.parse_inline(" ".join(self.content), lineno=self.lineno)
        figure += nodes.caption("", "", *lines)
        self.set_source_info(figure)
        self.add_name(figure)
        return [figure]


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
