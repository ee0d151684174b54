"""Compatibility of `actoffload.offload` with other parts of PyTorch on a GPU: equal bits, and bytes are offloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compose_harness import STEPS, Stack, offloaded, train
from compose_ranks import run_ranks
from composing import OFFLOADED, Offload, gradients
from gpu_harness import CUDA, DEVICE, ROWS, WIDTH, lenient, make_input
from torch import Tensor

from actoffload.report import Reason

pytestmark = [pytest.mark.gpu, *lenient]


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_blocks(dynamic: bool) -> None:
    if not (CUDA and (shutil.which("gcc") or shutil.which("cc"))):
        pytest.skip("inductor needs CUDA, and a C compiler for what starts its kernels")

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = Stack("mlp")
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=dynamic)
        offload(model)
        results = train(model)
        if dynamic:
            model(make_input(model, 7, rows=ROWS // 2)).square().mean().backward()
            results += gradients(model)
        return results

    offloaded(program)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("half", [False, True])
def test_fully_shard_on_one_device(half: bool, reshard: bool) -> None:
    """All-gathers overlap the copies on streams of their own; unsharded weights are recognized and kept."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {
        "mesh": init_device_mesh(DEVICE.type, (1,)),
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None),
    }

    def program(offload: Offload) -> list[Tensor]:
        model = Stack("mlp")
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        offload(model)
        return train(model)

    weights = 4 * WIDTH * WIDTH * (2 if half else 4)
    assert offloaded(program).bytes_kept[Reason.PARAMETER] >= STEPS * OFFLOADED * weights


RANKS = [
    "ddp",
    "ddp, no_sync",
    "ddp, checkpointed",
    "fsdp",
    "fsdp, offloaded first",
    "fsdp, not resharded",
    "fsdp, bfloat16",
    "fsdp, frozen weights",
    "fsdp, detached weights",
    "fsdp, checkpointed",
]


@pytest.mark.multi_gpu
def test_two_devices(tmp_path: Path) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, ranks in run_ranks(tmp_path, RANKS, 2).items():
        for seen in ranks:
            assert "error" not in seen, f"{name}: {seen.get('error')}"
            assert seen["bytes_reloaded"] == seen["bytes_offloaded"] > 0
            assert seen["kept"]["PARAMETER"] > 0
            assert len(seen["by_rank"]) == 2
            assert min(seen["by_rank"]) > 0
