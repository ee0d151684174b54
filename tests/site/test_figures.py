"""The figures that are drawn during the build of the site, and their directive."""

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
import budget_figures
import drawn_figures
import schedule_figures
from matplotlib import pyplot

from actoffload.schedule import simulate


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


def test_links_and_memory_are_what_the_captions_say() -> None:
    _, alt, _ = schedule_figures.links()
    pcie, c2c = (float(found) for found in re.findall(r"([\d.]+) ms of it stalled", alt))
    assert pcie > 0 == c2c
    results, alt = schedule_figures.memory()
    assert [result.peak_bytes // (256 * 2**20) for result in results.values()] == [5, 3, 2]
    assert "2 of 5 layers 0.75 GiB" in alt


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    pyplot.close("all")
