"""The directive that draws schedules during the build of the site."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
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


@pytest.mark.parametrize("name", schedule_figures.FIGURES)
def test_figures_are_the_same_in_every_build(tmp_path: Path, name: str) -> None:
    first = schedule_figures.draw(name, tmp_path / "first")
    again = schedule_figures.draw(name, tmp_path / "again")
    assert first.alt == again.alt
    for page, file in first.files.items():
        text = file.read_text(encoding="utf-8")
        assert text == again.files[page].read_text(encoding="utf-8")
        assert drawn_figures.INK[page] in text
        assert str(tmp_path) not in text


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


@pytest.fixture
def overlap_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a result whose recorded steps are simulated ones, as a GPU would record them."""
    costs, link = [schedule_figures.COST] * schedule_figures.LAYERS, schedule_figures.LINK
    runs, seconds = {}, {"0": 0.15}
    for name, count in (("full-overlap", "2"), ("stalls", "3")):
        result = simulate(schedule_figures.FIGURES[name](), costs, link)
        spans = [[s.kind.name, s.layer, s.start, s.end, s.nbytes] for s in result.timeline.spans]
        runs[count] = {"spans": spans, "resident": result.timeline.resident}
        seconds[count] = result.step_time
    device = {"name": "Some GPU", "driver": "1.2", "torch": "2.13", "reference": False}
    data = {"device": device, "date": "2026-11-22T10:00:00", "costs": [asdict(cost) for cost in costs]}
    path = tmp_path / "overlap.json"
    path.write_text(json.dumps({**data, "link": {"d2h": link.d2h, "h2d": link.h2d}, "runs": runs, "seconds": seconds}))
    monkeypatch.setattr(schedule_figures, "RESULT", path)
    return path


def test_a_simulated_step_is_drawn_beside_the_recorded_one(overlap_result: Path, tmp_path: Path) -> None:
    timelines, alt, note = schedule_figures.overlap("stalls")
    assert list(timelines) == ["simulated", "measured"]
    assert timelines["measured"].spans == timelines["simulated"].spans
    assert timelines["measured"].peak_bytes == 2 * 256 * 2**20
    assert "Timeline of compute and copies over" in alt
    assert "Below it a measured step; 166.8 ms is the median of several." in alt
    assert note.endswith(
        "166.8 ms simulated, 166.8 ms measured (median). Measured on Some GPU, driver 1.2, torch 2.13, 2026-11-22."
    )
    assert "run at 14.5 GB/s in the step, and are simulated with the 14.5 that they have alone" in note
    assert list(schedule_figures.overlap("full-overlap")[0]) == ["simulated", "measured"]
    data = json.loads(overlap_result.read_text())
    slow = {**data, "link": {"d2h": 1e10, "h2d": 1e10}}
    overlap_result.write_text(json.dumps(slow))
    assert list(schedule_figures.overlap("full-overlap")[0]) == ["simulated"]  # compute waits in this run
    assert "compute never waits" in schedule_figures.overlap("full-overlap")[1]
    data["device"]["reference"] = True
    overlap_result.write_text(json.dumps(data))
    assert list(schedule_figures.overlap("stalls")[0]) == ["simulated"]  # a rehearsal is no measurement
    overlap_result.unlink()
    assert schedule_figures.overlap("stalls")[2].startswith("Simulated: a layer saves 256 MiB")


def test_links_and_memory_are_what_the_captions_say() -> None:
    _, alt, _ = schedule_figures.links()
    pcie, c2c = (float(found) for found in re.findall(r"([\d.]+) ms of it stalled", alt))
    assert pcie > 0 == c2c
    results, alt = schedule_figures.memory()
    assert [result.peak_bytes // (256 * 2**20) for result in results.values()] == [5, 3, 2]
    assert "2 of 5 layers 0.75 GiB" in alt
