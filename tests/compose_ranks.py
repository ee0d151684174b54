"""One rank of the tests with several processes: runs cases by name, and writes what they saw to a file.

Called as ``compose_ranks.py RANK WORLD FOLDER CASE...`` by `test_compose_distributed` and its sibling for GPUs.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composing import BLOCKS, WIDTH, Net, Offload, both, gradients, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from actoffload import Reason

CASES: dict[str, Callable[[], Any]] = {}


def case(program):
    CASES[program.__name__] = program
    return program


@case
def ddp(offload):
    model = DistributedDataParallel(Net())
    offload(model)
    return train(model)


@case
def ddp_inner(offload):
    net = Net()
    offload(net)
    model = DistributedDataParallel(net)
    return train(model)


@case
def ddp_unused(offload):
    class Skip(Net):
        def __init__(self):
            super().__init__()
            self.k = 0

        def forward(self, x):
            self.k += 1
            x = self.inp(x)
            for i, b in enumerate(self.blocks):
                if i != self.k % 3:
                    x = b(x)
            return self.head(x)

    model = DistributedDataParallel(Skip(), find_unused_parameters=True)
    offload(model)
    return train(model)


@case
def ddp_static(offload):
    model = DistributedDataParallel(Net(), static_graph=True)
    offload(model)
    return train(model)


@case
def ddp_nosync(offload):
    from composing import batch

    model = DistributedDataParallel(Net())
    offload(model)
    with model.no_sync():
        model(batch(0)).square().sum().backward()
    model(batch(1)).square().sum().backward()
    return gradients(model)


def shard(before=True, frozen=False, **k):
    def prog(offload):
        net = Net()
        if frozen:
            for b in net.blocks:
                b.up.requires_grad_(False)
        if before:
            offload(net)
        for b in net.blocks:
            fully_shard(b, **k)
        fully_shard(net, **k)
        if not before:
            offload(net)
        return [getattr(t, "_local_tensor", t) for t in train(net)]

    return prog


for b in (True, False):
    CASES[f"fsdp {b}"] = shard(b)
    CASES[f"fsdp {b} zero2"] = shard(b, reshard_after_forward=False)
    CASES[f"fsdp {b} bf16"] = shard(b, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    CASES[f"fsdp {b} frozen"] = shard(b, frozen=True)


def main(rank, world, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    import time

    for n, c in CASES.items():
        t = time.time()
        try:
            h = both(c)
            s = h.statistics()
            if rank == 0:
                print(
                    n,
                    s.bytes_offloaded,
                    s.tensors_offloaded,
                    s.reloaded_ahead,
                    s.reloaded_on_demand,
                    {r.name: (v, s.bytes_kept[r]) for r, v in s.tensors_kept.items()},
                    f"{time.time() - t:.2f}",
                )
        except Exception:
            if rank == 0:
                print(n)
                traceback.print_exc()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
