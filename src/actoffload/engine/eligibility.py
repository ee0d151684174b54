"""Which saved tensors stay on the device, each with a reason."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from ..device.base import Backend
from ..observe.counters import Reason
from . import notes
from .owned import Owned

__all__ = ["MIN_ELEMENTS", "stays"]

MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: a copy of them costs more time than it saves memory (Transformer Engine's limit)."""


def stays(tensor: torch.Tensor, backend: Backend, owned: Owned) -> Reason | None:
    """Return why a saved tensor stays on the device, or None if it can leave.

    The cheap questions come first: most saved tensors of a model are small or parameters.
    """
    kind = type(tensor)
    if kind is Parameter:
        return Reason.PARAMETER
    if kind is not torch.Tensor:
        return Reason.PARAMETER if isinstance(tensor, Parameter) else Reason.SUBCLASS
    if tensor.numel() < MIN_ELEMENTS:
        return Reason.SMALL
    type_ = tensor.device.type
    if type_ != backend.type:
        return Reason.DEVICE
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return Reason.LAYOUT
    needs_gradient = tensor.requires_grad
    if needs_gradient and tensor.is_leaf:
        return Reason.LEAF
    base = tensor._base
    if base is not None:
        if isinstance(base, Parameter):  # also a frozen one
            return Reason.PARAMETER
        if base.requires_grad and base.is_leaf:
            return Reason.LEAF
    if needs_gradient and torch.is_autocast_enabled(type_) and _casts_parameter(tensor if base is None else base):
        return Reason.PARAMETER
    key = tensor.untyped_storage()._cdata
    if not needs_gradient:
        reason = owned.reason(key)
        if reason is not None:
            return reason
    if notes.kept and key in notes.kept:
        return Reason.MARKED
    if 0 in tensor.stride() and _distinct(tensor) < MIN_ELEMENTS:
        return Reason.SMALL
    return None


def _casts_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype, as autocast makes and keeps for its whole region."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), Parameter)


def _distinct(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride:
            count *= size
    return count
