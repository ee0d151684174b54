"""Which saved tensors stay on the device, each with a reason: weights and buffers above all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import Parameter

from .._torch.autograd import CASTS
from .._torch.tensors import address, base_of
from ..device.base import Backend
from . import tensor_marks
from .layout import View
from .module_tensors import ModuleTensors
from .statistics import Reason

__all__ = ["Limit", "is_cast_of_parameter", "stays"]

MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: a copy of them costs more time than it saves memory (Transformer Engine's limit)."""

LARGEST_ELEMENT = 16  # [guard: largest element]

_types: dict[torch.device, str] = {}  # the attribute of a device builds a string each time


class Limit(NamedTuple):
    """Tensors with fewer elements, or fewer bytes, stay."""

    elements: int
    nbytes: int

    @property
    def surely(self) -> int:
        """A number of elements with fewer of which a tensor stays, whatever its type."""
        return max(self.elements, -(-self.nbytes // LARGEST_ELEMENT))


def stays(tensor: torch.Tensor, backend: Backend, owned: ModuleTensors, limit: Limit) -> Reason | None:
    """Return why a saved tensor is kept on the device, or None if it can be offloaded.

    The cheap checks come first: most saved tensors of a model are small or parameters.
    """
    kind = type(tensor)
    if kind is Parameter:
        return Reason.PARAMETER
    if kind is not torch.Tensor:
        return _tied(tensor) or Reason.SUBCLASS
    count = tensor.numel()
    if count < limit.elements or count * tensor.itemsize < limit.nbytes:
        return Reason.SMALL
    device = tensor.device
    type_ = _types.get(device)
    if type_ is None:
        type_ = _types[device] = device.type
    if type_ != backend.type:
        return Reason.DEVICE
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return Reason.LAYOUT
    needs_gradient, base = tensor.requires_grad, base_of(tensor)
    if (base is not None or needs_gradient) and (reason := _tied(tensor)) is not None:
        return reason
    # The local part of a DTensor parameter requires a gradient, as a view of what requires none.
    if not needs_gradient or (base is not None and not base.requires_grad):
        reason = owned.reason(address(tensor.untyped_storage()))
        if reason is not None:
            return reason
    if tensor_marks.kept and address(tensor.untyped_storage()) in tensor_marks.kept:
        return Reason.MARKED
    if 0 in tensor.stride():
        distinct = View.of(tensor).covered
        if distinct < limit.elements * tensor.itemsize or distinct < limit.nbytes:
            return Reason.SMALL
    return None


def _tied(tensor: torch.Tensor) -> Reason | None:
    """Return why a tensor stays that the graph ties to a leaf: it is one, a view of one, or a parameter's cast."""
    base = base_of(tensor)
    # Without a graph, as in the forward of an autograd function, PyTorch makes views that seem to be leaves.
    between = base is not None and base.grad_fn is not None  # [guard: views that functions save]
    for leaf in (tensor, base):
        if leaf is not None and leaf.is_leaf and not between:
            # Also a frozen one; asking whether something is a parameter takes long, and a plain tensor never is.
            if type(leaf) is not torch.Tensor and isinstance(leaf, Parameter):
                return Reason.PARAMETER
            if leaf.requires_grad:
                return Reason.LEAF
    # Autocast is off inside of the operations that it has cast for, so whether it is on says nothing.
    is_cast = tensor.requires_grad and is_cast_of_parameter(tensor if base is None else base)
    return Reason.PARAMETER if is_cast else None


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype, as autocast makes, or one that a backward has transposed."""
    node = tensor.grad_fn
    if node is None or type(node).__name__ not in CASTS:
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), Parameter)
