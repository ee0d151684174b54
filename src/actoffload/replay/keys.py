"""What a call of a group depends on: its arguments, and what its modules have; calls that agree in it do the same.

What a program cannot name is in no key: global variables, attributes of classes, what closures refer to.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from math import inf
from numbers import Number
from operator import attrgetter, is_
from types import MethodType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.jit import ScriptModule
from torch.nn import Module

from .._torch.modules import is_compiled, registered
from .._torch.tensors import address, leaves

_PLAIN = Number, Enum, str, bytes, range, slice, type(None), torch.dtype, torch.device
_OFTEN = frozenset((int, bool, str, type(None), torch.dtype))  # those of most calls
LARGEST = 1024  # elements of an array of NumPy that is compared
_INTERNAL = frozenset(vars(Module())) - {"training"}

_Names: TypeAlias = tuple[list[str], list[Any], list[str]]  # of the module itself; dictionaries, and a name in each


class Attributes:
    """What the call of a module depends on beside its arguments: modules, weights, numbers, flags and functions."""

    def __init__(self, module: Module) -> None:
        # The forward of a followed module leads here: a strong reference to it would be a cycle.
        self._root, self._inside = weakref.ref(module), [inner for inner in module.modules() if inner is not module]
        modules = self.modules
        self.is_compiled = any(is_compiled(inner) or isinstance(inner, ScriptModule) for inner in modules)
        self.has_statistics = any(getattr(inner, "running_mean", None) is not None for inner in modules)
        # Looked up in each call, so without a loop in Python: LoRA has 80 modules in a block.
        inside, tables = list(map(vars, self._inside)), [table for inner in modules for table in registered(inner)]
        own = vars(module)
        values = [value for each in (own, *inside) for name, value in each.items() if name not in _INTERNAL]
        settings = {id(found): found for value in values if (found := _settings_in(value)) is not None}
        self._plain = _names(own, [*inside, *settings.values()], _is_plain)
        self._objects = _names(own, inside, lambda value: _is_function(value) or _settings_in(value) is not None)
        self._registered = _names({}, tables, lambda value: True)
        hooks = [each for inner in modules for each in (inner._forward_pre_hooks, inner._forward_hooks)]
        self._sized: list[Sized] = [*inside, *tables, *hooks]
        self._contents: list[Iterable[Any]] = [each for each in hooks if each]
        self._contents += [value for value in values if type(value) is list and _is_plain(value)]
        self._weights = list(module.parameters())
        self._values, self._now = list(self._find(self._plain)), self._look()
        # Another object may have the place in memory of one that is freed.
        self._freed: list[Any] = []
        referred = chain(self._find(self._objects), self._find(self._registered))
        self._references = [_reference(each, self._freed.append) for each in referred]

    @property
    def modules(self) -> list[Module]:
        """The module and those inside of it."""
        root = self._root()
        assert root is not None
        return [root, *self._inside]

    def _find(self, names: _Names) -> Iterable[Any]:
        """Return what has some names, as it is now."""
        own, holders, others = names
        return chain(map(vars(self._root()).get, own), map(dict.get, holders, others))

    def _look(self) -> tuple[list[Any], ...]:
        return (
            list(map(id, self._find(self._registered))),
            list(map(id, self._find(self._objects))),
            [len(vars(self._root())), *map(len, self._sized)],
            list(map(tuple, self._contents)),
            list(map(_needs_gradient, self._weights)),
        )

    @property
    def holds(self) -> bool:
        """Whether nothing has changed."""
        if self._freed:  # [guard: functions at the place of one that is freed]
            return False
        now, before = list(self._find(self._plain)), self._values  # of which 0.0 and -0.0 are equal, as 1 and True are
        same = all(map(is_, now, before)) or _describe(now, []) == _describe(before, [])
        return same and self._look() == self._now

    def has_members_of(self, other: Attributes) -> bool:
        """Return whether it has the same modules, weights and buffers; otherwise it keeps those of others alive."""
        return not self._freed and self._now[0] == other._now[0]


_needs_gradient = attrgetter("requires_grad")


def _names(own: dict[str, Any], dicts: Sequence[Any], chosen: Callable[[Any], bool]) -> _Names:
    """Return the names of chosen values in one dictionary, and for those in others the dictionary and each name."""
    ours, *theirs = ([name for name in each if name not in _INTERNAL and chosen(each[name])] for each in (own, *dicts))
    holders = [each for each, names in zip(dicts, theirs, strict=True) for _ in names]
    return ours, holders, list(chain(*theirs))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a flag or text, or consists of such."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (type(value).__module__ == "numpy" and value.shape == ())


def _is_function(value: Any) -> bool:
    return callable(value) and not torch.is_tensor(value)


def _settings_of(value: Any) -> dict[str, Any] | None:
    """Return a dictionary, or the attributes of an object that holds settings, as a configuration does; else None."""
    if type(value) is dict:
        return value
    kind = type(value)
    holds_settings = is_dataclass(kind) or issubclass(kind, (Namespace, SimpleNamespace)) or hasattr(kind, "to_dict")
    return vars(value) if holds_settings and hasattr(value, "__dict__") else None


def _settings_in(attribute: Any) -> dict[str, Any] | None:
    """Return the settings that an attribute holds; None if it has none, or tensors, as notes of a forward have."""
    found = _settings_of(attribute)
    if found is None or next(leaves(found), None) is not None:  # [guard: tensors that a forward notes]
        return None
    return found if any(map(_is_plain, found.values())) else None


def _reference(value: Any, freed: Callable[[Any], object] | None = None) -> Any:
    """Return a weak reference to a value, or the value if there are none to its kind."""
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value, freed)
    except TypeError:
        return value


# Arguments


def describe(args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return what programs depend on of arguments, to be compared with those of another call, and their tensors."""
    tensors: list[torch.Tensor] = []
    found = _describe((args, kwargs), tensors)
    return (found, _describe_sharing(tensors)), tensors


