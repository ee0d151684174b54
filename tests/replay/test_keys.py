"""Calls that do something else have another program, or are traced each time: right bits, and no error."""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composing import each_step
from recomputing import WIDTH, Mlp, Net, batch, check, gradients, policies, train, ways
from torch import Tensor, nn
from whole_model import offload

from actoffload.replay import Tracer

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


def test_zero_with_a_sign_and_not_a_number_in_arguments(monkeypatch):
    """Zeros are equal whatever their sign, and NaN is equal to nothing: it would be traced in each call."""
    traced = []
    begin = Tracer.begin
    monkeypatch.setattr(Tracer, "begin", lambda tracer: (traced.append(tracer), begin(tracer))[1])

    class Scaled(Mlp):
        def forward(self, x, factor):
            y = torch.sin(super().forward(x))
            return (y if math.isnan(factor) else y * factor).sin()

    class Model(Net):
        factor = 0.0

        def call(self, block, x):
            return block(x, self.factor)

    def change(model, k):
        model.factor = (0.0, -0.0, float("nan"))[k % 3]
        if k == 3:
            traced.clear()

    check(lambda: Model(Scaled), changing(change))
    assert not traced


# Attributes


def anneal(model, k):
    for block in model.blocks:
        block.scale = 1.0 - k / 20


def turn_sign(model, k):
    for block in model.blocks:
        block.scale = 0.0 if k % 3 else -0.0


def turn_array(model, k):
    """Change an array of NumPy without dimensions, less than its text shows."""
    for block in model.blocks:
        block.scale = np.array(0.001234567 + 1e-9 * (k % 3 == 2))


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
@pytest.mark.parametrize(
    "change", [anneal, turn_sign, turn_array, alternate, train_and_evaluate, freeze, hook, replace, patch]
)
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


class Toggling(Linear):
    def forward(self, x):
        self.mode = "cos" if self.mode == "sin" else "sin"
        return super().forward(x)


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
@pytest.mark.parametrize("kind", [Counting, Toggling, Lazily])
def test_attributes_that_a_call_changes(kind, policy, fraction):
    check(lambda: Net(kind), changing(lambda model, k: None), policy=policy, fraction=fraction, freed=-1.0)


# What the call decides by itself


class Doubled(Linear):
    """Saves the same sizes whatever it draws."""

    draw = staticmethod(random.random)

    def forward(self, x):
        y = super().forward(torch.sin(x) * (2.0 if self.draw() < 0.3 else 1.0))
        return (y * (1.0 if self.draw() < 0.5 else -1.0)).exp().sin()


class DoubledByNumpy(Doubled):
    draw = staticmethod(np.random.rand)


class DoubledByOwnGenerators(Doubled):
    """Its generators are attributes, and are seeded anew in no step."""

    def __init__(self):
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)

    def draw(self):
        return (self.python.random() + self.numpy.random()) / 2


class DoubledByTorch(Doubled):
    @staticmethod
    def draw():
        return torch.rand(()).item()


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


BRANCHES = [Doubled, DoubledByNumpy, DoubledByOwnGenerators, DoubledByTorch, Clipping, Experts, EqualExperts]


@ways
@pytest.mark.parametrize("kind", BRANCHES)
def test_branches(kind, policy, fraction):
    check(lambda: Net(kind), changing(lambda model, k: None, 16), policy=policy, fraction=fraction, freed=-1.0)


# Calls that differ though nothing shows it before


class Hidden(Mlp):
    """Does something else, by attributes of the class, in its middle."""

    sizes, first, start, double, more = 4, True, 0, False, False

    def forward(self, x):
        y = torch.sin(super().forward(x))
        if Hidden.more:
            y = y * 0.5
        one, two = y.sin().exp(), y.cos().exp()
        z = one * two if Hidden.first else two.sin()
        part = z[Hidden.start : Hidden.start + 4]
        z = z.sin() + (part * part).sum() + z[: Hidden.sizes].exp().sum()
        return z.exp() if Hidden.more else z


@pytest.fixture(autouse=True)
def _as_before():
    yield
    Hidden.sizes, Hidden.first, Hidden.start, Hidden.more = 4, True, 0, False


def other_sizes(model, k):
    Hidden.sizes = 6 if k == 7 or k > 9 else 4


def other_operators(model, k):
    Hidden.first = k not in (6, 9)


def other_places(model, k):
    Hidden.start = k % 4 if k > 5 else 0


def more_operators(model, k):
    Hidden.more = k in (6, 9)


@ways
@pytest.mark.parametrize("change", [other_sizes, other_operators, other_places, more_operators])
def test_a_call_that_saves_something_else_is_kept(change, policy, fraction):
    check(lambda: Net(Hidden), changing(change, 16), policy=policy, fraction=fraction, freed=-1.0)


class Halves(nn.Module):
    """Its first half is dropped before it differs in the second one; a gradient may be computed between both."""

    asks, differs = False, False

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
def test_a_call_that_differs_when_its_first_half_is_dropped(policy, fraction):
    def change(model, k):
        Halves.differs = k in (6, 9)

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
