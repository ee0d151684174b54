"""What the modules of a layer own: the storages of parameters, under any name, and of buffers.

Autograd hands over a parameter, or a view of it, as such only where it was made by a differentiable operation.
``weight.data``, a buffer, or the storage that a sharding wrapper puts in a parameter's place while the layer runs,
look like any other tensor that needs no gradient.  For such a tensor, and only then, the modules that are running
are asked what they own at that moment.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.modules import module as _modules
from torch.utils.hooks import RemovableHandle

from ..observe.counters import Reason

__all__ = ["Owned", "unwatch", "watch"]


class Owned:
    """The outermost modules that ran in a layer so far, and what they and the modules in them own."""

    __slots__ = ("_depth", "_roots")

    def __init__(self) -> None:
        self._depth = 0
        self._roots: list[Module] = []

    def enter(self, module: Module) -> None:
        """Begin the forward of a module."""
        if self._depth == 0 and not any(module is root for root in self._roots):
            self._roots.append(module)
        self._depth += 1

    def leave(self) -> None:
        """End the forward of a module, also by an exception."""
        self._depth -= 1

    def forget(self) -> None:
        """Let go of the modules; the layer has ended."""
        self._roots.clear()
        self._depth = 0

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


class _Watch(threading.local):
    """Whose modules run in this thread, innermost last."""

    def __init__(self) -> None:
        self.owned: list[Owned] = []


_watch = _Watch()
_users = 0
_lock = threading.Lock()


def _entered(module: Module, inputs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _watch.owned:
        _watch.owned[-1].enter(module)


def _left(module: Module, inputs: Any, outputs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _watch.owned:
        _watch.owned[-1].leave()


# One key for the life of the process: a compiled module is compiled again when the key of a global hook changes.
_key = RemovableHandle(_modules._global_forward_pre_hooks).id


def watch(owned: Owned) -> None:
    """Tell `owned` of every module that runs in this thread, until `unwatch`."""
    global _users
    with _lock:
        _users += 1
        _modules._global_forward_pre_hooks[_key] = _entered
        _modules._global_forward_hooks[_key] = _left
        _modules._global_forward_hooks_always_called[_key] = True
    _watch.owned.append(owned)


def unwatch(owned: Owned) -> None:
    """Tell `owned` no more; it lets go of the modules."""
    global _users
    _watch.owned.remove(owned)
    owned.forget()
    with _lock:
        _users -= 1
        if not _users:
            del _modules._global_forward_pre_hooks[_key]
            del _modules._global_forward_hooks[_key]
            del _modules._global_forward_hooks_always_called[_key]


def _address(tensor: torch.Tensor) -> int:
    plain = type(tensor) is Parameter or type(tensor) is torch.Tensor
    if not plain or tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)
