"""Invariant 7: the next step works after an exception; no memory on the host or device, and copies that fail."""

from __future__ import annotations

import pytest
import torch
from helpers import Failing, forward, make, nothing_held, plain, right, same_bits
from torch import nn

from actoffload import HostMemoryWarning
from actoffload.report import Reason

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def start():
    return torch.randn(64, 64, requires_grad=True) * 1.0


@pytest.fixture
def layers():
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)])


@pytest.mark.parametrize("max_host_bytes", [0, 2**21 - 1, None])
def test_no_host_memory(layers, max_host_bytes):
    device = Failing()
    if max_host_bytes is None:
        device.fail("empty_host", times=10**6)
    context, sync = make(2, 4, device=device, max_host_bytes=max_host_bytes)
    x = torch.randn(64, 64)
    parameters = list(layers.parameters())
    want = torch.autograd.grad(plain(list(layers), x).sum(), parameters)

    def three_steps():
        return [torch.autograd.grad(forward(list(layers), x, context, sync).sum(), parameters) for _ in range(3)]

    with pytest.warns(HostMemoryWarning) as caught:
        steps = three_steps()
    assert all(same_bits(a, b) for got in steps for a, b in zip(want, got, strict=True))
    assert len(caught) == 1
    assert "stays on the device" in str(caught[0].message)
    statistics = context.statistics()
    assert statistics.bytes_offloaded == 0
    # In each step: x, and what tanh leaves, for layers 0 and 1; layer 1's input is layer 0's output.
    assert statistics.tensors_kept[Reason.HOST_FULL] == 3 * 4
    assert statistics.bytes_kept[Reason.HOST_FULL] == 3 * 4 * 64 * 64 * 4
    nothing_held(context)


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("call", ["empty_device", "to_device"])
def test_a_backward_without_memory_is_tried_again(layers, call, after):
    """As a program does that catches out-of-memory, frees something and goes on with the retained graph."""
    device = Failing()
    context, sync = make(2, 4, device=device)
    x = torch.randn(64, 64)
    parameters = list(layers.parameters())
    want = torch.autograd.grad(plain(list(layers), x).sum(), parameters)
    y = forward(list(layers), x, context, sync)
    torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    device.fail(call, after=after)
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    got = torch.autograd.grad(y.sum(), parameters)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    del y
    nothing_held(context)


def test_an_exception_in_forward_while_the_graph_is_held(layers):
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
