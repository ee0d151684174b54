"""Models for the GPU tests of `actoffload.offload`, and steps of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_harness import CUDA, DEVICE, WIDTH, Result, collect, loss, make_input, make_layers
from torch import Tensor, nn

import actoffload
from actoffload.measure import MemoryMeter

LAYERS, ROWS = 12, 8192 if CUDA else 512
NBYTES = ROWS * WIDTH * 4
"""Bytes of what one block hands to the next, in float32."""


class Net(nn.Module):
    """Blocks behind a stem that makes their input: what a model is called with is held by whoever calls it."""

    def __init__(self, kind: str = "linear", count: int = LAYERS) -> None:
        super().__init__()
        self.blocks = make_layers(kind, count)
        self.stem = nn.Linear(WIDTH, WIDTH).to(DEVICE, next(self.blocks.parameters()).dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def make(kind: str = "linear", count: int = LAYERS, of: Callable[..., nn.Module] = Net) -> Any:
    """Return a model whose weights are the same every time."""
    torch.manual_seed(2)
    return of(kind, count)


def offload(model: nn.Module, **options: Any) -> actoffload.OffloadHandle:
    """Offload a model; without a GPU also its small tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
        return actoffload.offload(model, **{"min_bytes": 1 << 16, **options})


def one(model: nn.Module, seed: int, rows: int = ROWS) -> None:
    """Run one step and keep nothing of it."""
    loss(model(make_input(model, seed, rows))).backward()


def step(model: nn.Module, seed: int, rows: int = ROWS) -> Result:
    """Run one step and return what it computed."""
    output = model(make_input(model, seed, rows))
    loss(output).backward()
    return collect(model, output)


def expected(model: nn.Module, seeds: range, rows: int = ROWS) -> list[Result]:
    """Return what each seed gives without offloading."""
    return [step(model, seed, rows) for seed in seeds]


def peak(model: nn.Module, seed: int = 0) -> int:
    """Return the peak of one step in bytes that were asked for: the allocator's own rounding left out."""
    with MemoryMeter() as meter:
        one(model, seed)
    model.zero_grad(set_to_none=False)
    if CUDA:
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return meter.peak_bytes


def settled_peak(model: nn.Module) -> int:
    """Return the peak of a step after some others; the same for each."""
    for seed in range(2):
        peak(model, seed)
    peaks = {peak(model, seed) for seed in range(3)}
    assert len(peaks) == 1, "the peak differs between runs"
    return peaks.pop()
