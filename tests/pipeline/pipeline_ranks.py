"""One rank of a pipeline: runs cases and writes what it saw to a file."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_forked
from pipeline_programs import Block, compare, make, offloaded, train
from torch import nn

__all__ = ["BAD", "run_ranks"]


class Nothing(nn.Module):
    """A stage that computes without any module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def fails(arguments: dict[str, Any], *, empty: bool = False) -> dict[str, Any]:
    """Return the error of the first step, and whether the next one runs without offload."""
    rank = dist.get_rank()
    module = (lambda stage: Nothing()) if empty and rank else (lambda stage: nn.Sequential(Block(), Block(), Block()))
    schedule, modules = make("Schedule1F1B", 4, module=module)
    handle = offloaded(schedule, **arguments)
    try:
        train(schedule, modules, 1)
    except ValueError as error:
        train(schedule, modules, 1)
        return {"message": str(error), "installed": handle.installed, "followed": type(modules[0]).__name__}
    return {"message": ""}


def different() -> dict[str, Any]:
    return fails({"fraction": 0.5 if dist.get_rank() else None})


def without_layers() -> dict[str, Any]:
    return fails({}, empty=True)


BAD = {"different arguments": different, "a stage without layers": without_layers}


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", message="No accelerator found")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    for k, name in enumerate(names):
        try:
            found = BAD[name]() if name in BAD else compare(name, microbatches=8 if world > 2 else 4, steps=2)
        except BaseException:
            found = {"error": traceback.format_exc()}
        (folder / f"{k}-{rank}.json").write_text(json.dumps(found))
        if "error" in found:  # the others may wait for this rank now
            break
    dist.destroy_process_group()


def run_ranks(folder: Path, world: int, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run cases in processes of their own; return what each rank saw of each case, or why not."""
    run_forked(main, world, folder, world, folder, names, limit=200)

    def read(k: int, rank: int) -> dict[str, Any]:
        path = folder / f"{k}-{rank}.json"
        if not path.exists():
            return {"error": f"rank {rank} did not come to it:\n{(folder / f'{rank}.log').read_text()[-2000:]}"}
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    return {name: [read(k, rank) for rank in range(world)] for k, name in enumerate(names)}
