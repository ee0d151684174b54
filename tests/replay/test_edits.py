"""Edits between forward and backward are autograd's error, and what no key sees is an error in the next forward."""

import warnings
from typing import Any

import pytest
import torch
from recomputing import BLOCKS, WAYS, WIDTH, Mlp, Net, all_ways, batch, check, policies, train, ways
from torch import nn
from whole_model import offload


class Edited(nn.Module):
    """Saves its input, what it makes of it, and what it returns."""

    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.kept = None

    def forward(self, x):
        y = self.linear(x)
        self.kept = y
        return self.out(torch.sin((y.sin() + self.shift).exp())).sin()


ADDMM = [torch.ops.aten.addmm.default]
EDITS: dict[str, Any] = {
    "input": lambda block, x: x.mul_(2.0),
    "kept value": lambda block, x: block.kept.mul_(2.0),
    "weight": lambda block, x: block.linear.weight.mul_(2.0),
    "last weight": lambda block, x: block.out.weight.mul_(2.0),
    # What replay alone reads.
    "bias": lambda block, x: block.linear.bias.mul_(2.0),
    "buffer": lambda block, x: block.shift.mul_(2.0),
}
EDITED = [
    pytest.param(where, *WAYS[way], id=f"{where}-{way}")
    for where in ("input", "weight", "last weight")
    for way in ("kept-everything", "offloaded-cheap")
]
EDITED += [pytest.param("kept value", ADDMM, fraction, id=f"kept value-{fraction}") for fraction in (0.0, 1.0)]
EDITED += [pytest.param(where, True, 0.0, id=where) for where in ("bias", "buffer")]


@pytest.mark.parametrize("settled", [False, True], ids=["first call", "settled"])
@pytest.mark.parametrize(("where", "policy", "fraction"), EDITED)
def test_an_edit_before_backward_is_an_error_of_autograd(where, policy, fraction, settled):
    class Passing(Net):
        def call(self, block, x):
            self.inputs.append(x)
            return block(x)

    model = Passing(Edited)
    model.inputs = []
    offload(model, layers="blocks.?", recompute=policy, fraction=fraction)
    if settled:
        train(model)
    for at in range(BLOCKS):
        model.inputs.clear()
        loss = model(batch()).sum()
        with torch.no_grad():
            EDITS[where](model.blocks[at], model.inputs[at])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
        model.zero_grad()


@ways
def test_a_group_that_edits_what_it_has_saved(policy, fraction):
    class Editing(Mlp):
        def forward(self, x):
            y = torch.sin(super().forward(x)).exp()
            z = y.sin()
            y.mul_(2.0)
            return z

    model = Net(Editing)
    offload(model, layers="blocks.?", recompute=policy, fraction=fraction)
    for k in range(3):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(k)).sum().backward()


@all_ways
def test_groups_that_edit_their_inputs(policy, fraction):
    """The edits change nothing in the first steps, so that the proof shows nothing."""

    class Clamping(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            y = (x * 2.0).sin().exp() * (2.0 - self.seen) + (self.seen * 2.0).sin()
            x.clamp_(-self.limit, self.limit)
            self.seen.clamp_(min=self.least)
            return torch.sin(super().forward(y)) + x

    class Fresh(Net):
        def call(self, block, x):
            return block(x * 1.0)

    def use(model):
        found = []
        for k in range(8):
            for block in model.blocks:
                block.limit = torch.tensor(100.0 if k < 5 else 0.5)
                block.least = torch.tensor(0.0 if k < 5 else 0.1 * k)
            found += train(model, 1, k)
        return found

    check(lambda: Fresh(Clamping), use, policy=policy, fraction=fraction, freed=-1.0)


@ways
def test_outputs_that_the_program_edits(policy, fraction):
    class Adding(Net):
        def call(self, block, x):
            y = block(x)
            y += x
            return y.mul_(0.5)

    class Ending(Mlp):
        def forward(self, x):
            return self.down(torch.sin(self.up(x)).sin()) * 2.0

    check(lambda: Adding(Ending), policy=policy, fraction=fraction)


# What no key sees


class Hidden(nn.Module):
    """Reads a number of its class."""

    factor, shift = 1.0, torch.zeros(1)

    def __init__(self):
        super().__init__()
        self.linear, self.part = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x):
        return self.part(torch.sin(torch.sin(self.linear(x)) * Hidden.factor).exp()).sin()


@pytest.fixture(autouse=True)
def _as_before():
    yield
    Hidden.factor = 1.0


@ways
@pytest.mark.parametrize("again", [False, True], ids=["once", "from now on"])
def test_a_global_number_that_is_replaced_is_an_error_in_the_next_forward(policy, fraction, again):
    model = Net(Hidden)
    offload(model, layers="blocks.?", recompute=policy, fraction=fraction)
    train(model)
    Hidden.factor = 2.0
    loss = model(batch()).sum()
    Hidden.factor = 2.0 if again else 1.0
    loss.backward()
    with pytest.raises(RuntimeError, match=r"first in 'blocks\.3") as caught:
        model(batch())
    message = str(caught.value)
    assert "(Hidden): aten." in message or "(Hidden).part: aten." in message or "(Hidden).part" in message
    assert "The last gradients are wrong" in message
    assert "recompute=False" in message
    Hidden.factor = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)


@policies
def test_a_kernel_that_dispatch_does_not_see_is_an_error(policy):
    class Kernel(Mlp):
        by = 0.0

        def forward(self, x):
            y = torch.sin(x) + 0.0
            y.detach().numpy()[:] += Kernel.by
            return super().forward(y.exp())

    model = Net(Kernel)
    offload(model, layers="blocks.?", recompute=policy, fraction=0.0)
    train(model)
    Kernel.by = 0.5
    model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="a kernel that writes to memory unseen"):
        model(batch())


def test_each_value_is_compared_in_turn():
    """A change that no sample of a settled call shows is found in one of the passes that follow."""

    class Sparse(nn.Module):
        at, by = 5, 0.0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            mask = torch.zeros(len(x), WIDTH)
            y = torch.sin(self.linear(x)) + 0.0
            y.detach().numpy()[3, Sparse.at] += Sparse.by
            return y.exp().sin() + mask

    model = Net(Sparse)
    offload(model, layers="blocks.?", recompute=True, fraction=0.0)
    train(model)
    Sparse.by = 0.5
    with pytest.raises(RuntimeError, match="The last gradients are wrong"):
        train(model, BLOCKS + 2)
