"""Compatibility of `actoffload.offload` with other parts of PyTorch on a GPU: equal bits, and bytes are offloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compose_harness import STEPS, Stack, offloaded, train, training
from compose_ranks import run_ranks
from composing import OFFLOADED, Offload, gradients
from gpu_harness import CUDA, DEVICE, ROWS, WIDTH, flash, lenient, make_input, needs_cuda
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload.report import Reason

pytestmark = [pytest.mark.gpu, *lenient]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    class Checkpointed(Stack):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=reentrant)

    with flash():
        statistics = offloaded(training(lambda: Checkpointed("attention")))
    assert statistics.bytes_offloaded == STEPS * OFFLOADED * ROWS * WIDTH * 2


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=needs_cuda), torch.bfloat16])
def test_autocast_and_gradient_scaler(dtype: torch.dtype) -> None:
    def program(offload: Offload) -> list[Tensor]:
        model = Stack("mlp")
        offload(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2)
        for k in range(4):
            with torch.autocast(DEVICE.type, dtype):
                loss = model(make_input(model, k)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            del loss
        return [torch.tensor(scaler.get_scale()), *(p.detach().clone() for p in model.parameters())]

    offloaded(program)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_blocks(backend: str, dynamic: bool) -> None:
    if backend == "inductor" and not (CUDA and (shutil.which("gcc") or shutil.which("cc"))):
        pytest.skip("inductor needs CUDA, and a C compiler for what starts its kernels")

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = Stack("mlp")
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True, dynamic=dynamic)
        offload(model)
        results = train(model)
        if dynamic:
            model(make_input(model, 7, rows=ROWS // 2)).square().mean().backward()
            results += gradients(model)
        return results

    offloaded(program)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh")
def test_the_whole_model_compiled() -> None:
    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = Stack("mlp")
        offload(model)
        return train(model, torch.compile(model, backend="aot_eager"))

    offloaded(program)


class Forces(nn.Module):
    """Compute a gradient in the forward: the autograd thread saves tensors while the forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)
        return x + 1e-2 * force


def test_a_gradient_inside_of_the_forward() -> None:
    offloaded(training(lambda: Stack(Forces, torch.float32)))


def test_a_gradient_penalty() -> None:
    def program(offload: Offload) -> list[Tensor]:
        model = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.float32)
        offload(model)
        results = []
        for k in range(STEPS):
            x = make_input(model, k).requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (slope.square().mean() + y.square().mean()).backward()
            results += [x.grad, *gradients(model)]
            del x, y, slope
        return results

    offloaded(program)


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_that_step_inside_of_backward(fused: bool) -> None:
    def program(offload: Offload) -> list[Tensor]:
        model = Stack("mlp")
        offload(model)
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=fused)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for k in range(STEPS):
            model(make_input(model, k)).square().mean().backward()
        return [p.detach().clone() for p in model.parameters()]

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
