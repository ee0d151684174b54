"""Functions in several processes: results, errors with their traceback, and an end in time."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankError, _cause, run_ranks


def summed(device: torch.device, offset: int) -> dict[str, float]:
    mine = torch.tensor([float(dist.get_rank() + offset)], device=device)
    dist.all_reduce(mine)
    return {"rank": dist.get_rank(), "sum": mine.item()}


def failing(device: torch.device, how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("rank one cannot")
        time.sleep(60)
    dist.barrier()


def test_each_rank_returns_its_result() -> None:
    assert run_ranks(summed, 10, world=2, device="cpu", limit=60) == [{"rank": 0, "sum": 21}, {"rank": 1, "sum": 21}]


@pytest.mark.parametrize(
    ("how", "limit", "message"),
    [
        ("raises", 60, "(?s)Rank 1 failed:.*rank one cannot"),
        ("sleeps", 1, "Ranks 0, 1 of 2 did not end within 1 s"),
    ],
)
def test_one_rank_that_fails_ends_all(how: str, limit: float, message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(failing, how, world=2, device="cpu", limit=limit)
    assert time.monotonic() - begun < 50
    assert multiprocessing.active_children() == []


def test_what_went_wrong_first(tmp_path: Path) -> None:
    processes: list[Any] = [SimpleNamespace(exitcode=code) for code in (1, 1, 0)]
    (tmp_path / "0.error").write_text("5.0\nconnection closed")
    (tmp_path / "1.error").write_text("4.5\nout of memory")
    assert _cause(processes, tmp_path) == "Rank 1 failed:\nout of memory"
    processes.append(SimpleNamespace(exitcode=-9))  # ended by the system: it wrote no error
    assert _cause(processes, tmp_path) == "Rank 3 ended with exit status -9 and no error."
