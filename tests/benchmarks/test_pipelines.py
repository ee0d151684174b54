"""The benchmark of pipelines at rehearsal sizes with one rank, and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

import pipelines  # noqa: E402 - lies in benchmarks, as the next ones
import pipelines_page  # noqa: E402
import processes  # noqa: E402
import run  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiny(name: str) -> pipelines.Part:
    """Return a part with one rank of two stages."""
    part = replace(pipelines.SMALL_PARTS[name], world=1, data=1, microbatches=3)
    return replace(part, settings=replace(part.settings, shape=(1, 16, 32)))


@pytest.fixture(scope="module", params=["zero-bubble", "mixture"])
def part(request: pytest.FixtureRequest, alone: None) -> dict[str, Any]:
    chosen = tiny(request.param)
    mine = pipelines._arms(pipelines.Pipeline(chosen, CPU))
    found: dict[str, Any] = json.loads(json.dumps(pipelines._result(chosen, [mine])))
    return found


def test_all_phases_are_measured(part: dict[str, Any]) -> None:
    methods = ["no offload", "actoffload", "no offload, again", "budget", "no offload, again"]
    arms = part["arms"]
    assert [arm["method"] for arm in arms] == [*(["waiting"] if part["mixture"] else []), *methods]
    none, free, again, budget, last = arms[-5:]
    peaks = [arm["ranks"][0]["peak_bytes"] for arm in (none, again, last)]
    assert peaks == peaks[:1] * 3
    for arm in (free, budget):
        (row,) = arm["ranks"]
        assert row["peak_without"] == peaks[0]
        assert row["drop_bytes"] == row["peak_without"] - row["peak_bytes"]
        assert row["on_demand"] == 0
        assert row["r"] == row["drop_bytes"] / row["predicted"]["drop_bytes"] > 0.5
    assert budget["budget"] == int(pipelines.SHARE * peaks[0])
    assert free["baseline_seconds"] == (none["seconds"] + again["seconds"]) / 2
    assert free["ratio"] == free["seconds"] / free["baseline_seconds"]


def test_the_page_has_a_row_for_each_phase_and_each_rank(part: dict[str, Any]) -> None:
    device = {"name": "some GPU", "reference": False, "driver": "1", "torch": "2", "python": "3"}
    data = {"parts": {"some": part}, "device": device, "date": "2026-01-01", "source_digest": "abc", "command": "run"}
    words = "\n".join(pipelines_page.pipelines_sections(data))
    assert words.count("| no offload, again |") == 2
    assert words.count("| memory_budget | 0 |") == 1
    targets = pipelines_page.pipelines_targets(data)
    free = part["arms"][-4]
    assert targets[0]["measured"] == f"{free['ratio']:.3f}"
    assert targets[1]["measured"] == f"{free['ranks'][0]['r'] * 100:.2f} %"
    free["seconds"] = 1.2 * free["ranks"][0]["predicted"]["seconds"]
    words = "\n".join(pipelines_page.pipelines_sections(data))
    assert "A step with offload(schedule) takes 20 % longer than simulated." in words


def test_parts_of_four_ranks_need_four_devices() -> None:
    assert {pipelines.PARTS[name].world for name in pipelines.available(2)} == {2}
    assert set(pipelines.available(4)) == set(pipelines.PARTS)
    with pytest.raises(SystemExit):
        run.main(["pipelines", "--only", "nothing"])


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(_: Any, part: pipelines.Part, *, world: int, device: str, limit: float) -> list[Any]:
        if part.schedule == "ScheduleInterleavedZeroBubble":
            raise processes.RankError("Ranks 0, 2 of 4 did not end in time.")
        return [[["no offload", {"seconds": [2.0, 1.0, 3.0], "peaks": [5, 7]}]]] * world

    monkeypatch.setattr(pipelines, "run_ranks", ranks)
    found = {}
    names = ["1f1b", "zero-bubble-4", "mixture-4"]
    with pytest.raises(processes.RankError, match="Not measured: zero-bubble-4;"):
        pipelines.measure_parts(names, CPU, rehearse=True, done=found.__setitem__)
    assert {name: len(of["arms"][0]["ranks"]) for name, of in found.items()} == {"1f1b": 2, "mixture-4": 4}
