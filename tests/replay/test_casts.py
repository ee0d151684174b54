"""Casts of weights under autocast are made again, whoever made them."""

from __future__ import annotations

import pytest
import torch
from recomputing import Allocations, Net, batch, check, gradients
from torch import nn
from whole_model import offload

from actoffload.engine import hooks
from actoffload.report import Reason

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


def test_that_a_cast_is_one_of_a_weight_is_found_out_once(monkeypatch):
    """LoRA saves two small casts for each linear layer, and finding that out takes longer than keeping them."""
    asked: list[int] = []
    stays = hooks.stays
    monkeypatch.setattr(hooks, "stays", lambda tensor, *args: (asked.append(tensor.numel()), stays(tensor, *args))[1])
    torch.manual_seed(0)
    model = Net()
    handle = offload(model, layers="blocks.?", recompute=[torch.ops.aten._to_copy.default], fraction=0.0)
    counts = []
    for step in range(4):
        asked.clear()
        with autocast():
            y = model(batch(step, 16)).float()
        y.sum().backward()
        counts.append(asked.count(32 * 64))
    number, _ = handle.report().kept[Reason.PARAMETER]
    assert counts[0] > counts[-1] == counts[-2] == 0
    assert number >= 8, "two casts in each of four blocks are counted as before"
    handle.remove()
