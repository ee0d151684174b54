"""Invariant 7: an exception anywhere leaves no hook installed and no memory held; the next step works."""

from __future__ import annotations

import pytest
import torch
from helpers import forward, make, no_gc, nothing_held, right
from torch import nn

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def start():
    return torch.randn(64, 64, requires_grad=True) * 1.0


@pytest.fixture
def layers():
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)])


def test_in_forward_while_the_graph_is_held_on_to(layers):
    """The traceback, or the program, keeps the tensors: the layer that failed says that the pass is over."""
    context, sync = make(2, 4)
    held = []
    try:
        x = start()
        for k, layer in enumerate(layers):
            with context:
                x = layer(x)
                held.append(x)
                if k == 1:
                    raise KeyError("boom")
            x = sync(x)
    except KeyError as error:
        kept = error
    y = forward(list(layers), start(), context, sync)
    assert context.statistics().passes == 2
    y.sum().backward()
    del kept, held, x, y
    right(layers, context, sync)


def test_in_a_backward_function_and_in_a_user_hook(layers):
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("boom")

    def run(insert):
        x = start()
        for k, layer in enumerate(layers):
            with context:
                x = layer(x)
                if k == 1 and insert == "function":
                    x = Boom.apply(x)
            x = sync(x)
            if k == 1 and insert == "hook":
                x.register_hook(fail)
        with pytest.raises(KeyError, match="boom"):
            x.sum().backward()

    def fail(grad):
        raise KeyError("boom")

    context, sync = make(2, 4)
    with no_gc():
        for insert in ("function", "hook", "function"):
            run(insert)
            nothing_held(context)
        right(layers, context, sync)
