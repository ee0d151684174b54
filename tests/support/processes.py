"""Run a function in several processes of one host, one for each rank, and collect what each returns.

Ranks use NCCL with a GPU each, or gloo on the CPU.  If a rank fails or time is over, all others are ended, because they
may wait for it forever.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

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
    "transformers.models.llama.modeling_llama",  # where it is installed
    "pytest",
]


def run_ranks(
    function: Callable[..., Any], *arguments: Any, world: int, device: str, limit: float = LIMIT
) -> list[Any]:
    """Call a function in `world` processes of a process group; return what each rank returned.

    The function is one of a module's top level, called as ``function(device, *arguments)``; it returns what JSON can
    hold.  With ``"cuda"`` rank i has GPU i and NCCL, with ``"cpu"`` one thread and gloo.  If a rank fails, or is not
    done after `limit` seconds, its error or a `TimeoutError` is raised, and no process is left.
    """
    server = multiprocessing.get_context("forkserver")  # importing torch in each takes seconds
    server.set_forkserver_preload(IMPORTED)
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        given = function, arguments, world, device, limit, folder
        ranks = start_processes(_rank, given, world, join=False, daemon=True, start_method="forkserver")
        try:
            while not ranks.join(max(0.0, end - time.monotonic()), grace_period=2.0):
                if time.monotonic() > end:
                    raise TimeoutError(f"The {world} ranks did not end within {limit:.0f} s.")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def _rank(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    world: int,
    device: str,
    limit: float,
    folder: str,
) -> None:
    """Call the function between the start and the end of the process group; write its result."""
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
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit),
        device_id=place if device == "cuda" else None,
    )
    result = function(place, *arguments)
    dist.barrier()  # a rank that ends early would close connections that others use
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of PyTorch that still run may abort a process that ends (seen once, torch 2.13 with gloo)
