"""What the modules of a layer own: the storages of parameters, under any name, and of buffers.

Autograd hands over a parameter, or a view of it, as such only where it was made by a differentiable operation.
``weight.data``, a buffer, or the storage that a sharding wrapper puts in a parameter's place while the layer runs,
look like any other tensor that needs no gradient.  For such a tensor, and only then, the modules that are running
are asked what they own at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..observe.counters import Reason

__all__ = ["Owned"]


class Owned:
    """The outermost modules that ran in a layer so far, and what they and the modules in them own."""

    __slots__ = ("_depth", "_roots")

    def __init__(self) -> None:
        self._depth = 0
        self._roots: list[Module] = []

    def _enter(self, module: Module, inputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if self._depth == 0 and not any(module is root for root in self._roots):
            self._roots.append(module)
        self._depth += 1

    def _leave(self, module: Module, inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        self._depth -= 1

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at this address stays, if a module owns it now."""
        for root in self._roots:
            for module in root.modules():
                for parameter in module._parameters.values():
                    if parameter is not None and _address(parameter) == key:
                        return Reason.PARAMETER
                for buffer in module._buffers.values():
                    if buffer is not None and _address(buffer) == key:
                        return Reason.BUFFER
        return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen to every module that runs in this block."""
        entered = register_module_forward_pre_hook(self._enter)
        left = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entered.remove()
            left.remove()
            self._roots.clear()
            self._depth = 0


def _address(tensor: torch.Tensor) -> int:
    plain = type(tensor) is Parameter or type(tensor) is torch.Tensor
    if not plain or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage()._cdata
