"""Warnings where groups cover little, and where blocks ran without being called."""

from __future__ import annotations

import warnings

import designs
import pytest
import torch
from structures import Parts
from torch import nn
from whole_model import offload

from actoffload.model.discovery import (
    Measured,
    choose_groups,
    coverage,
    coverage_warning,
)


def test_coverage():
    assert coverage(1, 4) == 0.25
    assert coverage(0, 0) == 1.0


def test_where_the_model_saves_most_itself_no_module_is_named():
    modules = [Measured(f"layers.{k}", 10, block=True) for k in range(4)]
    groups = choose_groups(modules, 60)
    warning = coverage_warning("Net", modules, groups, 60)
    assert "cover 40%" in warning
    assert "the model's own forward" in warning
    assert "Move" not in warning  # which would not help where gradients are taken, or weights sampled
    assert coverage_warning("Net", modules, groups, 40) is None


class Direct(Parts):
    """Runs its layers by a function that is not their forward."""

    def forward(self, x):
        x = self.used(x)
        for each in self.layers:
            x = type(each).forward(each, x)
        return x


def test_blocks_that_run_without_a_call_are_warned_about():
    width = 8
    model = Direct(used=nn.Linear(width, width), layers=nn.ModuleList(designs.FeedForward(width) for _ in range(3)))
    model.idle = nn.ModuleList(designs.Attention(width) for _ in range(3))  # takes no part
    handle = offload(model, min_bytes=64)
    with pytest.warns(UserWarning, match=r"Nothing of 'layers\.0' and 2 more .* call `block\(x\)`\.") as caught:
        model(torch.randn(4, width)).sum().backward()
    assert not [each for each in caught if "cover" in str(each.message)]  # which would name another cause
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, width)).sum().backward()
    handle.remove()
