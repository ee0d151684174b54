"""Several backwards through one pass: one inside of another, and two that overlap in time."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import make, nothing_held, plain, same_bits
from torch import nn

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


@pytest.fixture
def layers():
    torch.manual_seed(5)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])


def data() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(3))


def run(layers, context, sync):
    """Return the outputs of all layers."""
    x, outputs = data(), []
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)
        outputs.append(x)
    return outputs


def check(layers, *got):
    want = torch.autograd.grad(plain(list(layers), data()).square().sum(), list(layers.parameters()))
    for grads in got:
        assert all(same_bits(a, b) for a, b in zip(want, grads, strict=True))


@pytest.mark.parametrize("at", range(5))
def test_a_backward_inside_of_a_backward(layers, at):
    """The inner one passes layers that the outer one still needs; each is reloaded once, and ahead."""
    context, sync = make(4, 6)
    parameters = list(layers.parameters())
    outputs = run(layers, context, sync)
    loss = outputs[-1].square().sum()
    inner = []

    def hook(gradient):
        if not inner:
            inner.append(())  # the inner backward comes here too
            inner.append(torch.autograd.grad(loss, parameters, retain_graph=True))

    outputs[at].register_hook(hook)
    outer = torch.autograd.grad(loss, parameters, retain_graph=True)
    check(layers, inner[1], outer)
    statistics = context.statistics()
    assert statistics.reloaded_on_demand == 0
    # The inner one reloads again only what the outer one had ended: at most layers 2 and 3.
    assert 4 <= statistics.reloaded_ahead <= 6
    assert at < 3 or statistics.reloaded_ahead == 4
    outputs = loss = hook = None
    nothing_held(context)


def test_a_backward_that_ends_while_another_waits(layers):
    """The first one waits at layer 1; the second one comes, passes all layers and ends; the first one goes on."""
    context, sync = make(4, 6)
    parameters = list(layers.parameters())
    outputs = run(layers, context, sync)
    loss = outputs[-1].square().sum()
    reached, go_on = threading.Event(), threading.Event()
    first: list = []

    def hook(gradient):
        if not reached.is_set():
            reached.set()
            assert go_on.wait(30)

    outputs[1].register_hook(hook)

    def work():
        first.append(torch.autograd.grad(loss, parameters, retain_graph=True))

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(30)
    second = torch.autograd.grad(loss, parameters, retain_graph=True)
    # What the first one has yet to use is on the device.
    assert context.statistics().reloaded_on_demand == 0
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    check(layers, first[0], second)
    assert context.statistics().reloaded_on_demand == 0
    # The graph is retained, so the last of the two has put everything back on the host.
    resident = context.statistics().resident_bytes
    third = torch.autograd.grad(loss, parameters, retain_graph=True)
    check(layers, third)
    assert context.statistics().resident_bytes == resident
    assert context.statistics().reloaded_on_demand == 0
    outputs = loss = hook = None
    nothing_held(context)
