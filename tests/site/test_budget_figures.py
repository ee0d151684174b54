"""The figure of time against peak memory that is drawn during the build of the site."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
import budget_figures


@pytest.fixture(scope="module")
def curves():
    """What takes seconds to plan."""
    return budget_figures.curves()


def test_offloading_and_recomputing_together_costs_the_least(curves):
    found = dict(curves)
    together = found.pop("offload and recompute")
    for line in found.values():
        for peak, time in line:
            fitting = [other for limit, other in together if limit <= peak]
            assert not fitting or min(fitting) <= time + 1e-9
    assert all(later[1] <= earlier[1] for earlier, later in pairwise(sorted(together)))


def test_the_figure_is_the_same_in_every_build(tmp_path, curves, monkeypatch):
    monkeypatch.setitem(budget_figures.FIGURES, "choices", lambda: curves)  # plans are the same: tests of the planner
    first, again = (budget_figures.draw("choices", tmp_path / name) for name in ("first", "again"))
    assert first.alt == again.alt
    assert "offload and recompute: 1.19 at 1.0 GiB" in first.alt
    for page, file in first.files.items():
        assert file.read_text(encoding="utf-8") == again.files[page].read_text(encoding="utf-8")
