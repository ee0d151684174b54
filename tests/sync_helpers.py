"""Functions that synchronize, for the tests on the CPU and on a GPU, and what those tests share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from actoffload.report.synchronization import Synchronization, Synchronizations

ITEM = "aten::item / aten::_local_scalar_dense"


def line_of(function: Callable[..., Any], text: str) -> int:
    """Return the number of the line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [at for at, line in enumerate(lines) if text in line]
    return first + at


def only(found: Synchronizations) -> Synchronization:
    assert len(found) == 1, str(found)
    return next(iter(found))


def item(x: torch.Tensor) -> float:
    y = x.sum()
    return y.item()


def as_bool(x: torch.Tensor) -> str:
    y = x.sum()
    if y > 0:
        return "positive"
    return "not positive"


def nonzero(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.nonzero()


def mask_index(x: torch.Tensor) -> torch.Tensor:
    mask = x > 0
    return x[mask]


def to_host(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.cpu()


def to_pageable(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape)
    return y.copy_(x, non_blocking=True)


class ReadsItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        scale = grad.sum().item()
        return grad * scale


def hook(grad: torch.Tensor) -> None:
    float(grad.sum())


def reads_activation(x: torch.Tensor) -> torch.Tensor:
    return (x * x.sum().item()).sin()
