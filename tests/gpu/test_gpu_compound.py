"""Compound tensors on a GPU: wrapper subclasses, float8, jagged and distributed tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from gpu_harness import (
    CUDA,
    DEVICE,
    forward,
    lenient,
    needs_cuda,
    no_offload,
    occupy,
    offload,
    requested_bytes,
)
from torch import nn
from wrappers import QuantizedTensor, Scaled, Two, Uses, read

from actoffload.report import Reason

pytestmark = [pytest.mark.gpu, *lenient]

ROWS, WIDTH = (4096 if CUDA else 512), 512
LAYERS, OFFLOADED = 6, 3


def some_input(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


class SavesQuantized(nn.Module):
    """Save a tensor in float8 or int8; the gradient is the product with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thing = Scaled.of(x) if self.kind == "float8" else QuantizedTensor(x)
        return Uses.apply(x.sin(), [], thing)


@pytest.mark.parametrize("kind", ["float8", "quantized"])
def test_quantized_tensors_are_offloaded(kind: str) -> None:
    layers = nn.ModuleList([SavesQuantized(kind) for _ in range(LAYERS)])
    grads, held = [], []
    for context, sync in (no_offload(), offload(OFFLOADED, LAYERS), offload(OFFLOADED, LAYERS)):
        leaf = some_input(0).requires_grad_()
        gc.collect()  # what other tests have left would be freed in the forward
        before = requested_bytes()
        y = forward(layers, leaf * 1, (context, sync))
        held.append(requested_bytes() - before)
        y.square().mean().backward()
        grads.append(leaf.grad)
        del y  # or it would count as allocated before the next run
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    assert bool(torch.isfinite(grads[0]).all())
    statistics = context.statistics()
    in_bytes = 1 if kind == "float8" else 2  # the rows, or rows and columns, in addition to the tensor that sin saves
    assert statistics.bytes_offloaded == OFFLOADED * ROWS * WIDTH * (4 + in_bytes)
    assert statistics.tensors_kept[Reason.SMALL] == LAYERS  # the scales
    if CUDA:
        assert held[0] - held[2] == statistics.bytes_offloaded


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank with NCCL."""
    if not CUDA or not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        yield
    finally:
        dist.destroy_process_group()


@needs_cuda
def test_a_copy_waits_for_the_collective_that_writes_it(group: None) -> None:
    """NCCL computes the sum on its own stream, after a slow kernel; no stream has waited for it before the copy."""
    import torch.distributed._functional_collectives as collectives

    context, sync = offload(1, 3)
    for _ in range(2):
        leaf = some_input(0).requires_grad_()
        with context:
            occupy(50_000_000)
            thing = collectives.all_reduce(some_input(1), "sum", dist.group.WORLD)
            assert type(thing) is collectives.AsyncCollectiveTensor
            y = Uses.apply(leaf * 1, [], Two(thing, thing))
        y = sync(y)
        del thing
        for _ in range(2):
            with context:
                y = y * 1.0
            y = sync(y)
        y.sum().backward()
        assert torch.equal(leaf.grad, read(Two(some_input(1), some_input(1))))
    assert context.statistics().bytes_offloaded == 2 * ROWS * WIDTH * 4
