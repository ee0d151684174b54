"""Tensors made of several plain ones, and functions that save them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import helpers
import torch
from helpers import Saves, forward, make, nothing_held
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from actoffload.report import Statistics

N = 32
ONE = N * N * 4


class Two(Tensor):
    """Two tensors of one shape, side by side; every operation is done on both.  Any of them may be a wrapper itself."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor, size: Any = None, stride: Any = None) -> Two:
        return Tensor._make_wrapper_subclass(
            cls,
            a.size() if size is None else size,
            strides=a.stride() if stride is None else stride,
            dtype=a.dtype,
            device=a.device,
            requires_grad=a.requires_grad,
        )

    def __init__(self, a: Tensor, b: Tensor, size: Any = None, stride: Any = None) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["a", "b"], "the rest"

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], rest: str, size: Any, stride: Any) -> Two:
        assert rest == "the rest"
        return cls(inner["a"], inner["b"], size, stride)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        a, b = (
            func(*tree_map(pick, args), **tree_map(pick, kwargs))
            for pick in (lambda x: x.a if isinstance(x, Two) else x, lambda x: x.b if isinstance(x, Two) else x)
        )
        if isinstance(a, (tuple, list)):
            out: Any = type(a)(cls(p, q) if isinstance(p, Tensor) else p for p, q in zip(a, b, strict=True))
        else:
            out = cls(a, b) if isinstance(a, Tensor) else a
        return return_and_correct_aliasing(func, args, kwargs, out)


class Scaled(Tensor):
    """Values in eight bits with one scale: a float8 tensor, in small.  It can be read, and detached."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
        return Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device, requires_grad=False
        )

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self._data, self._scale = data, scale

    @staticmethod
    def of(values: Tensor) -> Scaled:
        scale = values.detach().abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
        return Scaled((values.detach() / scale).to(torch.float8_e4m3fn), scale, values.dtype)

    def read(self) -> Tensor:
        return self._data.to(self.dtype) * self._scale.to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_data", "_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["_data"], inner["_scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0]._data, args[0]._scale, args[0].dtype)
        if func is torch.ops.aten.t.default:
            return return_and_correct_aliasing(
                func, args, kwargs or {}, Scaled(args[0]._data.t(), args[0]._scale, args[0].dtype)
            )
        raise NotImplementedError(f"{func} on a Scaled tensor")


class Quantized:
    """Not a tensor: one byte for each value, a copy transposed for the other product, and a scale.

    With the methods by which Transformer Engine's quantized tensors are saved.
    """

    def __init__(self, values: Tensor) -> None:
        self.scale: Tensor | None = values.detach().abs().amax() / 127
        self.rows: Tensor | None = (values.detach() / self.scale).round().to(torch.int8)
        self.columns: Tensor | None = self.rows.t().contiguous()

    def read(self) -> Tensor:
        assert self.rows is not None
        assert self.scale is not None
        return self.rows.to(self.scale.dtype) * self.scale

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Any]:
        parts = [self.rows, self.columns, self.scale]
        self.rows = self.columns = self.scale = None
        return parts, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        self.rows, self.columns, self.scale = tensors[:3]
        return tensors[3:]

    def get_data_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.rows, self.columns


class QuantizedTensor(Quantized, Tensor):
    """The same as a tensor subclass, which autograd saves as such."""

    @staticmethod
    def __new__(cls, values: Tensor) -> QuantizedTensor:
        return Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        if isinstance(values, QuantizedTensor):
            self.rows, self.columns, self.scale = values.rows, values.columns, values.scale
        else:
            super().__init__(values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return QuantizedTensor(args[0])
        raise NotImplementedError(f"{func} on a QuantizedTensor")


def values(columns: int = N) -> Tensor:
    return torch.randn(N, columns, device=helpers.PLACE)


def read(thing: Any) -> Tensor:
    """Return a plain tensor to which every part contributes."""
    if isinstance(thing, Two):
        return read(thing.a) * 2 + read(thing.b)
    return thing.read() if hasattr(thing, "read") else thing


def structure(thing: Any) -> Any:
    """Describe a tensor and its parts, all the way down."""
    inner: Any = None
    if hasattr(thing, "__tensor_flatten__"):
        names, context = thing.__tensor_flatten__()
        inner = [context, *((name, structure(getattr(thing, name))) for name in names)]
    elif isinstance(thing, Quantized):
        inner = [structure(part) for part in (thing.rows, thing.columns, thing.scale)]
    return type(thing), thing.dtype, thing.device, thing.size(), thing.stride(), thing.requires_grad, inner


class Uses(Saves):
    """Saves tensors of any type for the gradient of another."""

    @staticmethod
    def backward(ctx, grad):
        things = ctx.saved_tensors
        ctx.seen.append([structure(thing) for thing in things])
        for thing in things:
            grad = grad * read(thing)
        return grad, None, *(None for _ in things)


class Split(torch.autograd.Function):
    """Makes a wrapper of a plain tensor."""

    @staticmethod
    def forward(ctx, x):
        return Two(x * 1, x * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad.a + grad.b * 2


class Join(torch.autograd.Function):
    """Makes a plain tensor of a wrapper."""

    @staticmethod
    def forward(ctx, two):
        return two.a + two.b

    @staticmethod
    def backward(ctx, grad):
        return Two(grad * 1, grad * 1)


def one_layer(layer: Callable[[Tensor], Tensor], **more: Any) -> tuple[Tensor, Statistics]:
    """Run an offloaded layer and two kept ones; return the gradient and the statistics."""
    context, sync = make(1, 3, **more)
    leaf = torch.ones(N, N, requires_grad=True)
    forward([layer, lambda x: x * 1.0, lambda x: x * 1.0], leaf * 1.0, context, sync).sum().backward()
    nothing_held(context)
    return leaf.grad, context.statistics()


class SavesWeight(nn.Module):
    """Saves forms of its weight, which is a parameter or a buffer."""

    def __init__(self, weight: Tensor, forms: Callable[[Any], Sequence[Tensor]], kind: str = "trained") -> None:
        super().__init__()
        if kind == "buffer":
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight, requires_grad=kind == "trained")
        self.forms = forms

    def forward(self, x: Tensor) -> Tensor:
        return Saves.apply(x, [], *self.forms(self.weight))
