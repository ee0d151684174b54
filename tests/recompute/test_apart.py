"""Outputs of saved operators that are written to through views with version counters of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composing import WIDTH, Net, batch, train
from recomputing import ANY, Counted, check, counted, fractions, policies
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from whole_model import offload


def three(k: int = 0) -> Tensor:
    """Return a batch of three dimensions, for which a linear without bias ends with such a view."""
    return batch(k).unflatten(0, (4, -1))


def training(make: Any) -> Any:
    """Return a program that trains a model on such batches."""

    def program(offload: Any) -> list[Tensor]:
        model = make()
        offload(model)
        return train(model, data=three)

    return program


class Plain(nn.Module):
    """A linear without bias, whose output a subclass edits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.edited(self.linear(x), x)))

    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        y += x.sin()
        return y


class Adapted(Plain):
    """As older adapters (LoRA) do it: the layer itself is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        y += self.up(self.down(x))
        return y


class Scores(Plain):
    """Scores of attention that are scaled in place."""

    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        scores = y @ x.transpose(1, 2)
        scores *= 0.25
        return scores.softmax(-1) @ x


class InPlace(Plain):
    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.silu(y, inplace=True), 0.2, inplace=True)


class Split(Plain):
    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        one, other = y.unsafe_chunk(2, -1)
        return torch.cat([one.sigmoid_(), other.tanh_()], -1)


class Data(Plain):
    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        y.data.mul_(2.0)
        return y


class Foreach(Plain):
    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        torch._foreach_mul_([y], 2.0)
        return y


class Factory(Plain):
    """Fills what an operator made of nothing."""

    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        made = torch.zeros(y.shape)
        made[..., ::2] = 1.0
        return y * made.exp_()


class Inference(Plain):
    def edited(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.inference_mode():
            factor = float((x.detach() @ x.detach().transpose(1, 2)).sum().tanh())
        return y * factor


class Recurrent(nn.Module):
    """Its operators for the CPU split what a linear returns, and edit the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


@policies
@fractions
@pytest.mark.parametrize("make", [Plain, Adapted, Scores, InPlace, Split, Data, Foreach, Factory, Inference, Recurrent])
def test_edits_inside_of_a_region(make, policy, fraction):
    check(training(counted(make)), policy, recomputed=ANY, fraction=fraction)


@policies
@fractions
@pytest.mark.parametrize("seen", [False, True], ids=["no write inside", "write inside"])
def test_edits_of_what_a_region_has_returned(seen, policy, fraction):
    """No node has saved that output, so the edit is allowed; what was computed from it is computed again."""

    class Both(Plain):
        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            z = torch.tanh(y)
            return y, self.out(z.clone().add_(0.0) if seen else z)

    class Editing(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            y, z = block(x)
            y.mul_(3.0)
            return y.sin() + z

    check(training(lambda: Editing(lambda: Counted(Both()))), policy, recomputed=ANY, fraction=fraction)


@policies
@fractions
def test_an_edit_that_the_traced_call_did_not_make(policy, fraction):
    class Later(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def edited(self, y: Tensor, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 2:
                y += x.sin()
            return y

    check(training(counted(Later)), policy, recomputed=ANY, fraction=fraction)


def test_products_are_saved_where_nothing_is_edited():
    """A recomputed step multiplies as often as one that is not."""

    class Unedited(Plain):
        def edited(self, y: Tensor, x: Tensor) -> Tensor:
            return y

    class Counting(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.products += operator is torch.ops.aten.mm.default
            return operator(*args, **(kwargs or {}))

    def products(model: nn.Module) -> int:
        train(model, data=three)
        loss = model(three()).square().sum()
        with Counting() as counting:
            loss.backward()
        return counting.products

    recomputing = Net(Unedited)
    offload(recomputing, recompute=True)
    assert products(recomputing) == products(Net(Unedited)) > 0
