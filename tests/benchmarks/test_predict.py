"""The benchmark of predictions at rehearsal sizes, and its part of the page."""

from __future__ import annotations

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

import predict  # noqa: E402 - lies in benchmarks, as the next one
import report  # noqa: E402
from timed_device import Timed, TimedModel  # noqa: E402 - lies in tests/model

import actoffload  # noqa: E402
from actoffload.device import use  # noqa: E402
from actoffload.schedule import DefaultSchedule, LayerCost, Link  # noqa: E402

CPU = torch.device("cpu")
GIB = 2**30
SMALL = predict.SMALL_PARTS["8k"].settings
TINY = predict.Part(replace(SMALL, shape=(1, 64, 64), intermediate=128, min_bytes=1024, counts=(1, 2)), False)


def test_parts_are_eager_and_compiled() -> None:
    assert {name: (part.settings.layers, part.settings.tokens, part.compiled) for name, part in named().items()} == {
        "8k": (16, 8192, False),
        "32k": (4, 32768, False),
        "8k-compiled": (16, 8192, True),
        "32k-compiled": (4, 32768, True),
    }


def named() -> dict[str, Any]:
    found = {}
    for name, part in predict.PARTS.items():
        settings = SimpleNamespace(layers=part.settings.layers, tokens=part.settings.shape[1])
        found[name] = SimpleNamespace(settings=settings, compiled=part.compiled)
    return found


def test_plans_are_measured_without_offload_first() -> None:
    part = predict.measure_part(TINY, CPU)
    assert [row["plan"] for row in part["plans"]] == ["none", "default", 2, 1]
    none, default, two, one = part["plans"]
    # Ratios refer to the mean of the two arms without offload, so each is half of their difference away from it.
    assert abs(none["ratio"] - 1.0) == pytest.approx(none["noise"] / 2)
    assert none["noise"] <= part["noise"]
    assert none["peak_bytes"] > one["peak_bytes"] > two["peak_bytes"]
    assert "text" in default
    # Nothing is measured on the reference device, so nothing is predicted.
    assert all(not row["distance"] for row in part["plans"])
    assert report.targets({"predict": {"parts": {"8k": part}}}) == []


def test_plans_are_predicted_from_costs() -> None:
    costs, link = [LayerCost.even(1000, forward=1.0, backward=2.0)] * 4, Link(1e9, 1e9)
    found = predict.predicted(costs, link, 0.0, DefaultSchedule(1, 4).plan())
    assert found["seconds"] == pytest.approx(12.0)


@pytest.mark.parametrize("memory", [None, 2**40])
def test_predictions_are_those_of_the_planner(memory: int | None) -> None:
    device, x = Timed(d2h=1e9, h2d=1e9, memory=memory), torch.ones(4, requires_grad=True)
    with use(device):
        model = TimedModel(device, nbytes=2**23)
        handle = actoffload.offload(model)
        assert predict.measured_costs(handle) is None
        while handle.settling:
            model(x).sum().backward()
        of_plan = predict.measured_costs(handle)
        assert of_plan is not None
        plan = handle.plan
        assert len(plan.offloaded) >= 4
        assert of_plan(plan.plan) == {"seconds": plan.seconds, "peak_bytes": plan.peak_bytes}
        handle.reschedule(num_layers=1)
        assert of_plan(handle.plan.plan)["peak_bytes"] > plan.peak_bytes
        handle.remove()


def test_page_has_the_worst_plan_of_each_stack() -> None:
    rows: list[dict[str, Any]] = [{"plan": "none", "seconds": 0.2, "ratio": 1.0, "peak_bytes": 30 * GIB}]
    for plan, seconds, peak in (("default", 0.01, -0.02), (4, -0.05, 0.01)):
        row = {"plan": plan, "seconds": 0.2, "ratio": 1.0, "peak_bytes": 20 * GIB}
        row["predicted"] = {"seconds": 0.2 * (1 + seconds), "peak_bytes": 20 * GIB * (1 + peak)}
        rows.append({**row, "distance": {"seconds": seconds, "peak_bytes": peak}})
    rows[1]["clock"] = 1.5e9
    part = {"settings": {"layers": 16, "tokens": 8192}, "compiled": True, "noise": 0.012, "plans": rows}
    device = {"name": "H", "reference": False, "driver": "", "torch": "2", "python": "3"}
    origin = {"date": "2026-11-22T10:00:00", "source_digest": "0" * 64, "command": "run", "device": device}
    page = report.report({"predict": {"parts": {"8k-compiled": part}, **origin}})
    stack = "16 compiled layers, 8192 tokens"
    assert f"| {stack}: step time, largest distance from the prediction (4 layers) | ≤ 3.00 % | 5.00 % | missed" in page
    assert f"| {stack}: peak, largest distance from the prediction (default) | ≤ 3.00 % | 2.00 % | met |" in page
    assert f"| {stack} | 4 layers | 200.0 | 200.0 | 1.000 | 190.0 | -5.0 % | 20.00 | 20.20 | +1.0 % |  |" in page
    assert f"| {stack} | default | 200.0 | 200.0 | 1.000 | 202.0 | +1.0 % | 20.00 | 19.60 | -2.0 % | 1500 |" in page
    assert "differ by at most 1.2 %" in page
    assert f"| {stack} | no offload | 200.0 | 200.0 | 1.000 |  |  | 30.00 |  |  |  |" in page
