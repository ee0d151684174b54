"""Experts that are spread over two ranks: both follow one plan."""

from __future__ import annotations

from pathlib import Path

from expert_ranks import forked, settled


def test_ranks_that_share_experts_settle_and_recompute_together(tmp_path: Path) -> None:
    first, second = forked(tmp_path, 2, settled)
    assert first == second
    assert first["same"]
    assert first["recomputed"]
    assert not first["settling"]
    assert first["steps"] > 3  # those that measure, without a trial
