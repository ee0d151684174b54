"""The names that a handle prints: short where modules count up or run several times, and never short of one."""

from __future__ import annotations

import pytest
import torch
from whole_model import Repeated, Transformer, data, offload


def test_a_long_list_says_how_many_names_are_missing():
    model = Transformer(7)
    handle = offload(model, keep=[norm for block in model.blocks for norm in (block.norm1, block.norm2)])
    (kept,) = [line for line in str(handle).splitlines() if "keep:" in line]
    assert kept.startswith("  keep: blocks.0.norm1 ... 2, blocks.1.norm1 ... 2, ")
    assert kept.endswith("blocks.5.norm1 ... 2 and 2 more")


def test_a_module_that_runs_several_times_is_named_once():
    model = Repeated()
    with pytest.warns(UserWarning, match="its earlier calls are offloaded"):
        handle = offload(model, layers="layer")
    model(data()).sum().backward()
    assert str(handle).splitlines()[1:4] == [
        "  layer: 5 of 7 offloaded",
        "    offloaded  layer (5 times)",
        "    kept       layer (2 times)",
    ]
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
