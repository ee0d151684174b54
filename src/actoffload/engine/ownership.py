"""Which saved tensors stay on the device, each with a reason: weights and buffers above all."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module, Parameter

from .._torch import CASTS, RESHARD, ModuleCalls, address, base_of, registered
from ..device.base import Backend
from . import tensor_marks
from .statistics import Reason
from .subclasses import plain_parts

__all__ = [
    "MIN_ELEMENTS",
    "Limit",
    "ModelAddresses",
    "ModelOwned",
    "Owned",
    "addresses",
    "modules_in",
    "stays",
    "unwatch",
    "watch",
]


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
        parameters, buffers, _ = registered(module)
        tables += ((parameters, Reason.PARAMETER), (buffers, Reason.BUFFER))
    return tables


def modules_in(root: Module) -> list[Module]:
    """Return a module and all that are in it, each once; what `Module.modules` yields, many times faster."""
    found = {root: None}
    waiting = [root]
    while waiting:
        for child in registered(waiting.pop())[2].values():
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
                found[address(tensor.untyped_storage())] = reason
            elif tensor is not None:
                found.update((address, reason) for address in _addresses(tensor))
    return found


class _Watch(threading.local):
    """Whose modules run in this thread, innermost last."""

    def __init__(self) -> None:
        self.owned: list[Owned] = []


_watch = _Watch()


def _entered(module: Module, inputs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _watch.owned:
        _watch.owned[-1].enter(module)


def _left(module: Module, inputs: Any, outputs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _watch.owned:
        _watch.owned[-1].leave()


_calls = ModuleCalls(_entered, _left)


def watch(owned: Owned) -> None:
    """Tell `owned` of every module that runs in this thread, until `unwatch`."""
    _calls.add_user()
    _watch.owned.append(owned)


def unwatch(owned: Owned) -> None:
    """Tell `owned` no more; it lets go of the modules."""
    if owned in _watch.owned:  # not so if it is repeated after an interrupt
        _watch.owned.remove(owned)
        owned.forget()
        _calls.remove_user()


def _addresses(tensor: torch.Tensor) -> Sequence[int]:
    """Return where a tensor's memory is, or that of its parts."""
    kind = type(tensor)
    if kind is Parameter or kind is torch.Tensor:
        return (address(tensor.untyped_storage()),) if tensor.layout is torch.strided else ()
    return [address(part.untyped_storage()) for part in plain_parts(tensor) if part.layout is torch.strided]


class ModelAddresses:
    """The addresses of all parameters and buffers of a model, looked up when the first question of a pass comes.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    """

    def __init__(self, model: Module) -> None:
        self._model = weakref.ref(model)
        self._found: dict[int, Reason] | None = None
        self.swaps = False

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at this address stays, if the model owned it when it was first asked."""
        if self._found is None:
            model = self._model()
            self._found = {} if model is None else addresses(model)
            # A sharding wrapper puts other storages in the parameters' places while a module runs. That of PyTorch,
            # fully_shard, gives the modules a class with a method to shard them again.
            types = set() if model is None else {type(module) for module in modules_in(model)}
            self.swaps = any(hasattr(type_, RESHARD) for type_ in types)
        return self._found.get(key)


class ModelOwned(Owned):
    """What one group owns, and behind it the model.

    Parameters
    ----------
    group : torch.nn.Module or None
        The module that runs.
    model : ModelAddresses
        Everything else.
    """

    __slots__ = ("_model",)

    def __init__(self, group: Module | None, model: ModelAddresses) -> None:
        super().__init__()
        if group is not None:
            self.enter(group)
        self._model = model

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at this address stays, if the model owned it, or the group owns it only now."""
        found = self._model.reason(key)
        return super().reason(key) if found is None and self._model.swaps else found


MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: a copy of them costs more time than it saves memory (Transformer Engine's limit)."""

LARGEST_ELEMENT = 16  # [guard: largest element]

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
    needs_gradient, base = tensor.requires_grad, base_of(tensor)
    if base is not None or needs_gradient:
        reason = _tied(tensor)
        if reason is not None:
            return reason
    # The local part of a DTensor parameter requires a gradient, as a view of what requires none.
    if not needs_gradient or (base is not None and not base.requires_grad):
        reason = owned.reason(address(tensor.untyped_storage()))
        if reason is not None:
            return reason
    if tensor_marks.kept and address(tensor.untyped_storage()) in tensor_marks.kept:
        return Reason.MARKED
    if 0 in tensor.stride() and limit.refuses(_distinct(tensor), tensor.itemsize):
        return Reason.SMALL
    return None


def _tied(tensor: torch.Tensor) -> Reason | None:
    """Return why a tensor stays that the graph ties to a leaf: it is one, a view of one, or a parameter's cast."""
    needs_gradient = tensor.requires_grad
    if needs_gradient and tensor.is_leaf:
        return Reason.LEAF
    base = base_of(tensor)
    if base is not None:
        # Also a frozen one; asking whether something is a parameter takes long, and a plain tensor never is.
        if type(base) is not torch.Tensor and isinstance(base, Parameter):
            return Reason.PARAMETER
        if base.requires_grad and base.is_leaf:
            return Reason.LEAF
    # Whether autocast is on cannot be asked: it is off inside of the operations that it has cast for.
    return Reason.PARAMETER if needs_gradient and _is_parameters(tensor if base is None else base) else None


def _is_parameters(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype, as autocast makes, or one that a backward has transposed."""
    node = tensor.grad_fn
    if node is None or type(node).__name__ not in CASTS:
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), Parameter)


def _distinct(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride:
            count *= size
    return count
