"""What the modules of a layer own: the storages of parameters, under any name, and of buffers.

Autograd hands over a parameter, or a view of it, as such only where it was made by a differentiable operation.
``weight.data``, a buffer, or the storage that a sharding wrapper puts in a parameter's place while the layer runs,
look like any other tensor that needs no gradient.  For such a tensor, and only then, the modules that are running
are asked what they own at that moment.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import Module, Parameter
from torch.nn.modules import module as _modules
from torch.utils.hooks import RemovableHandle

from ..observe.counters import Reason
from .compound import plain_parts

__all__ = ["Owned", "addresses", "modules_in", "unwatch", "watch"]


class Owned:
    """The outermost modules that ran in a layer so far, and what they and the modules in them own."""

    __slots__ = ("_depth", "_roots", "_tables")

    def __init__(self) -> None:
        self._depth = 0
        self._roots: list[Module] = []
        self._tables: list[_Table] | None = None  # of the roots and all in them, since the first question

    def enter(self, module: Module) -> None:
        """Begin the forward of a module."""
        if self._depth == 0 and not any(module is root for root in self._roots):
            self._roots.append(module)
            self._tables = None
        self._depth += 1

    def leave(self) -> None:
        """End the forward of a module, also by an exception."""
        self._depth -= 1

    def forget(self) -> None:
        """Let go of the modules; the layer has ended."""
        self._roots.clear()
        self._tables = None
        self._depth = 0

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at this address stays, if a module owns it now."""
        tables = self._tables
        if tables is None:
            tables = self._tables = [table for root in self._roots for table in _tables(root)]
        # The tables are the modules' own: what a wrapper puts in a parameter's place is found.
        for table, reason in tables:
            for tensor in table.values():
                if tensor is not None and key in _addresses(tensor):
                    return reason
        return None


_Table: TypeAlias = tuple[Mapping[str, torch.Tensor | None], Reason]


def _tables(root: Module) -> list[_Table]:
    """Return the tables in which a module and those in it have their tensors."""
    tables: list[_Table] = []
    for module in modules_in(root):
        tables += ((module._parameters, Reason.PARAMETER), (module._buffers, Reason.BUFFER))
    return tables


def modules_in(root: Module) -> list[Module]:
    """Return a module and all that are in it, each once; what `Module.modules` yields, many times faster."""
    found = {root: None}
    waiting = [root]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def addresses(root: Module) -> dict[int, Reason]:
    """Return the addresses of the storages that a module and those in it own now, each with its reason to stay."""
    found: dict[int, Reason] = {}
    for table, reason in _tables(root):
        for tensor in table.values():
            if type(tensor) is Parameter and tensor.layout is torch.strided:
                found[tensor.untyped_storage()._cdata] = reason
            elif tensor is not None:
                found.update((address, reason) for address in _addresses(tensor))
    return found


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


def _addresses(tensor: torch.Tensor) -> Sequence[int]:
    """Return where a tensor's memory is, or that of its parts."""
    kind = type(tensor)
    if kind is Parameter or kind is torch.Tensor:
        return (tensor.untyped_storage()._cdata,) if tensor.layout is torch.strided else ()
    return [part.untyped_storage()._cdata for part in plain_parts(tensor) if part.layout is torch.strided]
