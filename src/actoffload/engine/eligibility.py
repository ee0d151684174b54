"""Which saved tensors stay on the device, each with a reason."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import Parameter

from ..device.base import Backend
from ..observe.counters import Reason
from . import notes
from .owned import Owned

__all__ = ["MIN_ELEMENTS", "Limit", "stays"]

MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: a copy of them costs more time than it saves memory (Transformer Engine's limit)."""

LARGEST_ELEMENT = 16

_types: dict[torch.device, str] = {}  # a device spells its type out anew each time it is asked


class Limit(NamedTuple):
    """Tensors below either size stay.

    Parameters
    ----------
    elements, nbytes : int
        Smallest number of elements, and of bytes, with which a tensor may leave.
    """

    elements: int
    nbytes: int

    @property
    def surely(self) -> int:
        """A number of elements with fewer of which a tensor stays, whatever its type."""
        return max(self.elements, -(-self.nbytes // LARGEST_ELEMENT))

    def refuses(self, elements: int, element: int) -> bool:
        """Whether so many elements of so many bytes each are too few."""
        return elements < self.elements or elements * element < self.nbytes


def stays(tensor: torch.Tensor, backend: Backend, owned: Owned, limit: Limit) -> Reason | None:
    """Return why a saved tensor stays on the device, or None if it can leave.

    The cheap questions come first: most saved tensors of a model are small or parameters.
    """
    kind = type(tensor)
    if kind is Parameter:
        return Reason.PARAMETER
    if kind is not torch.Tensor:
        return Reason.PARAMETER if isinstance(tensor, Parameter) else _tied(tensor) or Reason.SUBCLASS
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
    needs_gradient, base = tensor.requires_grad, tensor._base
    if base is not None or needs_gradient:
        reason = _tied(tensor)
        if reason is not None:
            return reason
    # The local part of a DTensor parameter requires a gradient, as a view of what requires none.
    if not needs_gradient or (base is not None and not base.requires_grad):
        reason = owned.reason(tensor.untyped_storage()._cdata)
        if reason is not None:
            return reason
    if notes.kept and tensor.untyped_storage()._cdata in notes.kept:
        return Reason.MARKED
    if 0 in tensor.stride() and limit.refuses(_distinct(tensor), tensor.itemsize):
        return Reason.SMALL
    return None


def _tied(tensor: torch.Tensor) -> Reason | None:
    """Return why a tensor stays that the graph ties to a leaf: it is one, a view of one, or a parameter's cast."""
    needs_gradient = tensor.requires_grad
    if needs_gradient and tensor.is_leaf:
        return Reason.LEAF
    base = tensor._base
    if base is not None:
        # Also a frozen one; asking whether something is a parameter takes long, and a plain tensor never is.
        if type(base) is not torch.Tensor and isinstance(base, Parameter):
            return Reason.PARAMETER
        if base.requires_grad and base.is_leaf:
            return Reason.LEAF
    # Whether autocast is on cannot be asked: it is off inside of the operations that it has cast for.
    return Reason.PARAMETER if needs_gradient and _is_parameters(tensor if base is None else base) else None


WEIGHTS = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})


def _is_parameters(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype, as autocast makes, or one that a backward has transposed."""
    node = tensor.grad_fn
    if node is None or type(node).__name__ not in WEIGHTS:
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), Parameter)


def _distinct(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride:
            count *= size
    return count
