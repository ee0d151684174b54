"""Copies between each GPU and the host, one GPU alone and all at once: bytes per second in each direction."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE

__all__ = ["record"]

COPIES = 16
"""Copies in a row, so that those of all ranks overlap."""


def record(out: Path, about: dict[str, Any], *, rehearse: bool) -> None:
    """Measure on all ranks and write ``links.json``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nbytes = 2**20 if rehearse else 2**28
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE.type != "cpu")
    pairs = {"d2h": (on_host, on_device), "h2d": (on_device, on_host)}
    found: dict[str, Any] = {"rank": rank}
    for name, (target, source) in pairs.items():
        _rate(target, source, 2)  # to warm up
        for turn in range(ranks):
            _wait_for_all()
            if turn == rank:
                found[f"{name}_alone"] = _rate(target, source, COPIES)
        _wait_for_all()
        found[name] = _rate(target, source, COPIES)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, found)
    if rank == 0:
        written = {**about, "ranks": every}
        (out / "links.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _wait_for_all() -> None:
    dist.barrier()
    _synchronize()


def _rate(target: torch.Tensor, source: torch.Tensor, copies: int) -> float:
    """Return the bytes per second of copies in a row."""
    begun = time.perf_counter()
    for _ in range(copies):
        target.copy_(source, non_blocking=True)
    _synchronize()
    return copies * source.nbytes / (time.perf_counter() - begun)


def _synchronize() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()
