"""Sphinx extension: directives such as ``{schedule-figure} NAME`` draw a figure of docs/figures during the build.

Each figure is computed by the library, so that it agrees with it, and is two SVG files, for light and dark pages. The
page gives the caption; the alt text is computed with the figure.
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
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = {"light": "#24292f", "dark": "#ced6dd"}


@dataclass(frozen=True)
class Drawn:
    """A figure on disk: its files by colour scheme, and its alt text."""

    files: dict[str, Path]
    alt: str


def style(ink: str) -> dict[str, Any]:
    """Return the settings of matplotlib for text and axes in one colour on a transparent background."""
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    transparent = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    # Text as paths has the same widths on every machine, and the salt gives the same ids in every build.
    fixed = {"font.size": 9.5, "svg.fonttype": "path", "svg.hashsalt": "actoffload", "backend": "agg"}
    # The defaults of matplotlib, because examples of the gallery run in this process and may change settings.
    return {**matplotlib.rcParamsDefault, **dict.fromkeys(coloured, ink), **dict.fromkeys(transparent, "none"), **fixed}


def write(title: str, folder: Path, plot: Callable[[], Figure]) -> dict[str, Path]:
    """Write the SVG files of a figure into a folder, one for each colour scheme; return them by scheme."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = {page: folder / f"{title}-{page}.svg" for page in INK}
    for page, file in files.items():
        with matplotlib.rc_context(style(INK[page])):
            figure = plot()
            figure.savefig(file, metadata={"Date": None})
            pyplot.close(figure)
    return files


class DrawnFigure(SphinxDirective):
    """``{KIND-figure} NAME`` with the caption as its content; a subclass has the figures and their sources."""

    required_arguments = 1
    has_content = True
    option_spec = {"name": directives.unchanged}
    kind: str
    names: Collection[str]
    draw: Callable[[Any, str, Path], Drawn]
    sources: Callable[[Any], Sequence[Path]]

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
        figure += (images := nodes.container())
        for page, file in drawn.files.items():
            # Sphinx requires a path relative to the source folder, although the file is in the build folder.
            uri = "/" + Path(os.path.relpath(file, self.env.srcdir)).as_posix()
            images += nodes.image(uri=uri, alt=drawn.alt, classes=[f"only-{page}"])
        lines, _ = self.parse_inline(" ".join(self.content), lineno=self.lineno)
        figure += nodes.caption("", "", *lines)
        self.set_source_info(figure)
        self.add_name(figure)
        return [figure]
