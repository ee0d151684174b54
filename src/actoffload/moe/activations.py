"""Activations between the two products of an expert, each with its gradient.

The gradients are those that autograd would compute, with the same kernels, but without what autograd would save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Activation", "named"]

Pointwise = Callable[[torch.Tensor], torch.Tensor]
Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation, applied to the output of FC1.

    Parameters
    ----------
    function : callable
        Pointwise, ``x -> y``.
    gradient : callable
        Pointwise, ``(grad_y, x) -> grad_x``.
    gated : bool
        The output of FC1 is [tokens, 2 * ffn]: the function of the first half, times the second half.
    """

    function: Pointwise
    gradient: Gradient
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


# torch does not say what the functions of torch.ops return.
_silu_backward: Gradient = torch.ops.aten.silu_backward.default
_gelu_backward: Gradient = torch.ops.aten.gelu_backward.default
_threshold_backward: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
_threshold_backward = torch.ops.aten.threshold_backward.default


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square_()


def _srelu_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _threshold_backward(F.relu(x).mul_(2).mul_(grad), x, 0)


_ACTIVATIONS = {
    "swiglu": Activation(F.silu, _silu_backward, gated=True),
    "geglu": Activation(F.gelu, _gelu_backward, gated=True),
    "silu": Activation(F.silu, _silu_backward, gated=False),
    "gelu": Activation(F.gelu, _gelu_backward, gated=False),
    "srelu": Activation(_srelu, _srelu_gradient, gated=False),
}


def named(name: str) -> Activation:
    """Return the activation of a name that `grouped_mlp` takes."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; expected one of {', '.join(map(repr, _ACTIVATIONS))}.")
    return _ACTIVATIONS[name]
