"""What may be handed to the grouped MLP, and in which dtype and order it is computed."""

from __future__ import annotations

import torch

from .activations import Activation

__all__ = ["check", "dense", "in_one_dtype"]


def check(x: torch.Tensor, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, activation: Activation) -> None:
    """Check types, shapes and devices; dtypes are compared when the operands are `in_one_dtype`."""
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
    """Return a weight in an order of memory that the products can read."""
    # Stored the other way round is as good for the products; a copy would be one more weight in memory.
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
