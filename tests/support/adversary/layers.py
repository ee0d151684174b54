"""A context whose layers are called one at a time, for tests of a single wait."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import actoffload

from .models import ROWS, WIDTH

STORAGE = ROWS * WIDTH * 4
"""Bytes of the tensor that `numbers` returns."""


class Layers:
    """A context whose layers are functions without arguments, called one at a time."""

    def __init__(self, offload: int | None, count: int) -> None:
        if offload is None:
            made = actoffload.get_cpu_offload_context(True, 1, count, manual_synchronization=True)
            self.context, self.sync, self.controller = made
        else:
            self.context, self.sync = actoffload.get_cpu_offload_context(True, offload, count)

    def __call__(self, layer: Callable[[], Tensor]) -> Tensor:
        with self.context:
            output = layer()
        return self.sync(output)

    @property
    def statistics(self) -> Any:
        return self.context.statistics()

    def out(self, layer: int) -> None:
        self.controller.start_offload_layer(layer)
        self.controller.release_activation_forward_gpu_memory(layer)

    def back(self, layer: int) -> None:
        self.controller.start_reload_layer(layer)


class _Saving(torch.autograd.Function):
    """Multiply by the sum of a tensor and save the tensor; the gradient of the other factor is exact."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return w * saved.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grad * saved.sum(), None


def saving(w: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor whose gradient needs the saved tensor."""
    return _Saving.apply(w, tensor)  # type: ignore[no-any-return, no-untyped-call]


def numbers(start: float = 0.0, rows: int = ROWS) -> Tensor:
    """Return a new tensor of small integers, whose sums are exact."""
    return torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + start
