"""Small layers that save tensors in every way: shared, sliced, viewed, and on several streams."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, relu
from wrappers import Scaled, Uses

import actoffload

ROWS, WIDTH = 8, 32
LEAST = 32
"""Smallest number of elements of a tensor that is offloaded while these models run."""


Layer = Callable[[Any, Tensor, Tensor], Tensor]
"""Takes a run (see `harness.Run`), an input and a weight."""


class _Fused(torch.autograd.Function):
    """Save, at its end, tensors that were final long before; two of them are saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        hidden = x @ w
        actoffload.start_offload(hidden, offload_base_tensor=bool(x.size(0) % 2))
        gate = hidden.sigmoid()
        actoffload.start_offload(gate)
        noise = gate * 3.0
        ctx.save_for_backward(x, w, hidden, gate, hidden, gate.t())
        return hidden * gate + 0.0 * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w, hidden, gate, again, transposed = ctx.saved_tensors
        inner = grad * gate + grad * again * transposed.t() * (1 - gate)
        return inner @ w.t() + 0 * hidden.sum(), x.t() @ inner


class _Bits(torch.autograd.Function):
    """Save the same bytes as floats and, through a dtype view, as integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y.view(torch.int32), y.view(torch.int16)[:, 1::2], y[2:])
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        integers, halves, tail = ctx.saved_tensors
        y = integers.view(torch.float32)
        sign = torch.where(halves < 0, -1.0, 1.0)
        return grad * (1 - y * y) * sign + torch.cat([torch.zeros_like(y[:2]), tail])


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, env: Any) -> Tensor:
        ctx.env = env
        ctx.save_for_backward(x * 2.0)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (doubled,) = ctx.saved_tensors
        ctx.env.maybe_fail()
        return grad + 0 * doubled, None


def _linear(env: Any, x: Tensor, w: Tensor) -> Tensor:
    return relu(x @ w)


def _norm(env: Any, x: Tensor, w: Tensor) -> Tensor:
    return layer_norm(x @ w, (WIDTH,)).tanh()


def _chunk(env: Any, x: Tensor, w: Tensor) -> Tensor:
    a, b = torch.cat([x @ w, x], dim=-1).chunk(2, dim=-1)
    return a * b.sigmoid() + b * b


def _transpose(env: Any, x: Tensor, w: Tensor) -> Tensor:
    t = (x @ w).t()
    return (t * t.contiguous()).t() * x


def _expand(env: Any, x: Tensor, w: Tensor) -> Tensor:
    mean = x.mean(0, keepdim=True).expand(ROWS, -1)  # few distinct elements: kept
    wide = (x @ w).unsqueeze(0).expand(3, -1, -1)  # each element three times
    return (wide * wide.cos()).sum(0) * mean


def _complex(env: Any, x: Tensor, w: Tensor) -> Tensor:
    z = torch.view_as_complex((x @ w).view(ROWS, WIDTH // 2, 2))
    return torch.view_as_real(z * z.conj() + z * z).reshape(ROWS, WIDTH) * 0.1


def _overlap(env: Any, x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    top, bottom, window = h[:6], h[2:], h.as_strided((14, WIDTH), (WIDTH // 2, 1))
    y = top * bottom
    return torch.cat([y, y[:2]]) + (window * window).sum(0)


def _columns(env: Any, x: Tensor, w: Tensor) -> Tensor:
    h = x @ torch.cat([w, w, w, w], dim=1)
    a, b = h[:, 3:9], h[:, 70:76]  # 5 % of each row
    return x + (a * b).sum(1, keepdim=True)


def _qkv(env: Any, x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ torch.cat([w, w * 2, w * 3], dim=1)).split(WIDTH, dim=1)
    return (q * k).softmax(1) * v


def _first(env: Any, x: Tensor, w: Tensor) -> Tensor:
    """Use the tensor that the first such layer of the pass created, in each of them."""
    shared = env.state.setdefault("shared", x @ w)
    return x * shared + shared.t().reshape(ROWS, WIDTH).sin()


def _part(env: Any, x: Tensor, w: Tensor) -> Tensor:
    """Save a different part of one storage in each layer."""
    wide = env.state.setdefault("wide", torch.cat([x @ w] * 4, dim=1))
    start = WIDTH * (env.parts % 4)
    env.parts += 1
    return x * wide[:, start : start + WIDTH]


def _inplace(env: Any, x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    actoffload.start_offload(h)
    h.add_(1.0).relu_()
    return h * h.sigmoid()


def _marked(env: Any, x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    actoffload.mark_not_offload(h)
    return h * h.cos()


def _fused(env: Any, x: Tensor, w: Tensor) -> Tensor:
    return _Fused.apply(x, w)  # type: ignore[no-any-return, no-untyped-call]


def _bits(env: Any, x: Tensor, w: Tensor) -> Tensor:
    return _Bits.apply(x @ w)  # type: ignore[no-any-return, no-untyped-call]


def _failing(env: Any, x: Tensor, w: Tensor) -> Tensor:
    return _Fail.apply(x @ w, env).cos() * x  # type: ignore[no-any-return, no-untyped-call]


def _compound(env: Any, x: Tensor, w: Tensor) -> Tensor:
    """Save values of eight bits with a scale that is too small to leave."""
    h = x @ w
    return Uses.apply(x, [], Scaled.of(h)) * Uses.apply(h, [], Scaled.of(h))  # type: ignore[no-untyped-call]


def _side(env: Any, x: Tensor, w: Tensor) -> Tensor:
    h = env.made((x @ w).tanh())
    with env.side(join=True):
        g = env.made(h.sigmoid()) * h
        env.made(g)
    return g * h


def _fork(env: Any, x: Tensor, w: Tensor) -> Tensor:
    """Start a branch on a side stream that saves memory of this stream; the end of the forward joins it."""
    y = x.sin()
    h = env.made(y @ w)
    with env.side(join=False):
        forked = h * h
        if forked.requires_grad:  # only then does autograd keep `h` until the streams are joined
            env.read(h)
        env.state["forked"] = forked + env.state["forked"] if "forked" in env.state else forked
    return y * y


def _double(env: Any, x: Tensor, w: Tensor) -> Tensor:
    env.crossing()
    y = (x @ w).double()
    y = y * y.tanh()
    env.crossing()
    return y.float() * x


KINDS: dict[str, Layer] = {
    "linear": _linear,
    "norm": _norm,
    "chunk": _chunk,
    "transpose": _transpose,
    "expand": _expand,
    "complex": _complex,
    "overlap": _overlap,
    "columns": _columns,
    "qkv": _qkv,
    "first": _first,
    "part": _part,
    "inplace": _inplace,
    "marked": _marked,
    "fused": _fused,
    "bits": _bits,
    "failing": _failing,
    "compound": _compound,
}
STREAM_KINDS: dict[str, Layer] = {"side": _side, "fork": _fork}
DEVICE_KINDS: dict[str, Layer] = {"double": _double}


def weights(count: int) -> list[Tensor]:
    """Return one matrix per operation, the same on every call."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(count)]
