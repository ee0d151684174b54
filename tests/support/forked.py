"""Run a function in several processes that are forked from one that has imported torch: an import takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["run_forked"]

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


def run_forked(main: Callable[..., None], world: int, folder: Path, *arguments: Any, limit: float = LIMIT) -> None:
    """Call ``main(rank, *arguments)`` in a process for each rank.

    Each process writes its output to ``RANK.log``.  A process that has not ended after the limit is killed, and its log
    ends with a line that says so.

    Parameters
    ----------
    main : callable
        A function of a module.
    world : int
        Number of ranks.
    folder : path
        Where the logs are written.
    *arguments
        What `main` gets after the rank.
    limit : float
        Seconds of wall clock, for all processes together.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    end = time.monotonic() + limit
    processes = [
        context.Process(target=_logged, args=(folder / f"{rank}.log", main, rank, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for rank, process in enumerate(processes):
            if process.is_alive():
                with (folder / f"{rank}.log").open("a") as log:
                    log.write(f"\nRank {rank} timed out: it has not ended after {limit:.0f} s.\n")
            process.kill()
            process.join()


def _logged(log: Path, main: Callable[..., None], *arguments: Any) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    main(*arguments)
