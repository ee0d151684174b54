from __future__ import annotations

from typing import Any

import pytest
import torch
from adversary.device import AdversarialDevice
from adversary.harness import check
from adversary.layers import Layers, numbers, saving
from adversary.models import ROWS
from torch import Tensor


class _Aside(torch.autograd.Function):
    """Hands its gradient on; its backward uses a saved tensor on another stream, without a wait for it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, saved: Tensor, device: AdversarialDevice, side: Any, sums: list[Tensor]) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.device, ctx.side, ctx.sums = device, side, sums
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.device.on(ctx.side):
            (saved,) = ctx.saved_tensors
            ctx.sums.append(saved.sum())
        return grad, None, None, None, None


@pytest.mark.parametrize("first", ["side", "compute"])
def test_two_streams_use_one_storage(device: AdversarialDevice, w: Tensor, first: str) -> None:
    layers = Layers(None, 1)
    side = device.side_stream()
    h = numbers()
    sums: list[Tensor] = []

    def aside() -> Tensor:
        return _Aside.apply(w, h, device, side, sums)  # type: ignore[no-any-return, no-untyped-call]

    def layer() -> Tensor:
        early = saving(w, h) if first == "side" else aside()
        late = aside() if first == "side" else saving(w, h)
        return early + late  # what was made last is used first

    y = layers(layer)
    layers.out(0)
    layers.back(0)
    y.sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * h.sum() + 1.0)
    assert sums == [h.sum()]
    del y
    check(device, layers.context)


@pytest.mark.parametrize("dropped", [(0, 1), (1, 0)], ids=["0 dropped first", "1 dropped first"])
@pytest.mark.parametrize("reloaded", [(0, 1), (1, 0)], ids=["0 back first", "1 back first"])
def test_joined_host_memory_waits_for_every_reader(
    device: AdversarialDevice, w: Tensor, reloaded: tuple[int, int], dropped: tuple[int, int]
) -> None:
    """A tensor that was ready long ago goes to host memory in which two copies back have just been queued."""
    layers = Layers(None, 1)
    slab = layers(lambda: saving(w, numbers(rows=4 * ROWS)))
    layers.out(0)
    del slab
    graphs, passes = {}, {}
    for k in (0, 1):
        graphs[k] = layers(lambda k=k: saving(w, numbers(k, rows=2 * ROWS)))  # type: ignore[misc]
        passes[k] = layers.context.current_pass
        layers.out(0)
    held = layers.statistics.host_bytes
    last = layers(lambda: saving(w, numbers(5.0, rows=4 * ROWS)))
    for k in reloaded:
        layers.controller.start_reload_layer(0, in_pass=passes[k])
    for k in dropped:
        del graphs[k]
    layers.out(0)
    assert layers.statistics.host_bytes == held
    last.sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * numbers(5.0, rows=4 * ROWS).sum())
    del last
    check(device, layers.context)