def _describe(given: Any, tensors: list[torch.Tensor]) -> Any:
    kind: Any = type(given)
    if kind in _OFTEN:
        return kind, given
    if isinstance(given, torch.Tensor):
        tensors.append(given)
        if given.layout is torch.strided and not given.is_nested:
            bits = given.is_conj(), given.is_neg()
            return kind, given.size(), given.stride(), given.dtype, given.requires_grad, bits
        return kind, given.layout, given.dtype, given.requires_grad
    if isinstance(given, _PLAIN):  # 0.0 and -0.0 are equal, and NaN is to nothing
        return kind, repr(given) if isinstance(given, (Number, slice)) else given
    if isinstance(given, (list, tuple)):
        return kind, *[_describe(each, tensors) for each in given]
    if isinstance(given, Mapping):
        return kind, *[(name, _describe(each, tensors)) for name, each in given.items()]
    if is_dataclass(given) and not isinstance(given, type):
        return kind, *[_describe(getattr(given, each.name), tensors) for each in fields(given)]
    if kind.__module__ == "numpy" and getattr(given, "size", inf) <= LARGEST:
        return kind, given.shape, str(given.dtype), given.tobytes()
    if _is_function(given):
        return kind, _reference(given)
    settings = _settings_of(given) or {}
    return kind, *[(name, value) for name, value in settings.items() if isinstance(value, _PLAIN)]


def _describe_sharing(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Return for each tensor which one is the first on its storage, and how far behind that it lies in bytes."""
    first: dict[int, tuple[int, int]] = {}
    found = []
    for number, tensor in enumerate(tensors):
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            found.append((-1, 0))
            continue
        offset = int(tensor.storage_offset()) * tensor.itemsize
        before, start = first.setdefault(address(tensor.untyped_storage()), (number, offset))
        found.append((before, offset - start))
    return tuple(found)
