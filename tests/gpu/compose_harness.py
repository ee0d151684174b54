"""A model of blocks, trained with and without offloading, for the GPU tests of compatibility."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composing import OFFLOADED, Offload, both, gradients
from gpu_harness import DEVICE, KINDS, WIDTH, make_input
from torch import Tensor, nn

import actoffload
from actoffload import device as devices

STEPS = 3


class Stack(nn.Module):
    """Six blocks: of a kind in `KINDS`, or made by a function."""

    def __init__(self, kind: str | Callable[[], nn.Module], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        make = (lambda: KINDS[kind](WIDTH)) if isinstance(kind, str) else kind
        self.blocks = nn.ModuleList([make() for _ in range(OFFLOADED + 2)])
        self.to(DEVICE, dtype or (torch.float32 if kind in ("linear", "mlp") else torch.bfloat16))

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def offloaded(program: Callable[[Offload], list[Tensor]], **options: Any) -> actoffload.report.Statistics:
    """Run a program without and with offloading on the device of this machine; require equal bits."""
    statistics = both(program, device=devices.backend(), **options).statistics()
    assert statistics.bytes_offloaded > 0
    assert statistics.reloaded_on_demand == 0
    return statistics


def train(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None, steps: int = STEPS) -> list[Tensor]:
    found = []
    for k in range(steps):
        y = (model if run is None else run)(make_input(model, k).requires_grad_() * 1.0)
        y.float().square().mean().backward()
        found += [y.detach(), *gradients(model)]
        del y
    return found


def training(make: Callable[[], nn.Module]) -> Callable[[Offload], list[Tensor]]:
    def program(offload: Offload) -> list[Tensor]:
        model = make()
        offload(model)
        return train(model)

    return program
