"""Which saved tensors stay on the device, each with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook

from ..device.base import Backend
from ..observe.counters import Reason
from . import notes

__all__ = ["MIN_ELEMENTS", "Owned", "stays"]

MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: a copy of them costs more time than it saves memory (Transformer Engine's limit)."""


class Owned:
    """The storages that the modules of a layer own: parameters under any name, and buffers.

    Autograd hands over a parameter's view as such only where it was made by a differentiable operation;
    ``weight.data``, and the storages that a sharding wrapper puts in a parameter's place while the layer runs,
    look like any other tensor.  So each module says what it owns when its forward starts.
    """

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[int, Reason] = {}

    def see(self, module: Module, inputs: Any = None) -> None:
        """Note what a module owns; a global forward pre-hook."""
        if torch.compiler.is_dynamo_compiling():
            return
        for parameter in module._parameters.values():
            if parameter is not None:
                self._note(parameter, Reason.PARAMETER)
        for buffer in module._buffers.values():
            if buffer is not None:
                self._note(buffer, Reason.BUFFER)

    def _note(self, tensor: torch.Tensor, reason: Reason) -> None:
        plain = type(tensor) is Parameter or type(tensor) is torch.Tensor
        if plain and tensor.numel() >= MIN_ELEMENTS and tensor.layout is torch.strided:
            self._reasons[tensor.untyped_storage()._cdata] = reason

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at this address stays, if a module owns it."""
        return self._reasons.get(key)

    def forget(self) -> None:
        """Forget everything; addresses mean nothing once the layer has ended."""
        self._reasons.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen to every module that runs in this block."""
        handle = register_module_forward_pre_hook(self.see)
        try:
            yield
        finally:
            handle.remove()
            self.forget()


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
    if not backend.owns(tensor.device):
        return Reason.DEVICE
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return Reason.LAYOUT
    if tensor.requires_grad and tensor.is_leaf:
        return Reason.LEAF
    base = tensor._base
    if base is not None:
        if isinstance(base, Parameter):  # also a frozen one
            return Reason.PARAMETER
        if base.requires_grad and base.is_leaf:
            return Reason.LEAF
    key = tensor.untyped_storage()._cdata
    reason = owned.reason(key)
    if reason is not None:
        return reason
    if notes.is_kept(key):
        return Reason.MARKED
    if 0 in tensor.stride() and _distinct(tensor) < MIN_ELEMENTS:
        return Reason.SMALL
    return None


def _distinct(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride:
            count *= size
    return count
