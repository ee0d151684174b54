"""Run a function in several processes of one host, one for each rank, and collect what each returns.

Ranks use NCCL with a GPU each, or gloo on the CPU.  If a rank fails or time is over, all others are ended, because they
may wait for it forever.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LIMIT", "RankError", "run_ranks"]

LIMIT = 2400.0
"""Seconds after which processes are killed: an order of magnitude more than they take on a machine of their own.

Tests that wait for them are marked with a `timeout` that is longer.
"""

# Not this library: the fork server does not have the paths of the tests, and could import another installation.
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]

GRACE = 2.0
"""Seconds that other ranks have to write their own errors after one has failed."""


class RankError(RuntimeError):
    """A rank failed, with its traceback, or did not end in time."""


def run_ranks(function: Callable[..., Any], *arguments: Any, world: int, device: str, limit: float) -> list[Any]:
    """Call a function in `world` processes of a process group; return what each rank returned.

    Parameters
    ----------
    function : callable
        A function of a module's top level, called in each rank as ``function(device, *arguments)`` with a
        `torch.device`; what it returns is written as JSON.
    *arguments : object
        The same for all ranks; they are pickled.
    world : int
        Number of ranks.
    device : str
        ``"cuda"``: NCCL, and rank i has GPU i; ``"cpu"``: gloo, with one thread each.
    limit : float
        Seconds for all of it, start included.

    Raises
    ------
    RankError
        If a rank raises or ends otherwise, or time is over; no process is left then.
    """
    context = multiprocessing.get_context("forkserver")  # importing torch in each takes seconds
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(function, arguments, rank, world, device, limit, name), daemon=True)
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            _watch(processes, folder, time.monotonic() + limit, limit)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def _watch(processes: list[BaseProcess], folder: Path, end: float, limit: float) -> None:
    """Wait for all processes; raise `RankError` when one has failed."""
    running, failed = dict(enumerate(processes)), False
    while running:
        ended = wait([process.sentinel for process in running.values()], timeout=max(0.0, end - time.monotonic()))
        if not ended and not failed:
            raise RankError(
                f"Ranks {', '.join(map(str, running))} of {len(processes)} did not end within {limit:.0f} s."
            )
        for rank, process in list(running.items()):
            if process.sentinel in ended:
                process.join()
                del running[rank]
                if process.exitcode != 0 and not failed:
                    failed, end = True, time.monotonic() + GRACE
        if not ended:
            break
    if failed:
        raise RankError(_cause(processes, folder))


def _cause(processes: list[BaseProcess], folder: Path) -> str:
    """Return what went wrong first; errors of other ranks mostly follow from it."""
    errors = []
    for rank, process in enumerate(processes):
        path = folder / f"{rank}.error"
        if path.is_file():
            when, _, text = path.read_text(encoding="utf-8").partition("\n")
            errors.append((float(when), rank, text))
        elif process.exitcode:
            return f"Rank {rank} ended with exit status {process.exitcode} and no error."
    _, first, text = min(errors)
    return f"Rank {first} failed:\n{text}"


def _rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world: int,
    device: str,
    limit: float,
    folder: str,
) -> None:
    """Run the function as one rank and write its result or its error."""
    try:
        result = _in_group(function, arguments, rank, world, device, limit, Path(folder))
        _write(Path(folder) / f"{rank}.json", json.dumps(result))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of PyTorch that still run may abort a process that ends (seen once, torch 2.13 with gloo)
    except BaseException:
        _write(Path(folder) / f"{rank}.error", f"{time.time()}\n{traceback.format_exc()}")
        os._exit(1)  # without the end of the process group, which may wait for other ranks


def _write(path: Path, text: str) -> None:
    """Write a file that is either absent or complete."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _in_group(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world: int,
    device: str,
    limit: float,
    folder: Path,
) -> Any:
    """Call the function between the start and the end of the process group."""
    # What launchers set, and what code of a rank may read.
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    place = torch.device(device, rank if device == "cuda" else None)
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit),
        device_id=place if device == "cuda" else None,
    )
    result = function(place, *arguments)
    dist.barrier()  # a rank that ends early would close connections that others use
    dist.destroy_process_group()
    return result
