"""Stages with mixtures of experts: two dispatchers, experts that are spread over two ranks, and pipelines of these."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks")]

import mixtures  # noqa: E402 - lies in benchmarks, as the next one
import pipelines  # noqa: E402
from mixture_ranks import forked, settled, spread  # noqa: E402


def test_both_dispatchers_have_the_same_bits() -> None:
    torch.manual_seed(0)
    stage = mixtures.MixtureSettings(2, (2, 32, 16), "float32", 2, 24, 4).stage()
    x = torch.randn(2, 32, 16, requires_grad=True)
    found = []
    for waits in (True, False):
        mixtures.set_waits([stage], waits=waits)
        stage.zero_grad()
        y = stage(x)
        y.square().mean().backward()
        found.append([y, *(weight.grad for weight in stage.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
def test_experts_of_two_ranks_compute_what_one_rank_does(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """In float32 by grouped_mm, in float64 by a loop over the experts."""
    for seen in forked(tmp_path, 2, spread, dtype):
        assert seen["same"]
        assert len(seen["distances"]) == 2 * (2 + 2 * 7)
        assert max(seen["distances"].values()) < tolerance, seen["distances"]


def test_ranks_that_share_experts_settle_and_recompute_together(tmp_path: Path) -> None:
    first, second = forked(tmp_path, 2, settled)
    assert first == second
    assert first["same"]
    assert first["recomputed"]
    assert not first["settling"]
    assert first["steps"] > 3  # those that measure, without a trial


def test_two_pipelines_of_two_ranks(tmp_path: Path) -> None:
    small = pipelines.SMALL_PARTS["mixture-4"]
    part = replace(small, microbatches=2, settings=replace(small.settings, shape=(1, 16, 16), ffn=24))
    found = pipelines._result(part, forked(tmp_path, 4, pipelines._measured, part))
    assert (found["world"], found["data"]) == (4, 2)
    for arm in found["arms"]:
        if arm["method"] in ("actoffload", "budget"):
            rows = arm["ranks"]
            assert [row["on_demand"] for row in rows] == [0] * 4
            assert all(row["r"] > 0.5 for row in rows)
            # The ranks of a pair have one plan, those of a pipeline two.
            plans = [row["plan"] for row in rows]
            assert plans[0] == plans[1] != plans[2] == plans[3]
