"""Activations between the two products of an expert, each with its gradient.

The gradients are those that autograd would compute, with the same kernels, but without what autograd would save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Activation", "check", "dense", "in_one_dtype", "named"]

_aten = torch.ops.aten


def check(x: torch.Tensor, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, activation: Activation) -> None:
    """Check types, shapes and devices; `in_one_dtype` compares dtypes."""
    operands = {"x": (x, 2), "fc1_weight": (fc1_weight, 3), "fc2_weight": (fc2_weight, 3)}
    for name, (tensor, dimensions) in operands.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; expected a tensor.")
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected a floating point dtype.")
        if tensor.dim() != dimensions:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {dimensions} dimensions.")
        if tensor.device != x.device:
            raise ValueError(f"x is on {x.device} and {name} on {tensor.device}; move them to one device.")
    experts, fc1_out, hidden = fc1_weight.shape
    ffn = fc2_weight.shape[2]
    if x.shape[1] != hidden:
        raise ValueError(f"x has {x.shape[1]} columns; expected {hidden}, as fc1_weight is [experts, ffn, {hidden}].")
    if fc2_weight.shape[0] != experts:
        raise ValueError(f"fc1_weight has {experts} experts and fc2_weight {fc2_weight.shape[0]}; expected as many.")
    if fc1_out != activation.width * ffn:
        columns = f"twice the {ffn} columns" if activation.gated else f"the {ffn} columns"
        raise ValueError(
            f"fc1_weight has {fc1_out} rows for each expert; expected {activation.width * ffn}, {columns} of "
            "fc2_weight, for this activation."
        )


def dense(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with strides that the products take; transposed ones are not copied."""
    return weight if weight.transpose(1, 2).is_contiguous() else weight.contiguous()


def in_one_dtype(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does for a matrix product; float64 is left alone."""
    kind = operands[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        operands = tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in operands)
    x, *weights = operands
    for name, weight in zip(("fc1_weight", "fc2_weight"), weights, strict=True):
        if weight.dtype is not x.dtype:
            raise TypeError(f"x has dtype {x.dtype} and {name} {weight.dtype}; cast one, or run under torch.autocast.")
    return operands


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation of the output of FC1, and its gradient ``(grad_y, x) -> grad_x``, both pointwise.

    If `gated`, the output of FC1 is [tokens, 2 * ffn]: the function of the first half, times the second half.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gated: bool

    @property
    def width(self) -> int:
        """Columns of FC1's output for each column of FC2's input."""
        return 2 if self.gated else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return FC2's input, [tokens, ffn], from FC1's output, [tokens, width * ffn]."""
        if not self.gated:
            return self.function(x)
        gate, value = x.chunk(2, dim=-1)
        return self.function(gate).mul_(value)

    def backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of FC1's output from that of FC2's input."""
        if not self.gated:
            return self.gradient(grad, x)
        gate, value = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        grad_gate, grad_value = result.chunk(2, dim=-1)
        grad_gate.copy_(self.gradient(grad * value, gate))
        torch.mul(grad, self.function(gate), out=grad_value)
        return result


_ACTIVATIONS = {
    "swiglu": Activation(F.silu, _aten.silu_backward.default, gated=True),
    "geglu": Activation(F.gelu, _aten.gelu_backward.default, gated=True),
    "silu": Activation(F.silu, _aten.silu_backward.default, gated=False),
    "gelu": Activation(F.gelu, _aten.gelu_backward.default, gated=False),
    "srelu": Activation(
        lambda x: F.relu(x).square_(),
        lambda grad, x: _aten.threshold_backward.default(F.relu(x).mul_(2).mul_(grad), x, 0),
        gated=False,
    ),
}


def named(name: str) -> Activation:
    """Return the activation of a name that `grouped_mlp` takes."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; expected one of {', '.join(map(repr, _ACTIVATIONS))}.")
    return _ACTIVATIONS[name]
