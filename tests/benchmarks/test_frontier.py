"""The benchmark of time against peak at rehearsal sizes, its part of the page and its picture."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "model")]

import frontier  # noqa: E402 - lies in benchmarks, as the next ones
import page  # noqa: E402
import report  # noqa: E402
import results_file  # noqa: E402
import run  # noqa: E402
from timed_device import Timed, TimedModel  # noqa: E402 - lies in tests/model

import actoffload  # noqa: E402
from actoffload.device import use  # noqa: E402
from actoffload.schedule import DefaultSchedule, LayerCost, Link  # noqa: E402

CPU = torch.device("cpu")
GIB = 2**30
SMALL = frontier.SMALL_PARTS["8k"].settings
TINY = frontier.Part(replace(SMALL, shape=(1, 64, 64), intermediate=128, min_bytes=1024, counts=(1,)), False)


@pytest.fixture(scope="module")
def part() -> dict[str, Any]:
    return frontier.measure_part("8k", TINY, CPU, budgets=2)


def test_all_ways_are_measured_and_the_bits_of_memory_that_they_save(part: dict[str, Any]) -> None:
    methods = [
        "no offload",
        "no offload, again",
        "checkpoint",
        "selective",
        "save_on_cpu",
        *["actoffload"] * 3,
        "default",
        "layers",
    ]
    assert [arm["method"] for arm in part["arms"]] == methods
    none, again, whole, selective, _, *budgets, default, layers = part["arms"]
    assert none["peak_bytes"] == again["peak_bytes"]
    assert whole["peak_bytes"] < none["peak_bytes"]
    assert whole["peak_bytes"] <= selective["peak_bytes"] <= none["peak_bytes"]
    assert budgets[0]["budget"] == part["target"]
    assert budgets[1]["budget"] < budgets[2]["budget"] == none["peak_bytes"]
    assert all(arm["highest_bytes"] >= arm["peak_bytes"] for arm in budgets)
    assert (default["budget"], default["num_layers"]) == (None, None)
    assert layers["num_layers"] == 1
    # Nothing is measured on the reference device, so nothing is predicted.
    assert not any("predicted" in arm for arm in part["arms"])
    assert (none["ratio"] + again["ratio"]) / 2 == pytest.approx(1.0)


def test_page_and_picture(part: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arms = [dict(arm) for arm in part["arms"]]
    arms[5] |= {"budget": 15 * GIB, "highest_bytes": 14.5 * GIB, "seconds": 0.5, "ratio": 1.1}
    arms[5] |= {"distance": {"seconds": 0.01, "peak_bytes": 0.0}}
    arms[6] |= {"budget": 10 * GIB, "highest_bytes": 10.1 * GIB}
    arms[8] |= {"distance": {"seconds": 0.01, "peak_bytes": -0.02}, "peak_bytes": 9 * GIB, "highest_bytes": 12 * GIB}
    arms[9] |= {"distance": {"seconds": -0.05, "peak_bytes": 0.01}, "num_layers": 4}
    device = {"name": "H", "reference": False, "driver": "", "torch": "2", "python": "3"}
    origin = {"date": "2026-11-22T10:00:00", "source_digest": "0" * 64, "command": "run", "device": device, "format": 1}
    data = {"parts": {"8k": {**part, "target": 15 * GIB, "arms": arms}}, **origin}
    (tmp_path / "frontier.json").write_text(json.dumps(data), encoding="utf-8")
    page = report.report({"frontier": data})
    stack = "4 layers, 64 tokens"
    assert f"| {stack}, budget of 15.0 GiB: step / no offload | ≤ 1.120 | 1.100 | met |" in page
    assert f"| {stack}: peak / budget, the largest of 3 budgets | ≤ 1.0000 | 1.0100 | missed by 0.0100 |" in page
    assert "| memory_budget | 15.00 |  | 500.0 | 1.100 | +1.0 % | 14.50 | +0.0 % |" in page
    assert "| offload(model) |  |  |" in page
    assert "| 9.00 | -2.0 % |" in page, "the peak of the default, not of the passes that it measures"
    assert "for `num_layers`, `simulate` predicts it" in page
    assert "| num_layers |  | 4 |" in page
    assert f"| {stack}: step time, largest distance from the prediction (4 layers) | ≤ 3.00 % | 5.00 % | missed" in page
    assert f"| {stack}: peak, largest distance from the prediction (offload(model)) | ≤ 3.00 % | 2.00 % | met |" in page
    report.main(["--results", str(tmp_path)])
    assert all((tmp_path / f"frontier-{scheme}.png").stat().st_size > 10_000 for scheme in ("light", "dark"))


def test_parts_of_an_earlier_run_of_the_same_sources_stay(tmp_path: Path) -> None:
    path = results_file.write(tmp_path, "frontier", {"parts": {"8k": {"noise": 0.0}}}, "command")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert run.kept_parts(tmp_path, "frontier") == {"8k": {"noise": 0.0}}
    other = {**data["device"], "name": "another device", "driver": "1.2"}
    path.write_text(json.dumps({**data, "device": other, "date": "2026-11-22T00:00"}), encoding="utf-8")
    kept = run.kept_parts(tmp_path, "frontier")
    results_file.write(tmp_path, "frontier", {"parts": {**kept, "32k": {}}}, "command")
    paragraph = page.origin(json.loads(path.read_text(encoding="utf-8")))
    assert "Part `8k` was measured on another device, driver 1.2, torch" in paragraph
    assert ", 2026-11-22." in paragraph
    assert "Part `32k`" not in paragraph
    path.write_text(json.dumps({**data, "source_digest": "0"}), encoding="utf-8")
    assert run.kept_parts(tmp_path, "frontier") == {}
    assert run.kept_parts(tmp_path / "none", "frontier") == {}


def test_the_command_of_a_result_repeats_all_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_one", lambda *_, **more: {"noise": 0.0})
    for parts in ("32k-compiled,32k", "8k"):
        run.main(["frontier", "--rehearse", "--only", parts, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "frontier.json").read_text(encoding="utf-8"))
    assert list(found["parts"]) == ["8k", "32k", "32k-compiled"]
    assert found["command"].endswith("run.py frontier --only 8k,32k,32k-compiled")


def test_stacks_are_eager_and_compiled() -> None:
    stacks = {name: (of.settings.layers, of.settings.shape[1], of.compiled) for name, of in frontier.PARTS.items()}
    assert stacks == {
        "8k": (16, 8192, False),
        "32k": (4, 32768, False),
        "8k-compiled": (16, 8192, True),
        "32k-compiled": (4, 32768, True),
    }


def test_plans_are_predicted_from_costs() -> None:
    costs, link = [LayerCost.even(1000, forward=1.0, backward=2.0)] * 4, Link(1e9, 1e9)
    found = frontier.predicted(costs, link, 0.0, DefaultSchedule(1, 4).plan())
    assert found["seconds"] == pytest.approx(12.0)


def test_predictions_are_those_of_the_planner() -> None:
    device, x = Timed(d2h=1e9, h2d=1e9, memory=2**40), torch.ones(4, requires_grad=True)
    with use(device):
        model = TimedModel(device, nbytes=2**23)
        handle = actoffload.offload(model)
        assert frontier.measured_costs(handle) is None
        while handle.settling:
            model(x).sum().backward()
        of_plan = frontier.measured_costs(handle)
        assert of_plan is not None
        plan = handle.plan
        assert plan.because.startswith("Fits")
        expected = {"seconds": plan.seconds, "peak_bytes": plan.peak_bytes}
        assert of_plan(plan.plan) == expected
        arm = frontier.Arm("default", lambda: None, handle=handle)
        assert frontier._row(arm, of_plan)["predicted"] == expected
        handle.remove()
        handle = actoffload.offload(model, num_layers=1)
        fewer = frontier._row(frontier.Arm("layers", lambda: None, num_layers=1, handle=handle), of_plan)
        assert fewer["predicted"] == of_plan(handle.plan.plan)
        assert fewer["predicted"]["peak_bytes"] < plan.peak_bytes
        handle.remove()


def test_targets_have_a_limit_for_each_part() -> None:
    assert set(frontier.TARGETS) == set(frontier.PARTS) <= set(report.PAGE["targets"])
    assert all(SimpleNamespace(**report.PAGE["targets"][name]).limit < 1.2 for name in frontier.PARTS)
