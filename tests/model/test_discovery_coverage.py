"""Warnings where groups cover little, and where blocks ran without being called."""

from __future__ import annotations

import re
import warnings

import convolutions
import designs
import pytest
import torch
from saving import measure, share_in
from structures import Parts
from torch import nn
from whole_model import offload

from actoffload.model.discovery import (
    Measured,
    candidates,
    choose_groups,
    coverage,
    coverage_warning,
)
from actoffload.model.select import choose


def names(followed) -> list[str]:
    return [of.name for of in followed]


def test_coverage():
    assert coverage(1, 4) == 0.25
    assert coverage(0, 0) == 1.0


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (designs.UNet, "conv_in"),
        (designs.UNet, "down_blocks.0"),
        (designs.UNet, "*.resnets.*"),
        (designs.VisionTransformer, "*.norm"),
        (convolutions.ResNet, "layer4"),
    ],
)
def test_obeying_the_warning_raises_the_coverage_above_one_half(make, layers):
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3, 32, 32)
    named = choose(model, layers)
    followed = candidates(model, named)
    measurement = measure(lambda: model(x), model, followed)
    modules = measurement.modules(followed)
    before = share_in(lambda: model(x), model, named)
    assert before < 0.5
    warning = coverage_warning("Net", modules, set(names(named)), measurement.outside, default=False)
    assert f"cover {before:.0%}" in warning
    ((pattern, default),) = re.findall(r"add (?:'(.*)'|(`\.\.\.`).*) to layers", warning)
    groups = choose(model, [layers, pattern] if pattern else layers)
    if default:
        chosen = choose_groups(modules, measurement.outside, names(groups))
        groups = [of for of in followed if of.name in chosen]
    assert share_in(lambda: model(x), model, groups) >= 0.5
    assert coverage_warning("Net", modules, set(names(groups)), measurement.outside, default=bool(default)) is None


def test_where_the_model_saves_most_itself_no_module_is_named():
    modules = [Measured(f"layers.{k}", 10, block=True) for k in range(4)]
    groups = choose_groups(modules, 60)
    warning = coverage_warning("Net", modules, groups, 60, default=True)
    assert "cover 40%" in warning
    assert "the model's own forward" in warning
    assert coverage_warning("Net", modules, groups, 40, default=True) is None


class Direct(Parts):
    """Runs the forward of its layers past their calls."""

    def forward(self, x):
        x = self.used(x)
        for each in self.layers:
            x = each.forward(x)
        return x


def test_blocks_that_run_without_a_call_are_warned_about():
    width = 8
    model = Direct(used=nn.Linear(width, width), layers=nn.ModuleList(designs.FeedForward(width) for _ in range(3)))
    model.idle = nn.ModuleList(designs.Attention(width) for _ in range(3))  # takes no part
    handle = offload(model, min_bytes=64)
    with pytest.warns(UserWarning, match=r"Nothing of 'layers\.0' and 2 more .* call `block\(x\)` instead"):
        model(torch.randn(4, width)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, width)).sum().backward()
    handle.remove()
