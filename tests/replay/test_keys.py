"""Calls that do something else have another program, or are traced each time: right bits, and no error."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composing import each_step, gradients
from recomputing import WIDTH, Mlp, Net, batch, check, policies, train, ways
from torch import Tensor, nn
from whole_model import offload

MANY = 12


def changing(change: Any, steps: int = MANY) -> Any:
    """Return a use of a model in which something is changed before each step."""

    def loss(model: nn.Module, k: int) -> Tensor:
        change(model, k)
        torch.manual_seed(k)
        random.seed(k)
        np.random.seed(k)
        return model(batch(k)).square().sum()

    return each_step(loss, steps)


def unchanged(model: nn.Module, k: int) -> None:
    pass


class Linear(nn.Linear):
    """Has attributes that its forward reads."""

    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale, self.calls, self.mode, self.other = 1.0, 0, "sin", nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.sin(super().forward(x)) * float(self.scale)
        return (y.sin() if self.mode == "sin" else y.cos()).exp() + self.other(y.sin()).exp().sin()


# Sizes and arguments


@ways
def test_sizes(policy, fraction):
    rows = [16, 8, 16, 8, 3, 16, 8, 4, 5, 6, 7, 9, 10, 11, 16, 8]
    loss = lambda model, k: model(batch(k, rows[k])).square().sum()  # noqa: E731
    check(lambda: Net(Linear), each_step(loss, len(rows)), policy=policy, fraction=fraction)


@policies
def test_strides_types_and_gradients_of_inputs(policy):
    class Model(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def use(model):
        found = []
        for k in range(MANY):
            x = batch(k)
            x = x.mT.contiguous().mT if k % 2 else x
            x = x.requires_grad_(k % 3 == 0)
            model(x).square().sum().backward()
            found += gradients(model)
            found += [x.grad] if x.grad is not None else []
        return found

    check(lambda: Model(Linear), use, policy=policy)


@dataclass
class Options:
    scale: float
    mask: Tensor


@ways
def test_flags_numbers_and_tensors_in_arguments(policy, fraction):
    class Arguments(Mlp):
        def forward(self, x, options, *, flip, names, more):
            y = torch.sin(super().forward(x)) * options.scale
            y = y.flip(0) if flip else y
            y = (y * options.mask).sin() if "mask" in names else y.sin()
            return y + (y * more["factor"]).exp().sin() * more["where"][0]

    class Model(Net):
        step = 0

        def call(self, block, x):
            k = self.step
            more = {"factor": 1.0 + k % 3, "where": (x.detach(),)}
            names = ["mask"] if k % 4 else []
            return block(x, Options(0.5 + k % 2, x.detach().exp()), flip=k % 5 == 0, names=names, more=more)

    def change(model, k):
        model.step = k

    check(lambda: Model(Arguments), changing(change), policy=policy, fraction=fraction)


# Attributes


def anneal(model, k):
    for block in model.blocks:
        block.scale = 1.0 - k / 20


def turn_sign(model, k):
    for block in model.blocks:
        block.scale = 0.0 if k % 3 else -0.0


def alternate(model, k):
    for block in model.blocks:
        block.mode = "cos" if k % 3 == 2 else "sin"


def train_and_evaluate(model, k):
    model.train(k % 2 == 0)


def freeze(model, k):
    for block in model.blocks:
        block.weight.requires_grad_(k % 3 > 0)
        block.other.weight.requires_grad_(k % 3 < 2)


def hook(model, k):
    for block in model.blocks:
        if k % 4 == 2:
            block.handle = block.other.register_forward_hook(lambda module, args, y: 2.0 * y)
        elif k % 4 == 0 and k:
            block.handle.remove()


def replace(model, k):
    if k % 3 == 2:
        torch.manual_seed(k)
        for block in model.blocks:
            block.other = nn.Linear(WIDTH, WIDTH)
            block.weight = nn.Parameter(block.weight.detach() * 1.1)


def patch(model, k):
    for block in model.blocks:
        if k == 4:
            block.other.forward = lambda x, block=block: 0.5 * F.linear(x, block.other.weight, block.other.bias)
        elif k == 8:
            del block.other.forward


@ways
@pytest.mark.parametrize("change", [anneal, turn_sign, alternate, train_and_evaluate, freeze, hook, replace, patch])
def test_attributes(change, policy, fraction):
    check(lambda: Net(Linear), changing(change), policy=policy, fraction=fraction, freed=-1.0)


class Counting(Linear):
    """Changes an attribute every few calls."""

    def forward(self, x):
        self.calls += 1
        if self.calls % 4 == 0:
            self.scale = 1.0 + self.calls % 5
        y = super().forward(x)
        return y if self.calls % 3 else (2.0 * y).sin()


class Lazily(Linear):
    """Makes a table for each size when it is needed."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(0, 1, len(x))[:, None].cos()
        return super().forward((x.sin() * self.tables[len(x)]).sin())


