"""Several contexts at once, and other ways to enter one."""

from __future__ import annotations

import pytest
import torch
from helpers import any_size, forward, make, nothing_held, plain, same_bits
from torch import nn

from actoffload import ReferenceDevice
from actoffload.device import use


@pytest.fixture(autouse=True)
def _small_tensors_leave():
    with any_size(64):
        yield


@pytest.fixture
def layers():
    torch.manual_seed(5)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)])


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def gradients(layers, loss):
    return torch.autograd.grad(loss, list(layers.parameters()))


def check(layers, seed, loss):
    want = gradients(layers, plain(list(layers), data(seed)).square().sum())
    got = gradients(layers, loss)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


def test_two_contexts_nested(layers):
    outer, outer_sync = make(1, 3)
    inner, inner_sync = make(1, 3)

    def block(x):
        for layer in list(layers)[:3]:
            with inner:
                x = layer(x)
            x = inner_sync(x)
        return torch.sin(x)

    want = gradients(layers[:3], torch.relu(torch.tanh(torch.sin(plain(list(layers)[:3], data())))).sum())
    y = forward([block, torch.tanh, torch.relu], data(), outer, outer_sync)
    assert inner.statistics().tensors_saved == 4  # the first input and each output
    assert outer.statistics().tensors_saved == 3  # of sin, tanh and relu
    got = gradients(layers[:3], y.sum())
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    del y
    nothing_held(outer)
    nothing_held(inner)


def test_context_as_a_decorator(layers):
    context, sync = make(3, 5)

    @context
    def run(layer, x):
        """Run one layer."""
        return layer(x)

    assert run.__doc__ == "Run one layer."
    x = data()
    for layer in layers:
        x = sync(run(layer, x))
    check(layers, 0, x.square().sum())
    assert context.statistics().passes == 1


def test_use_nests():
    with use(ReferenceDevice()) as outer, use(ReferenceDevice()) as inner:
        assert make(1, 3, device=inner)[0].plan == make(1, 3, device=outer)[0].plan
