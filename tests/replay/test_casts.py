"""Casts of weights under autocast are made again, whoever made them."""

from __future__ import annotations

import pytest
import torch
from recomputing import Allocations, Net, batch, check, gradients
from torch import nn
from whole_model import offload

ROWS = (16, 24, 16)
CASTS = 4 * 2 * 32 * 64 * 2
"""Bytes of the casts of the weights in the blocks."""


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def use(model: nn.Module):
    """Run microbatches of several sizes in one context: the later ones find the casts in the cache of autocast."""
    found = []
    for step in range(5):
        with autocast():
            for k, rows in enumerate(ROWS):
                y = model(batch(step + k, rows)).float()
                y.square().sum().backward()
        found += [y.detach(), *gradients(model)]
    return found


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_gradients_of_microbatches_in_one_context(fraction):
    check(Net, use, fraction=fraction)


@pytest.mark.parametrize("rows", ROWS[:2])
def test_no_cast_of_a_weight_is_kept_when_autocast_has_ended(rows):
    def left(model: nn.Module) -> tuple[int, int]:
        with Allocations(model.parameters()) as allocations:
            with autocast():
                y = model(batch(0, rows))
                inside = allocations.nbytes
            after = allocations.nbytes
            y.float().sum().backward()
        return inside, after

    torch.manual_seed(0)
    model = Net()
    _, without = left(model)
    handle = offload(model, layers="blocks.?", recompute=True, fraction=0.0)
    use(model)
    replayed_inside, replayed = left(model)
    assert replayed_inside - replayed >= CASTS, "the cache of autocast has the casts until its context ends"
    assert without - replayed > CASTS
    activations = sum(rows * width * size for width, size in [(32, 4)] * 4)
    weights = [model.inp.weight, model.head.weight]
    outside = sum(2 * weight.numel() for weight in weights) + 4 * rows * 32 * 4
    assert replayed <= activations + outside
    handle.remove()
