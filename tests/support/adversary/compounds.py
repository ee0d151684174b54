"""A compound tensor with a large part and a part that is too small to offload."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Scaled", "times"]


class Scaled(Tensor):
    """Values with a scale, a minimal quantized tensor.  It supports only `detach` and `read`."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, values.size(), strides=values.stride(), dtype=values.dtype)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale)
        raise NotImplementedError(f"{func} on a Scaled tensor")

    def read(self) -> Tensor:
        """Return the values multiplied by the scale."""
        return self.values * self.scale


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Scaled) -> Tensor:
        ctx.save_for_backward(factor)
        return x * factor.read()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor.read(), None


def times(x: Tensor, values: Tensor) -> Tensor:
    """Multiply `x` by values that are saved as a `Scaled` tensor; only `x` gets a gradient."""
    factor = Scaled(values.detach(), values.detach().abs().amax() + 1.0)
    return _Times.apply(x, factor)  # type: ignore[no-any-return, no-untyped-call]