@ways
@pytest.mark.parametrize("kind", [Counting, Lazily])
def test_attributes_that_a_call_changes(kind, policy, fraction):
    check(lambda: Net(kind), changing(unchanged), policy=policy, fraction=fraction, freed=-1.0)


# What the call decides by itself


class Doubled(Linear):
    """Saves the same sizes whatever it draws."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x):
        y = super().forward(torch.sin(x) * (2.0 if self.draw() < 0.3 else 1.0))
        return (y * (1.0 if self.draw() < 0.5 else -1.0)).exp().sin()


class OwnGenerators(Doubled):
    """Its generators are attributes, and are seeded anew in no step."""

    def __init__(self) -> None:
        super().__init__(lambda: (self.python.random() + self.numpy.random()) / 2)
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)


class Clipping(Linear):
    """Looks at values, which only later are large."""

    def forward(self, x):
        y = torch.sin(super().forward(x))
        if y.detach().abs().sum() > x.detach().abs().sum() * 0.6:
            y = y * 0.25
        return y.exp().sin() / (1.0 + float(y.detach().amax().round()))


class Experts(nn.Module):
    """Sizes follow the routing."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(1, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero()[:, 0]
            y = y.index_add(0, rows, torch.sin(expert(x[rows])) * weights[rows])
        return x + y


class EqualExperts(Experts):
    """Each expert gets as many rows, and which expert comes first follows the data."""

    def forward(self, x):
        scores = self.router(x)
        first = int(scores.sum(0).argmax())
        parts = x.sin()[scores[:, first].argsort()].chunk(2)
        return torch.cat([self.experts[(first + k) % 3](part.exp()) for k, part in enumerate(parts)]).sin()


BRANCHES = {
    "python": partial(Doubled, random.random),
    "numpy": partial(Doubled, np.random.rand),
    "torch": partial(Doubled, lambda: torch.rand(()).item()),
    **{kind.__name__: kind for kind in (OwnGenerators, Clipping, Experts, EqualExperts)},
}


@ways
@pytest.mark.parametrize("kind", BRANCHES)
def test_branches(kind, policy, fraction):
    check(lambda: Net(BRANCHES[kind]), changing(unchanged, 16), policy=policy, fraction=fraction, freed=-1.0)


# Calls that differ though nothing shows it before


class Hidden(Mlp):
    """Does something else, by an attribute of the class, in its middle."""

    differs = ""

    def forward(self, x):
        y = torch.sin(super().forward(x))
        if Hidden.differs == "more operators":
            y = y * 0.5
        one, two = y.sin().exp(), y.cos().exp()
        z = two.sin() if Hidden.differs == "other operators" else one * two
        start = 2 if Hidden.differs == "other places" else 0
        part = z[start : start + 4]
        z = z.sin() + (part * part).sum() + z[: 6 if Hidden.differs == "other sizes" else 4].exp().sum()
        return z.exp() if Hidden.differs == "more operators" else z


@ways
@pytest.mark.parametrize("how", ["other sizes", "other operators", "other places", "more operators"])
def test_a_call_that_saves_something_else_is_kept(how, policy, fraction, monkeypatch):
    def change(model, k):
        monkeypatch.setattr(Hidden, "differs", how if k in (6, 9) or k > 11 else "")

    check(lambda: Net(Hidden), changing(change, 16), policy=policy, fraction=fraction, freed=-1.0)


class Halves(nn.Module):
    """Its first half is dropped before it differs in the second one; a gradient may be computed between both."""

    asks = differs = False

    def __init__(self):
        super().__init__()
        self.one, self.two = Mlp(), Mlp()

    def forward(self, x):
        y = self.one(torch.sin(x))
        if Halves.asks:
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            y = y + slope
        z = self.two(torch.sin(y))
        return z[:5].exp().sum() + z if Halves.differs else z


@ways
def test_a_call_that_differs_when_its_first_half_is_dropped(policy, fraction, monkeypatch):
    def change(model, k):
        monkeypatch.setattr(Halves, "differs", k in (6, 9))

    check(lambda: Net(Halves), changing(change), policy=policy, fraction=fraction)


@ways
def test_gradients_between_two_halves(policy, fraction, monkeypatch):
    monkeypatch.setattr(Halves, "asks", True)
    check(lambda: Net(Halves), train, policy=policy, fraction=fraction)


def test_calls_of_a_kind_are_traced_once():
    """A policy of the program is called with the operators of traced calls."""
    seen: list[object] = []

    def policy(ctx, operator, *args, **kwargs):
        seen.append(operator)
        return False

    model = Net(Linear)
    offload(model, layers="blocks.?", recompute=policy, fraction=0.0)
    for k, rows in enumerate([16, 16, 8, 16, 8, 8, 16]):
        seen.clear()
        model(batch(k, rows)).sum().backward()
        assert bool(seen) == (k in (0, 2))
