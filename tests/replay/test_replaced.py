"""What a program replaces while it trains: weights, buffers, functions and values that are part of no module."""

import gc
import weakref
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composing import each_step, gradients
from recomputing import WIDTH, Net, batch, check, ways
from torch import nn
from torch.func import functional_call

from actoffload.replay.tracer import Tracer

STEPS = 6


class Scaled(nn.Module):
    """Reads a buffer, two weights of its own, and whatever a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.register_buffer("factor", torch.ones(WIDTH))
        self.function = torch.tanh
        self.setting = None

    def forward(self, x):
        return x + self.function(self.inner(x) * self.factor).sin() @ self.weight


# Between forward and backward


@ways
@pytest.mark.parametrize("forwards", [1, 2])
def test_buffers_that_are_replaced_before_backward(forwards, policy, fraction):
    def loss(model, k):
        total = 0.0
        for each in range(forwards):
            for block in model.blocks:
                block.factor = torch.full((WIDTH,), 1.0 + k + each)
            total = total + model(batch(k)).square().sum()
        for block in model.blocks:
            block.factor = torch.full((WIDTH,), -1.0)
        return total

    check(lambda: Net(Scaled), each_step(loss, STEPS), policy=policy, fraction=fraction)


# In a forward


@ways
def test_weights_that_functional_call_replaces_with_what_is_made_of_them(policy, fraction):
    class Functional(Scaled):
        def forward(self, x):
            return x + torch.tanh(functional_call(self.inner, {"weight": self.inner.weight * 1.1}, (x,))).sin()

    def use(model):
        found = []
        for k in range(STEPS):
            model(batch(k)).square().sum().backward()
            found += [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.grad is not None:
                        weight -= 0.01 * weight.grad
        return [grad for grad in found if grad is not None]

    check(lambda: Net(Functional), use, policy=policy, fraction=fraction)


@ways
@pytest.mark.parametrize("kind", [lambda weight: weight.requires_grad_(), nn.Parameter], ids=["tensor", "parameter"])
def test_weights_from_outside_that_functional_call_puts_in_a_module(kind, policy, fraction):
    """In the first call they are equal to those of the module."""

    class Fast(Scaled):
        def __init__(self) -> None:
            super().__init__()
            fast = {name: kind(weight.detach().clone()) for name, weight in self.inner.named_parameters()}
            self.fast = [fast]  # which is in no key

        def forward(self, x):
            return x + torch.tanh(functional_call(self.inner, self.fast[0], (x,))).sin() @ self.weight

    def use(model):
        found = []
        for k in range(STEPS):
            model(batch(k)).square().sum().backward()
            for block in model.blocks:
                found += [fast.grad.clone() for fast in block.fast[0].values()]
                block.fast[0] = {name: kind((fast - fast.grad).detach()) for name, fast in block.fast[0].items()}
        return found

    check(lambda: Net(Fast), use, policy=policy, fraction=fraction)


@ways
def test_other_weights_in_each_call_of_the_model(policy, fraction):
    def use(model):
        found = []
        for k in range(STEPS):
            weights = {name: weight * (1.0 + 0.1 * k) for name, weight in model.named_parameters()}
            functional_call(model, weights, (batch(k),)).square().sum().backward()
            found += gradients(model)
        return found

    check(lambda: Net(Scaled), use, policy=policy, fraction=fraction)


# Between steps


class Mode(IntEnum):
    ONE = 1
    TWO = 2


HELD = {"scale": 0.0}, [0.0]
"""A dictionary and a list that are edited in place."""


def edited(held, key, k: int):
    held[key] = float(k)
    return held


VALUES = {
    "number of NumPy": np.float64,
    "enumeration": lambda k: Mode(k % 2 + 1),
    "tuple": lambda k: (1, float(k)),
    "array": lambda k: np.array([1.0, k]),
    "function": lambda k: lambda: float(k),
    "settings": lambda k: SimpleNamespace(scale=float(k)),
    "edited dictionary": lambda k: edited(HELD[0], "scale", k),
    "edited list": lambda k: edited(HELD[1], 0, k),
}


def number(value) -> float:
    if callable(value):
        return value()
    if isinstance(value, (dict, SimpleNamespace)):
        return dict(getattr(value, "__dict__", value))["scale"]
    return float(value[-1] if isinstance(value, (tuple, list, np.ndarray)) else value)


CASES = [(name, argument) for name in VALUES for argument in (True, False) if (name, argument) != ("array", False)]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_values_that_change_from_step_to_step(name, argument):
    make = VALUES[name]

    class Reads(Scaled):
        def forward(self, x, value=None):
            scale = number(self.setting if value is None else value)
            return x + torch.tanh(self.inner(x) * (1.0 + scale)).sin() @ self.weight

    class Model(Net):
        value = make(0)

        def call(self, block, x):
            block.setting = self.value
            return block(x, self.value) if argument else block(x)

    def loss(model, k):
        model.value = make(k)
        return model(batch(k)).square().sum()

    check(lambda: Model(Reads), each_step(loss, STEPS))


def test_weights_that_were_replaced_are_freed():
    found = []

    def use(model):
        for k in range(STEPS):
            found.extend(map(weakref.ref, model.parameters()))
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            model(batch(k)).square().sum().backward()
        gc.collect()
        now = {id(weight) for weight in model.parameters()}
        assert not [weight for ref in found if (weight := ref()) is not None and id(weight) not in now]
        return gradients(model)

    check(lambda: Net(Scaled), use)


@pytest.mark.parametrize(
    "note",
    [lambda y: {"mean": y.mean()}, lambda y: {"rows": [y, y], "layer": 1}, lambda y: SimpleNamespace(mean=y, layer=1)],
    ids=["dict", "with a number", "object"],
)
def test_calls_that_note_tensors_in_their_module_are_not_traced_each_time(note, monkeypatch):
    """As a router keeps the load of its experts."""
    traced = []
    begin = Tracer.begin
    monkeypatch.setattr(Tracer, "begin", lambda tracer: (traced.append(tracer), begin(tracer))[1])

    class Noting(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.noted = {}

        def forward(self, x):
            y = super().forward(x)
            self.noted = note(y.detach())
            return y

    def loss(model, k):
        if k == 2:
            traced.clear()
        return model(batch(k)).square().sum()

    check(lambda: Net(Noting), each_step(loss, STEPS))
    assert not traced
