"""The benchmark of several GPUs with two processes on the CPU, and its part of the page."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

import collectives  # noqa: E402 - lies in benchmarks, as the next ones
import parallelism  # noqa: E402
import report  # noqa: E402
from parallelism import COLLECTIVES, FSDP, SMALL  # noqa: E402
from processes import run_ranks  # noqa: E402

from actoffload.device import ReferenceDevice, use  # noqa: E402

GIB = 2**30
TINY = replace(
    SMALL,
    llama=replace(SMALL.blocks, layers=3, shape=(1, 32, 64)),  # without transformers, which is slow to import
    counts={FSDP: (1,)},
    repeats={FSDP: 1},
    collectives={"nbytes": 4096, "times": 1, "copied": 4096, "copies": 1, "repeats": 1},
)


def measured(device: torch.device) -> dict[str, Any]:
    """Measure two parts as one rank; in a function of this module, because processes are slow to start."""
    return {part: parallelism._measure_rank(device, part, TINY) for part in (FSDP, COLLECTIVES)}


def test_two_ranks_measure_every_way_to_run_a_step() -> None:
    ranks = run_ranks(measured, world=2, device="cpu", limit=200)
    rows = parallelism._merged([rank[FSDP] for rank in ranks])
    methods = ["no offload", "no offload, again", "num_layers", "default", "paused", "checkpoint"]
    assert [row["method"] for row in rows] == [*methods, "budget", "budget"]
    none, again, one, default, paused, checkpointed, budget, larger = rows
    # Once, on a machine under load, one of the ranks took 1.2 times as much; the cause was not found.
    assert min(none["peak_bytes"]) == min(again["peak_bytes"])
    assert none["peak_bytes"] == pytest.approx(again["peak_bytes"], rel=0.25)
    assert "bytes_offloaded" not in paused
    peak = max(checkpointed["peak_bytes"])
    assert peak <= budget["budget"] < peak + 2**12 < min(none["peak_bytes"])
    assert larger["budget"] == pytest.approx(1.03 * peak, abs=2**12)
    for row in (one, default, budget, larger):
        assert all(nbytes > 0 for nbytes in row["bytes_offloaded"])
        assert len(row["peak_bytes"]) == len(row["stall_seconds"]) == 2
    for row, *each in zip(rows, *(rank[FSDP]["rows"] for rank in ranks), strict=True):
        assert row["samples"] == [max(of["samples"][0] for of in each)]
    found = parallelism._merged([rank[COLLECTIVES] for rank in ranks])
    assert [(row["collective"], row["beside"]) for row in found] == [
        (name, beside)
        for name in ("all-gather", "reduce-scatter")
        for beside in ("alone", "alone, again", "D2H", "H2D", "D2H and H2D")
    ]
    assert all(row["seconds"] > 0 for row in found)


class Noted(ReferenceDevice):
    """Notes copies and events."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def to_host(self, pairs: Any, stream: Any) -> None:
        self.calls.append("copy")

    def record_timed(self, stream: Any) -> Any:
        self.calls.append("event")
        return super().record_timed(stream)


