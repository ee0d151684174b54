"""The picture of the landing page and the benchmark of memory over a step that it shows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("matplotlib", reason="pictures need matplotlib")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

import frontier  # noqa: E402 - lies in benchmarks, as the next ones
import hero  # noqa: E402
import report  # noqa: E402
import step_memory  # noqa: E402

SMALL = frontier.SMALL_PARTS["8k"].settings
TINY = frontier.Part(replace(SMALL, shape=(1, 64, 64), intermediate=128, min_bytes=1024, counts=(1,)), False)


def test_memory_over_a_step_rises_in_forward_and_falls_in_backward(tmp_path: Path) -> None:
    data = step_memory.measure_part(TINY, torch.device("cpu"))
    assert list(data["arms"]) == ["no offload", "checkpoint", "actoffload"]
    layers = TINY.settings.layers
    for arm in data["arms"].values():
        assert len(arm["samples"]) == 2 + 3 * layers  # start, end, and three for each layer
        assert arm["peak_bytes"] >= max(used for _, used in arm["samples"]) > 0
        assert sorted(second for second, _ in arm["samples"]) == [second for second, _ in arm["samples"]]
    after_forward = {method: arm["samples"][layers][1] for method, arm in data["arms"].items()}
    assert after_forward["checkpoint"] < after_forward["no offload"]
    assert after_forward["actoffload"] < after_forward["no offload"]

    data["device"] = {"name": "Imagined GPU", "reference": False, "driver": "1.2", "torch": "3", "python": "4"}
    data |= {"date": "2026-11-23T23:31:28", "source_digest": "0" * 64, "command": "run"}
    page = report.readers_page({"memory": data})
    assert "% above the peak of checkpointing. Each curve is one step." in page
    assert "Measured on Imagined GPU, driver 1.2, torch 3, Python 4, 2026-11-23" in page
    files = hero.draw({"memory": data}, tmp_path)
    assert [file.name for file in files] == ["hero-step-light.png", "hero-step-dark.png"]
    data["device"]["reference"] = True
    assert hero.draw({"memory": data}, tmp_path) == []


def test_recorded_results_give_both_pictures(tmp_path: Path) -> None:
    files = hero.draw(report.load(report.RESULTS), tmp_path)
    assert len(files) == 4
    light, dark = files[0].read_bytes(), files[1].read_bytes()
    assert light != dark


def test_the_readme_has_the_sentences_of_the_results() -> None:
    text = report.README.read_text(encoding="utf-8")
    assert report.readme(text, report.headline()) == text
    assert "Other words." in report.readme(text, "Other words.")
    assert report.readme(report.readme(text, "Other words."), report.headline()) == text


def test_the_captions_have_device_versions_and_date() -> None:
    data = report.load(report.RESULTS)["memory"]
    found = report.headline()
    for fact in (data["device"]["name"], data["device"]["torch"], data["device"]["driver"], data["date"][:10]):
        assert fact in found
