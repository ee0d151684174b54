"""Jagged nested tensors: their values leave, what says where they begin stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import make, no_gc, nothing_held, same_bits
from torch import Tensor, nn
from wrappers import Saves, one_layer, two_more

import actoffload
from actoffload.report import Reason

MODIFIED = "modified by an inplace operation"


pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class Attention(nn.Module):
    """A pre-norm attention block on sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        self.qkv = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (linear(y).unflatten(-1, [4, 8]).transpose(1, 2) for linear in self.qkv)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


OFFSETS = (0, 5, 12, 20)


def jagged(values: Tensor, offsets: Tensor | None = None) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(OFFSETS) if offsets is None else offsets)


class Whole(nn.Module):
    """Layers between a plain tensor and a plain tensor."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def run(self, x: Tensor, context: Any, sync: Any) -> Tensor:
        y = jagged(x)
        for layer in self.layers:
            with context:
                y = layer(y)
            y = sync(y)
        return y.values()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of attention on the CPU
def test_attention_on_jagged_tensors():
    model = Whole([Attention() for _ in range(4)])
    x = torch.randn(20, 32, requires_grad=True)
    wanted = torch.autograd.grad(
        model.run(x * 1.0, *actoffload.get_cpu_offload_context()).square().mean(), [x, *model.parameters()]
    )
    context, sync = make(2, 4)
    with no_gc():
        for _ in range(2):
            loss = model.run(x * 1.0, context, sync).square().mean()
            got = torch.autograd.grad(loss, [x, *model.parameters()])
            del loss
            nothing_held(context)
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a, b)
    statistics = context.statistics()
    assert Reason.SUBCLASS not in statistics.tensors_kept
    assert statistics.tensors_kept[Reason.SMALL] > 0
    # At least a layer's input, the norm's output, query with key and value, and what attention returns.
    assert statistics.bytes_offloaded >= 2 * 2 * (1 + 1 + 3 + 1) * 20 * 32 * 4
    assert statistics.bytes_reloaded == statistics.bytes_offloaded


def test_what_is_unpacked_is_ragged_in_the_same_way():
    """Its ragged size is the same symbol, so it goes together with tensors that stayed; large offsets stay too."""
    offsets = torch.arange(0, 201, 2)
    tensor, other = (jagged(torch.randn(200, 4), offsets) for _ in range(2))
    seen: list[Any] = []
    _, statistics = one_layer(lambda x: Saves.apply(x, tensor.transpose(1, 2), seen))
    (back,) = seen
    assert statistics.bytes_offloaded == 200 * 4 * 4
    assert statistics.tensors_kept == {Reason.MARKED: 1}
    assert back.shape == tensor.transpose(1, 2).shape
    assert back.offsets() is offsets
    assert back.values().data_ptr() != tensor.values().data_ptr()
    assert same_bits((back + other.transpose(1, 2)).values(), (tensor + other).values().t())


def test_a_jagged_tensor_changed_in_place_raises():
    context, sync = make(1, 3)
    leaf = torch.randn(20, 32, requires_grad=True)
    with context:
        h = jagged(leaf * 1.0).sin()
        y = h.square().values()
        with torch.no_grad():
            h.add_(1)
    y = two_more(sync(y), context, sync)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()
    del y, h
    nothing_held(context)


def test_a_jagged_tensor_of_a_parameter_stays():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(20, 32))

        def forward(self, x: Tensor) -> Tensor:
            return Saves.apply(x, jagged(self.table), [])

    _, statistics = one_layer(Layer())
    assert statistics.tensors_kept == {Reason.PARAMETER: 1}
