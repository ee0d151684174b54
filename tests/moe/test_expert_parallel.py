"""Experts that are spread over two ranks: both follow one plan."""

from __future__ import annotations

from expert_ranks import settled
from processes import run_ranks


def test_ranks_that_share_experts_settle_and_recompute_together() -> None:
    first, second = run_ranks(settled, world=2, device="cpu", limit=120)
    assert first == second
    assert first["same"]
    assert first["recomputed"]
    assert not first["settling"]
    assert first["steps"] > 3  # those that measure, without a trial
