"""The figures that are drawn during the build of the site, and their directive."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
import budget_figures
import drawn_figures
import schedule_figures

from actoffload.schedule import simulate

PAGE = """
Page
====

.. schedule-figure:: stalls
   :name: the-stalls

   Three of five, with *emphasis*.

See :ref:`this figure <the-stalls>`.
"""


def build(root: Path, page: str) -> tuple[str, str]:
    """Build a page; return its HTML and the warnings."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    (root / "docs" / "deep").mkdir(parents=True)
    (root / "docs" / "index.rst").write_text("Start\n=====\n\n.. toctree::\n\n   deep/page\n")
    (root / "docs" / "deep" / "page.rst").write_text(page)
    warning = io.StringIO()
    with patch_docutils(str(root)), docutils_namespace():
        Sphinx(
            srcdir=root / "docs",
            confdir=None,
            outdir=root / "out" / "html",
            doctreedir=root / "out" / "doctrees",
            buildername="html",
            confoverrides={"extensions": ["schedule_figures"], "nitpicky": True, "html_theme": "basic"},
            status=None,
            warning=warning,
        ).build()
    html = root / "out" / "html" / "deep" / "page.html"
    return html.read_text(encoding="utf-8"), warning.getvalue()


def test_a_figure_has_a_light_and_a_dark_image_an_alt_text_and_a_caption(tmp_path: Path) -> None:
    html, warnings = build(tmp_path, PAGE)
    assert warnings == ""
    images = re.findall(r'<img alt="([^"]*)" class="([^"]*)" src="([^"]*)"', html)
    assert [css for _, css, _ in images] == ["only-light", "only-dark"]
    for alt, _, source in images:
        assert "Layers 0, 1 and 2 of 5 are offloaded; compute waits 16.8 ms for copies" in alt
        file = tmp_path / "out" / "html" / "deep" / source
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert "Three of five, with <em>emphasis</em>." in html
    assert 'href="#the-stalls"' in html
    # The theme hides siblings that follow an image of the other colour scheme, so the caption must not be one.
    figure = re.search(r"<figure.*?</figure>", html, flags=re.DOTALL)
    assert figure is not None
    assert re.search(r"</div>\s*<figcaption>", figure.group())


@pytest.fixture(scope="module")
def curves():
    """The curves of time against peak memory, which take seconds to plan."""
    return budget_figures.curves()


@pytest.mark.parametrize(("figures", "name"), [(schedule_figures, "stalls"), (budget_figures, "choices")])
def test_a_figure_is_the_same_in_every_build(figures, name, curves, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(budget_figures.FIGURES, "choices", lambda: curves)  # plans are the same: tests of the planner
    first, again = (figures.draw(name, tmp_path / folder) for folder in ("first", "again"))
    assert first.alt == again.alt
    assert name == "stalls" or "offload and recompute: 1.20 at 1.0 GiB" in first.alt
    for page, file in first.files.items():
        text = file.read_text(encoding="utf-8")
        assert text == again.files[page].read_text(encoding="utf-8")
        assert drawn_figures.INK[page] in text
        assert str(tmp_path) not in text


def test_offloading_and_recomputing_together_costs_the_least(curves) -> None:
    found = dict(curves)
    together = found.pop("offload and recompute")
    for line in found.values():
        for peak, time in line:
            fitting = [other for limit, other in together if limit <= peak]
            assert not fitting or min(fitting) <= time + 1e-9
    assert all(later[1] <= earlier[1] for earlier, later in pairwise(sorted(together)))


def test_the_figures_match_their_names() -> None:
    def run(name: str) -> tuple[int, float]:
        plan = schedule_figures.FIGURES[name]()
        layers = [schedule_figures.COST] * schedule_figures.LAYERS
        result = simulate(plan, layers, schedule_figures.LINK)
        return len(plan.offloaded), result.stall_seconds

    assert run("sequential") == (0, 0.0)
    assert run("full-overlap") == (2, 0.0)
    count, stalled = run("stalls")
    assert count == 3
    assert stalled > 0
    assert run("manual") == (2, 0.0)
    assert run("groups")[0] == 3
    assert 0 < run("groups")[1] < stalled


def test_links_and_memory_are_what_the_captions_say() -> None:
    _, alt, _ = schedule_figures.links()
    pcie, c2c = (float(found) for found in re.findall(r"([\d.]+) ms of it stalled", alt))
    assert pcie > 0 == c2c
    results, alt = schedule_figures.memory()
    assert [result.peak_bytes // (256 * 2**20) for result in results.values()] == [5, 3, 2]
    assert "2 of 5 layers 0.75 GiB" in alt
