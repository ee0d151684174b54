"""Models and training steps for the GPU tests of `actoffload.offload`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_harness import CUDA, DEVICE, WIDTH, Result, collect, loss, make_input, make_layers, requested_peak
from torch import Tensor, nn

import actoffload
from actoffload.measure import MemoryMeter

LAYERS, ROWS = 12, 8192 if CUDA else 512
NBYTES = ROWS * WIDTH * 4
"""Bytes of the output of one block, in float32."""


class Net(nn.Module):
    """Blocks after a stem that computes their input: the argument of a model is kept alive by its caller."""

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
    """Return a model with the same weights on every call."""
    torch.manual_seed(2)
    return of(kind, count)


def offload(model: nn.Module, **options: Any) -> actoffload.OffloadHandle:
    """Offload a model by the schedule, with a `min_bytes` that suits the small tensors of a machine without a GPU.

    A fraction is given because nothing is measured then; the option ``fraction=None`` measures.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
        return actoffload.offload(model, **{"min_bytes": 1 << 16, "fraction": 1.0, **options})


def run_step(model: nn.Module, seed: int, rows: int = ROWS) -> None:
    """Run one step and discard its output."""
    loss(model(make_input(model, seed, rows))).backward()


def step(model: nn.Module, seed: int, rows: int = ROWS) -> Result:
    """Run one step and return its output and gradients."""
    output = model(make_input(model, seed, rows))
    loss(output).backward()
    return collect(model, output)


def expected(model: nn.Module, seeds: range, rows: int = ROWS) -> list[Result]:
    """Return the result of a step for each seed; call it before the model is offloaded."""
    return [step(model, seed, rows) for seed in seeds]


def peak(model: nn.Module, seed: int = 0) -> int:
    """Return the peak of one step in requested bytes, that is, without the rounding of the allocator."""
    with MemoryMeter() as meter:
        run_step(model, seed)
    model.zero_grad(set_to_none=False)
    return requested_peak(meter)
