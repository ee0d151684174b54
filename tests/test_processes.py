"""Functions in several processes: errors with their traceback, and an end in time."""

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch.multiprocessing import ProcessRaisedException


def failing(device: torch.device, how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("rank one cannot")
        time.sleep(60)


@pytest.mark.parametrize(
    ("how", "limit", "error", "message"),
    [
        ("raises", 60, ProcessRaisedException, "(?s)Process 1 .*rank one cannot"),
        ("sleeps", 1, TimeoutError, "The 2 ranks did not end within 1 s"),
    ],
)
def test_one_rank_that_fails_ends_all(how: str, limit: float, error: type[Exception], message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=message):
        run_ranks(failing, how, world=2, device="cpu", limit=limit)
    assert time.monotonic() - begun < 50
    assert multiprocessing.active_children() == []