def test_ranks_begin_collectives_together_while_copies_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(collectives.dist, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(collectives, "_collectives", lambda *_: {"sum": lambda: calls.append("sum")})
    monkeypatch.setattr(collectives, "BESIDE", {"D2H": ("d2h",)})
    device = torch.device("cpu")
    monkeypatch.setattr(Noted, "elapsed", lambda *_: 1.0)
    with use(Noted(calls)):
        rows = collectives.measure_collectives(device, nbytes=8, times=2, copied=8, copies=3, repeats=1)
    assert [row["covered"] for row in rows] == [[], [], [1.0]]
    samples = " ".join(calls).split("barrier ")[1:]
    beside = [each.split() for each in samples if "copy" in each]
    assert beside == [["copy", "copy", "copy", "event", "sum", "event", "sum", "sum", "event"]] * 2


def test_ratios_refer_to_both_arms_without_offload() -> None:
    rows: list[dict[str, Any]] = [{"seconds": 0.9}, {"seconds": 1.1}, {"seconds": 1.5, "extra": 0.25}]
    assert parallelism._ratios(rows) == pytest.approx(0.2)
    assert [row["ratio"] for row in rows] == pytest.approx([0.9, 1.1, 1.5])
    assert rows[2]["predicted"] == pytest.approx(1.25)


def arm(method: str, ratio: float, gib: tuple[float, float] = (20, 20), **more: Any) -> dict[str, Any]:
    row = {"method": method, "num_layers": None, "budget": None, "seconds": ratio / 2, "ratio": ratio}
    return {**row, "samples": [ratio / 2], "peak_bytes": [of * GIB for of in gib], "plan": f"plan of {method}", **more}


def test_page() -> None:
    moved = {"bytes_offloaded": [3 * GIB, 3 * GIB], "stall_seconds": [0.001, 0.0], "predicted": 1.002}
    rows = [
        arm("no offload", 1.0),
        arm("no offload, again", 1.0),
        arm("num_layers", 1.005, (17.25, 17.5), num_layers=2, **moved),
        arm("num_layers", 1.2, num_layers=3, **moved),
        arm("default", 1.03, **moved),
        arm("checkpoint", 1.25, (6, 6)),
        arm("budget", 1.1, (6, 6), budget=6 * GIB, **moved),
        arm("budget", 1.15, (6, 6), budget=6.25 * GIB, **moved),
    ]
    settings = {"layers": 12, "shape": [1, 8192, 4096], "dtype": "bfloat16"}
    part = {"world": 2, "settings": settings, "link": {"d2h": 38e9, "h2d": 45e9}, "noise": 0.001, "rows": rows}
    beside = [("alone", 1.0, None), ("alone, again", 1.0, None), ("D2H", 1.01, 1.0), ("H2D", 1.04, 1.0)]
    collectives = {
        "world": 2,
        "noise": 0.0,
        "sizes": {"nbytes": 416 * 2**20, "times": 20},
        "rows": [
            {"collective": "all-gather", "beside": name, "ratio": ratio, "seconds": ratio / 1e3, "covered": covered}
            for name, ratio, covered in beside
        ],
    }
    device = {"name": "H", "reference": False, "driver": "", "torch": "2", "python": "3"}
    origin = {"date": "2026-11-22T10:00:00", "source_digest": "0" * 64, "command": "run", "device": device, "format": 1}
    page = report.report({"parallelism": {"parts": {"fsdp": part, "collectives": collectives}, **origin}})
    stack = "FSDP2, 12 layers on 2 GPUs"
    assert f"| {stack}, 2 layers offloaded: step / no offload | ≤ 1.010 | 1.005 | met |" in page
    assert f"| {stack}, `offload(model)`: step / no offload | ≤ 1.010 | 1.030 | missed by 0.020 |" in page
    added = "time added / added by activation checkpointing"
    assert f"| {stack}, budget of 6.00 GiB: {added} | ≤ 0.50 | 0.40 | met |" in page
    assert f"| {stack}, budget of 6.25 GiB: {added} | ≤ 0.50 | 0.60 | missed by 0.10 |" in page
    assert "| offload(model, memory_budget) of 6.25 GiB |" in page
    assert "all-gather of one FSDP2 layer beside H2D: time / time alone, the largest | ≤ 1.020 | 1.040" in page
    assert "| num_layers | 2 | 502.5 | 1.005 | 1.002 | 17.25, 17.50 | 3.00 | 1.0, 0.0 |" in page
    assert "| activation checkpointing |  | 625.0 | 1.250 |  | 6.00 |  |  |" in page
    assert "| all-gather | H2D | 1.04 | 1.040 | 100 % |" in page
    assert "| all-gather | alone | 1.00 | 1.000 |  |" in page
    assert "plan of budget" in page
    assert "plan of num_layers" not in page
    assert page.count("layers offloaded by number a step takes longer than predicted.") == 1
    assert "With 3 layers offloaded by number" in page
    assert "Collectives that run alone take at most 4.0 % longer beside copies" in page


def test_the_page_builds_without_a_result() -> None:
    assert "Several GPUs" not in report.report({})
