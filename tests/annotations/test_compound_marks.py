"""A mark on a compound tensor or object applies to each of its parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import min_elements, plain, same_bits
from torch import Tensor, nn
from wrappers import ONE, N, Quantized, QuantizedTensor, Two, Uses, one_layer, values

import actoffload
from actoffload.report import Reason


@pytest.fixture(autouse=True)
def _small_tensors_are_offloaded():
    with min_elements(64):
        yield


MARKED: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, ...]]]] = {
    "wrapper": (lambda: Two(values(), values()), lambda t: (t,)),
    "wrapper in a wrapper": (lambda: Two(Two(values(), values()), Two(values(), values())), lambda t: (t.a, t.b.b)),
    "prepared for saving": (lambda: QuantizedTensor(values()), lambda t: (t,)),
    "an object": (lambda: Quantized(values()), lambda t: (t.rows, t.columns)),
}


@pytest.mark.parametrize("kind", MARKED)
def test_a_mark_applies_to_every_part(kind):
    build, saved = MARKED[kind]
    thing, other = build(), build()
    actoffload.mark_not_offload(thing, None)
    _, statistics = one_layer(lambda x: Uses.apply(x, [], *saved(thing), *saved(other)))
    _, alone = one_layer(lambda x: Uses.apply(x, [], *saved(other)))
    assert alone.bytes_offloaded > 0
    assert statistics.bytes_offloaded == alone.bytes_offloaded
    assert statistics.tensors_kept[Reason.MARKED] == alone.tensors_offloaded


def test_an_object_is_marked_and_used_by_a_fused_function():
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, keep):
            quantized = Quantized(x)
            if keep:
                actoffload.mark_not_offload(quantized)
            out = quantized.read() @ weight
            parts, ctx.quantized = quantized.prepare_for_saving()
            ctx.save_for_backward(weight, *parts)
            return out

        @staticmethod
        def backward(ctx, grad):
            weight, *parts = ctx.saved_tensors
            assert ctx.quantized.restore_from_saved(parts) == []
            return grad @ weight.t(), ctx.quantized.read().t() @ grad, None

    class Layer(nn.Module):
        def __init__(self, keep: bool) -> None:
            super().__init__()
            self.weight, self.keep = nn.Parameter(values()), keep

        def forward(self, x: Tensor) -> Tensor:
            return Fused.apply(x, self.weight, self.keep)

    for keep in (False, True):
        layer = Layer(keep)
        x = torch.ones(N, N, requires_grad=True)
        wanted = torch.autograd.grad(plain([layer], x * 1.0).sum(), [x, layer.weight])
        grad, statistics = one_layer(layer)
        assert same_bits(grad, wanted[0])
        assert same_bits(layer.weight.grad, wanted[1])
        assert statistics.bytes_offloaded == (0 if keep else ONE // 2)
        assert statistics.tensors_kept.get(Reason.MARKED, 0) == (2 if keep else 0)


class HasDataTensors:
    """An object with `get_data_tensors` only."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self.tensors = tensors

    def get_data_tensors(self) -> Any:
        return self.tensors if len(self.tensors) > 1 else self.tensors[0]


@pytest.mark.parametrize("more", [(), (None,)])
def test_an_object_with_only_get_data_tensors_is_marked(more):
    tensor = values()
    actoffload.mark_not_offload(HasDataTensors(tensor, *more))
    _, statistics = one_layer(lambda x: Uses.apply(x, [], tensor))
    assert statistics.tensors_kept == {Reason.MARKED: 1}
