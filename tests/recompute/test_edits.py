"""In-place edits and recomputation: the error of autograd or the right gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composing import BLOCKS, WIDTH, Mlp, Net, batch, dropping, train
from recomputing import ANY, FIRST, Counted, check, fractions, policies, simple
from torch import Tensor, nn


class Edited(nn.Module):
    """Saves neither an argument nor the bias: without recomputation an edit of them is no error."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor, skip: Tensor, *, more: Tensor, nested: Any) -> Tensor:
        return torch.tanh(self.linear(x + skip + more + nested[0]["a"]) + self.scale)


class Editable(Net):
    made: dict[str, Tensor]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        made = dict.fromkeys(("positional", "keyword", "nested"), x * 0.5)
        for k, block in enumerate(self.blocks):
            x = block(x * 1.0, made["positional"], more=made["keyword"], nested=[{"a": made["nested"]}])
            if k == 2:
                made["output"] = x
                x = x + 1.0
        linear = self.blocks[1].inner.linear
        self.made = {**made, "bias": linear.bias, "weight": linear.weight, "buffer": self.blocks[1].inner.scale}
        return self.head(x)


@policies
@fractions
@pytest.mark.parametrize("where", ["positional", "keyword", "nested", "bias", "weight", "buffer", "output"])
def test_an_edit_after_the_forward_is_an_error_of_autograd(where, policy, fraction):
    """Also where the program without recomputation would not have read the tensor; the next step is right."""
    raised = []

    def use(model):
        loss = model(batch()).square().sum()
        with torch.no_grad():
            before = model.made[where].clone()
            model.made[where].mul_(2.0)
            edited = model.made.pop(where)
            model.made.clear()
        try:
            loss.backward()
        except RuntimeError as error:
            raised.append("has been modified by an inplace operation" in str(error))
        with torch.no_grad():
            edited.copy_(before)
        model.zero_grad()
        del loss, edited
        return train(model, 2)

    program = simple(lambda: Editable(lambda: Counted(Edited())), use)
    handle = check(program, policy, recomputed=ANY, fraction=fraction)
    # Without us it is an error for the weight, and for the output, which autograd saves; recomputation makes that anew.
    assert raised == [True] * (2 if where == "weight" else 1)
    assert handle.statistics().resident_bytes == 0


@policies
@fractions
def test_a_group_that_writes_to_its_input_is_not_recomputed(policy, fraction):
    class Writing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    class Model(Net):
        def call(self, block, x):
            return block(x + 1.0)

    handle = check(simple(lambda: Model(lambda: Counted(Writing()))), policy, recomputed=0, fraction=fraction)
    assert "because they write to their inputs: blocks.0 ... 5." in handle.plan.because


@policies
@fractions
def test_outputs_that_the_program_edits_in_place(policy, fraction):
    class Model(Net):
        def call(self, block, x):
            return block(x * 1.0).mul_(0.5).add_(1.0)

    check(simple(lambda: Model(lambda: Counted(dropping()))), policy, recomputed=FIRST + 3 * BLOCKS, fraction=fraction)
