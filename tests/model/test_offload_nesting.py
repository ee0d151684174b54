"""Chosen and kept modules inside of each other; what modules are called with, and return."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from whole_model import ATTENTION, MLP, UNIT, Block, Transformer, Wave, Waves, agrees, bytes_of_a_step


class Nested(nn.Module):
    """A wave, an inner wave in a box, and a wave: tensors are saved before, in and after the inner one."""

    class Box(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Wave()

        def forward(self, x):
            return torch.sin(self.inner(torch.sin(x)))

    def __init__(self):
        super().__init__()
        self.box = Nested.Box()

    def forward(self, x):
        return torch.sin(self.box(torch.sin(x)))


# Each block saves: sin, then in the box sin, then in the inner wave two, then in the box sin, then sin: six.
@pytest.mark.parametrize(
    ("layers", "keep", "units"),
    [
        ("blocks", (), 6),
        ("blocks", "*.inner", 4),
        ("blocks", "*.box", 2),
        ("blocks", ["*.inner", "*.box"], 2),
        ("*.box", (), 4),
        ("*.inner", (), 2),
        ("*.inner", "*.box", 2),
        ("*.inner", "blocks.*", 2),
        ("*.inner", ["blocks.*", "*.box"], 2),
        ("*.box", "*.inner", 2),
        ("*.box", ["*.inner", "blocks.*"], 2),
        (["blocks.*", "*.inner"], "*.box", 4),
        (["blocks.*", "*.box"], "*.inner", 4),
        (["blocks.*", "*.inner"], (), 6),
        (["blocks.*", "*.box", "*.inner"], (), 6),
        (["*.box", "*.inner"], "blocks.*", 4),
    ],
)
def test_the_innermost_rule(layers, keep, units):
    """Of four blocks, three of each kind are offloaded."""
    nbytes, late = bytes_of_a_step(Waves(4, Nested), layers=layers, keep=keep, num_layers=3)
    assert nbytes == 3 * units * UNIT
    assert late == 0


def test_parts_of_a_group_have_names_and_kinds_of_their_own():
    model = Waves(3, Nested)
    handle, _ = agrees(model, layers=["blocks.*", "*.inner"])
    assert handle.groups[:3] == ("blocks.0", "blocks.0.box.inner", "blocks.0 (part 2)")
    said = str(handle)
    for line in (
        "offload of Waves: 6 of 9 groups are offloaded",
        "  blocks.*: 2 of 3 offloaded",
        "  *.inner: 2 of 3 offloaded",
        "  blocks.* (part 2): 2 of 3 offloaded",
        "    offloaded  blocks.0 (part 2), blocks.1 (part 2)",
    ):
        assert line in said.splitlines()


def test_two_kinds_inside_of_each_block_and_the_block():
    """With everything chosen, everything is offloaded, whichever group it is counted in."""
    whole, late = bytes_of_a_step(Transformer(5), layers="blocks", num_layers=4)
    assert late == 0
    parts, late = bytes_of_a_step(Transformer(5), layers=["blocks.*", "*.mlp", "*.attention"], num_layers=4)
    assert late == 0
    assert parts == whole
    fine, _ = bytes_of_a_step(Transformer(5), layers=["*.mlp", "*.attention"], num_layers=4)
    assert fine == 4 * (MLP + ATTENTION)


def test_chosen_inside_of_a_module_that_is_called_twice():
    class Twice(Nested):
        def forward(self, x):
            return self.box(x) + self.box(x * 0.5)

    nbytes, late = bytes_of_a_step(Waves(4, Twice), layers="*.inner")
    # Eight calls: all but the last two are offloaded.
    assert nbytes == 6 * Wave.SAVES * UNIT
    assert late == 0


# What a module is called with, and returns


def test_outputs_and_arguments_of_any_shape():
    class Dictionary(Block):
        def forward(self, *, states, mask=None, more=()):
            return {"states": super().forward(states["x"]), "more": (mask, [more])}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Dictionary() for _ in range(5))

        def forward(self, x):
            for block in self.blocks:
                x = block(states={"x": x}, more=(x,))["states"]
            return x

    _, statistics = agrees(Model())
    assert statistics.passes == 3
    assert statistics.reloaded_on_demand == 0
    assert statistics.reloaded_ahead == statistics.tensors_offloaded > 0
