"""Casts of weights under autocast: recomputed groups keep none, where that changes no bit."""

from __future__ import annotations

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


class Net(nn.Module):
    def __init__(self, tied=False, times=1):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        self.blocks, self.head, self.times = nn.ModuleList(blocks), nn.Linear(WIDTH, WIDTH), times
        if tied:
            self.head.weight = blocks[1][0].weight

    def forward(self, x):
        for block in self.blocks:
            for _ in range(self.times):
                x = x + block(x)
        return self.head(x)


def kept(weight):
    """Return whether autocast has kept the cast of a weight."""
    with Casts() as casts:
        F.linear(torch.ones(ROWS, WIDTH), weight)
    return casts.number == 1


def step(model):
    """Return gradients, and which first weights of the blocks have casts that autocast keeps after the forward."""
    model.zero_grad()
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        found = [kept(block[0].weight) for block in model.blocks]
        output.float().square().sum().backward()
    return [x.grad, *(of.grad.clone() for of in model.parameters())], found


@pytest.mark.parametrize(
    ("options", "want"),
    [({}, [False] * 4), ({"tied": True}, [False, True, False, False]), ({"times": 2}, [True] * 4)],
)
def test_casts_that_recomputed_groups_keep(options, want):
    model = Net(**options)
    gradients, found = step(model)
    assert found == [True] * 4
    handle = offload(model, recompute=True, num_layers=2, layers="blocks.*", min_bytes=0)
    for _ in range(4):
        found, casts = step(model)
        assert all(map(torch.equal, found, gradients))
    assert casts == want
    handle.remove()
