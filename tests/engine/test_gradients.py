"""Invariant 1: outputs, gradients and buffers have the same bits with and without offload."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from helpers import forward, make, min_elements, nothing_held, plain, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload.context.context import OffloadContext

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def check_same(layers: Sequence[torch.nn.Module], x: Tensor, num_layers: int) -> OffloadContext:
    """Train copies of the layers with and without offload; outputs, gradients and buffers must have equal bits.

    Returns the context, with its statistics, after all graphs are gone.
    """
    context, sync = make(num_layers, len(layers))
    results = []
    for offload in (False, True):
        copies = copy.deepcopy(list(layers))
        leaf = x.detach().clone().requires_grad_()
        torch.manual_seed(11)
        seen = []
        for _ in range(2):
            y = forward(copies, leaf * 1, context, sync) if offload else plain(copies, leaf * 1)
            y.square().mean().backward()
            seen.append(y.detach().clone())
            del y
        module = torch.nn.ModuleList(copies)
        results.append(
            [*seen, *(p.grad for p in module.parameters()), *(b.clone() for b in module.buffers()), leaf.grad]
        )
    without, with_ = results
    assert len(without) == len(with_)
    for k, (a, b) in enumerate(zip(without, with_, strict=True)):
        assert same_bits(a, b), f"result {k} of shape {tuple(a.shape)} differs"
    nothing_held(context)
    return context


def mlp(width: int = 32, dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, width),
    )


def test_the_limit_itself_with_large_tensors():
    with min_elements(256 * 1024):
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)]
        context = check_same(layers, torch.randn(512, 512), 2)
        one = 512 * 512 * 4
        assert context.statistics().bytes_offloaded == 2 * 2 * 2 * one  # steps, layers, input and pre-activation
        small = check_same(layers, torch.randn(511, 512), 2).statistics()
        assert small.bytes_offloaded == 0


@pytest.mark.parametrize(("num", "of"), [(0, 3), (1, 3), (2, 5), (3, 5), (5, 7)])
def test_mlp_with_dropout(num, of):
    context = check_same([mlp() for _ in range(of)], torch.randn(6, 7, 32), num)
    assert (context.statistics().bytes_offloaded > 0) == (num > 0)


def test_convolution_and_batchnorm_with_its_buffers():
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
    check_same(layers, torch.randn(2, 4, 8, 8), 2)


class Scale(torch.autograd.Function):
    """Saves an input, an output, an intermediate of another type, and None."""

    @staticmethod
    def forward(ctx, x, weight):
        small = (x * 3).to(torch.float8_e4m3fn)
        y = torch.sinh(x) * weight
        ctx.save_for_backward(x, y, small, None, weight)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y, small, nothing, weight = ctx.saved_tensors
        assert nothing is None
        assert small.dtype is torch.float8_e4m3fn
        return grad * (torch.cosh(x) * weight + y + small.to(x.dtype)), (grad * torch.sinh(x)).sum()


def test_custom_function_with_float8():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(x, self.weight)

    context = check_same([Layer() for _ in range(4)], torch.randn(16, 16), 2)
    # In each step the first x, and y and the fp8 copy of both layers; the second x is the first y.
    assert context.statistics().bytes_offloaded == 2 * (3 * 1024 + 2 * 256)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_the_context(reentrant):
    """Not the way to use it; the gradients must be right all the same."""
    torch.manual_seed(0)
    layers = nn.ModuleList([mlp(dropout=0.0) for _ in range(4)])
    x = torch.randn(6, 7, 32, requires_grad=True)
    want = torch.autograd.grad(nn.Sequential(*layers)(x).square().sum(), [x, *layers.parameters()])
    context, sync = make(2, 4)

    def block(h: Tensor, layer: nn.Module) -> Tensor:
        with context:
            h = layer(h)
        return sync(h)

    for k in range(2):
        h = x
        for layer in layers:
            h = checkpoint(block, h, layer, use_reentrant=reentrant)
        recomputed = reentrant and k == 0  # each layer is then a pass of its own
        with pytest.warns(UserWarning, match="Backward began after 1 layer") if recomputed else nullcontext():
            h.square().sum().backward()
        got = [x.grad, *(p.grad for p in layers.parameters())]
        assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
        x.grad = None
        layers.zero_grad()
        del h, got
    nothing_held(context)
