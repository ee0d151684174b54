"""Casts of weights under autocast: recomputed groups keep none, where that changes no bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from whole_model import offload

ROWS, WIDTH = 4, 8


class Casts(TorchDispatchMode):
    """Counts casts."""

    number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator is torch.ops.aten._to_copy.default
        return operator(*args, **(kwargs or {}))


def kept(weight):
    """Return whether autocast has kept the cast of a weight."""
    with Casts() as casts, torch.no_grad():
        F.linear(torch.ones(ROWS, WIDTH), weight)
    return casts.number == 1


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


class Net(nn.Module):
    """Four blocks under autocast; `seen` is of which blocks casts are kept at the end of the forward."""

    def __init__(self, tied=False, times=1, inside=True):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        self.blocks, self.head, self.times, self.inside = nn.ModuleList(blocks), nn.Linear(WIDTH, WIDTH), times, inside
        if tied:
            self.head.weight = blocks[1][0].weight

    def forward(self, x):
        with autocast() if self.inside else nullcontext():
            for block in self.blocks:
                for _ in range(self.times):
                    x = x + block(x)
            x = self.head(x)
            self.seen = [kept(block[0].weight) for block in self.blocks]
        return x


def step(model):
    """Return the gradients of two forwards, under one autocast if that does not begin inside."""
    model.zero_grad()
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
    with nullcontext() if model.inside else autocast():
        total = sum(model(x * scale).float().square().sum() for scale in (1.0, 0.3))
    total.backward()
    return [x.grad, *(of.grad.clone() for of in model.parameters())]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [False] * 4),
        ({"tied": True}, [False, True, False, False]),
        ({"times": 2}, [True] * 4),
        ({"inside": False}, [True] * 4),
    ],
)
def test_casts_that_recomputed_groups_keep(options, want):
    model = Net(**options)
    gradients = step(model)
    assert model.seen == [True] * 4
    handle = offload(model, recompute=True, num_layers=2, layers="blocks.*")
    for _ in range(4):
        assert all(map(torch.equal, step(model), gradients))
    assert model.seen == want
    handle.remove()
