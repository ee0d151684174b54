"""The benchmarks of other tools and of overlap at tiny sizes, and their part of the page."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

import headline  # noqa: E402 - lies in benchmarks, as the next ones
import overlap  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
from frontier import Part  # noqa: E402
from results_file import read, write  # noqa: E402
from workloads import REHEARSAL  # noqa: E402

from actoffload.schedule import LayerCost, Link, Saved  # noqa: E402

CPU = torch.device("cpu")
SMALL = {"shape": (1, 640, 64), "intermediate": 448, "min_bytes": 1024, "counts": (1,), "dtype": "float32"}
TINY = Part(replace(peers.SMALL_PARTS.settings, layers=3, **SMALL), False)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Measure with stand-ins for two packages: one works, one fails on this stack; a third one is not installed."""
    assert find_spec("torchtune") is None
    patch = pytest.MonkeyPatch()
    trl, engine = ModuleType("trl.models.activation_offloading"), ModuleType("transformer_engine.pytorch")
    trl.OffloadActivations = torch.autograd.graph.save_on_cpu
    engine.get_cpu_offload_context = lambda **how: (_ for _ in ()).throw(ValueError("no  such\nlayer"))
    for name in ("trl", "trl.models", "transformer_engine"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, trl.__name__, trl)
    patch.setitem(sys.modules, engine.__name__, engine)
    yield peers.measure_peers(TINY, CPU, repeats=1)
    patch.undo()


def test_tools_that_are_here_are_measured_and_the_others_are_named(measured: dict[str, Any]) -> None:
    methods = [arm["method"] for arm in measured["arms"]]
    own = ["get_cpu_offload_context", "actoffload", "actoffload"]
    assert methods == ["no offload", "no offload, again", "checkpoint", "selective", "save_on_cpu", "TRL", *own]
    assert measured["left_out"].keys() == {"torchtune", "Transformer Engine"}
    assert measured["left_out"]["Transformer Engine"] == "no such layer"
    assert measured["left_out"]["torchtune"] == "it is not installed where this was measured"
    by_method = {arm["method"]: arm for arm in measured["arms"]}
    assert by_method["get_cpu_offload_context"]["num_layers"] == 1
    assert by_method["get_cpu_offload_context"]["peak_bytes"] < by_method["no offload"]["peak_bytes"]
    assert measured["arms"][-1]["budget"] == round(peers.ABOVE * by_method["checkpoint"]["peak_bytes"])


def test_page_of_other_tools(measured: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "peers", {**measured, "versions": {"TRL": "0.25.0"}}, "python benchmarks/run.py peers")
    page = report.readers_page({"peers": read(tmp_path, "peers")})
    assert "## Other tools" in page
    assert "| TRL: OffloadActivations (0.25.0) |" in page
    assert "| actoffload: offload(model, memory_budget) |" in page
    assert "Transformer Engine: get_cpu_offload_context is left out: no such layer." in page
    assert "**Rehearsal on the reference device; no GPU figures.**" in page


def test_headline_has_the_default_call_and_the_budget_beside_checkpointing(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, "peers", measured, "python benchmarks/run.py peers")
    assert headline.headline(tmp_path) == "No GPU results are recorded yet."
    data = json.loads(path.read_text(encoding="utf-8"))
    data["device"]["reference"] = False
    arms = {(arm["method"], arm["budget"] is not None): arm for arm in data["arms"]}
    none, checkpoint, default, budget = (
        arms[of] for of in (("no offload", False), ("checkpoint", False), ("actoffload", False), ("actoffload", True))
    )
    none["peak_bytes"] = default["peak_bytes"] = 30 * 2**30
    checkpoint["peak_bytes"], budget["budget"], budget["peak_bytes"] = 10 * 2**30, 11 * 2**30, 10.9 * 2**30
    default["ratio"], budget["ratio"] = 1.002, 1.05
    path.write_text(json.dumps(data), encoding="utf-8")
    found = headline.headline(tmp_path)
    assert "| offload(model) |  |  | 1.002 | 30.0 |\n| offload(model, memory_budget) |  |  | 1.050 | 10.9 |" in found
    assert "Everything fits, so `offload(model)` does nothing." in found
    assert "The budgets are 10 % above the peaks of activation checkpointing." in found


def test_targets_are_on_the_page_for_developers() -> None:
    results = report.load(report.RESULTS)
    readers, developers = report.readers_page(results), report.developers_page(results)
    assert "## Targets" not in readers
    assert "## Time against peak" in readers
    assert "## Targets" in developers
    assert "## Host time" in developers


def test_recorded_steps_of_overlap() -> None:
    settings = replace(REHEARSAL["gpt"], layers=overlap.LAYERS)
    data = overlap.measure_overlap(settings, CPU, recordings=1)
    assert data["runs"].keys() == {"2", "3"}
    assert {span[0] for span in data["runs"]["3"]["spans"]} >= {"FORWARD", "BACKWARD", "D2H", "H2D"}
    assert len({span[1] for span in data["runs"]["2"]["spans"] if span[0] == "D2H"}) == 2
    cost = data["costs"][0]
    saved = tuple(Saved(**each) for each in cost["saved"])
    assert LayerCost(cost["forward"], cost["backward"], saved).nbytes > 0
    assert Link(**data["link"]).d2h > 0
