"""The program of each page about a framework runs as it stands there, offloads, and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from actoffload import OffloadHandle
from actoffload.report import RankReports, Report

PAGES = Path(__file__).parents[2] / "docs" / "integrations"
NEEDS = {
    "trainer": ("accelerate", "transformers"),
    "trl": ("datasets", "trl"),
    "lightning": ("pytorch_lightning",),
    "accelerate": ("accelerate",),
    "peft": ("peft", "transformers"),
    "diffusers": ("diffusers",),
    "torchtitan": (),
}


def test_every_page_is_tested():
    assert {page.stem for page in PAGES.glob("*.md")} == {*NEEDS, "index"}


@pytest.mark.filterwarnings("default")  # those of the frameworks
@pytest.mark.parametrize("page", NEEDS)
def test_the_program_of_a_page(page, tmp_path, monkeypatch, capsys):
    for package in NEEDS[page]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(blocks), names)
    callback = names.get("callback")
    report = callback.report if callback else names.get("report", names.get("reports"))
    handle = callback.handle if callback else names["handle"]
    assert isinstance(handle, OffloadHandle)
    reports = report.reports if isinstance(report, RankReports) else (report,)
    for each in reports:
        assert isinstance(each, Report)
        assert each.coverage > 0.8
        assert each.totals.bytes_offloaded > 0
        assert not any("(part " in group.name for group in each.groups)
    assert "offloaded" in capsys.readouterr().out
    if callback:
        assert callback.report.passes == 3
        assert not handle.installed
    handle.remove()
