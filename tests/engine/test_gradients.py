"""Invariant 1: outputs, gradients and buffers have the same bits with and without offload."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from helpers import check_same, make, min_elements, nothing_held, same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class Attention(nn.Module):
    """Attention from one fused projection, with fewer key and value heads than query heads."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2, *, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.fused = heads, groups, width // heads, fused
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        split = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = self.qkv(self.norm(x)).split(split, dim=-1)
        q = q.view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = (a.view(b, t, self.groups, self.size).transpose(1, 2) for a in (k, v))
        k, v = (a[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2) for a in (k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(b, t, -1))


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


@pytest.mark.parametrize("fused", [True, False])
def test_attention(fused):
    context = check_same([Attention(fused=fused) for _ in range(5)], torch.randn(2, 16, 32), 3)
    assert context.statistics().tensors_offloaded > 10


def test_convolution_and_batchnorm_with_its_buffers():
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
    check_same(layers, torch.randn(2, 4, 8, 8), 2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return torch.tanh(y.conj() * y) + y.mH.mT * x.imag


def test_complex():
    x = torch.randn(16, 16, dtype=torch.complex64)
    context = check_same([Complex() for _ in range(4)], x, 2, loss=lambda y: y.abs().mean())
    assert context.statistics().tensors_offloaded > 0


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
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpoint_inside_a_layer(reentrant, early_stop):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            more = {} if reentrant else {"early_stop": early_stop}
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant, **more)).relu()

    context = check_same([Layer() for _ in range(5)], torch.randn(6, 7, 32), 2)
    assert context.statistics().tensors_offloaded > 0


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
