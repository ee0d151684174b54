"""What a module is made of, as far as that decides what its calls do.

`[Note: looking again]`  A program may replace parts of a module or switch flags of it between two calls, so each call
looks.  Reading all of a layer of 83 modules, as adapters (LoRA) make them, took the host a quarter of the time of its
forward.  So what was read is kept, and compared in a few passes over plain lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Generator, Tensor
from torch.nn import Module

from .._torch.modules import registered

__all__ = ["Structure", "Structures", "inside", "is_data"]

Table: TypeAlias = Mapping[str, Any]

TABLES = ("_parameters", "_buffers", "_modules")
OWN = frozenset(vars(Module())) - {"training"}
"""Attributes that every module has, which say nothing of the program."""
_MISSING = object()
MUTABLE = Tensor, list, dict, set, deque, SimpleNamespace
"""Types of attributes that a call may change in place."""
OURS = "_actoffload"
"""Beginning of the names of attributes of this library."""


def inside(module: Module) -> list[Module]:
    """Return a module and all inside of it; `Module.modules` takes longer, in each forward."""
    found, met = [module], {module}
    for each in found:
        for child in registered(each)[2].values():
            if child is not None and child not in met:
                met.add(child)
                found.append(child)
    return found


class Structure:
    """The parts of a module.  It does not refer to the module itself, but to its tables.

    Attributes
    ----------
    kind : hashable
        Equal for modules whose calls are assumed to do the same: of all modules, the types, the names of buffers, the
        number of attributes, the flags and which are tensors.
    generators : bool
        Whether generators of random numbers are among the attributes.
    """

    def __init__(self, module: Module) -> None:
        modules = inside(module)
        self._below, self._tables = modules[1:], list(map(registered, modules))
        self._attributes = list(map(vars, modules))
        self.is_live = all(
            table is attributes.get(name)
            for tables, attributes in zip(self._tables, self._attributes, strict=True)
            for name, table in zip(TABLES, tables, strict=True)
        )
        # Where a flag is now or may be later, and where the tables are.
        self._places = [
            (of, name)
            for of in self._attributes
            for name, value in of.items()
            if value is True or value is False or value is None or name in TABLES
        ]
        self._data = [(of, name) for of in self._attributes for name, value in of.items() if is_data(name, value)]
        self._names = list(map(frozenset, self._attributes))
        values = chain.from_iterable([of.values() for of in self._attributes])
        self.generators = Generator in set(map(type, values))
        self._look = self._looked(modules)
        self.kind: Hashable = tuple(
            (
                type(each),
                tuple([name for name, buffer in buffers.items() if buffer is not None]),
                len(attributes),
                tuple([found for value in attributes.values() if (found := _flag(value)) is not None]),
            )
            for each, (_, buffers, _), attributes in zip(modules, self._tables, self._attributes, strict=True)
        )

    def modules(self, module: Module) -> list[Module]:
        """Return a module, whose structure this is, and all inside of it."""
        return [module, *self._below]

    def tables(self, modules: Sequence[Module]) -> Sequence[tuple[Table, Table, Table]]:
        """Return the parameters, buffers and children by name of each of its modules."""
        return self._tables if self.is_live else list(map(registered, modules))

    def attributes(self) -> list[Any]:
        """Return the values of the other attributes of its modules, such as numbers, that are no functions."""
        return [of.get(name) for of, name in self._data]

    @contextmanager
    def with_attributes(self, values: Sequence[Any]) -> Iterator[None]:
        """Let these attributes have the values from before in this block, and then those of now again.

        What runs in the block may be left anywhere, so all of them are put back, also those that it alone changes.
        """
        now = [of.get(name, _MISSING) for of, name in self._data]
        added = [(of, name, of[name]) for of, name in self._added()]
        try:
            _assign(self._data, now, values)  # [guard: attributes from before the call]
            for of, name, _ in added:
                del of[name]  # [guard: attributes that a call adds]
            yield
        finally:
            for of, name in self._added():
                del of[name]  # [guard: attributes that a recomputation adds]
            for of, name, value in added:
                of[name] = value
            _assign(self._data, [of.get(name, _MISSING) for of, name in self._data], now)

    def _added(self) -> list[tuple[dict[str, Any], str]]:
        """Return the attributes that the modules have got since."""
        return [
            (of, name)
            for of, names in zip(self._attributes, self._names, strict=True)
            if not names.issuperset(of)
            for name, value in of.items()
            if name not in names and is_data(name, value)
        ]

    def weights(self) -> Iterator[Tensor]:
        """Yield the parameters of all modules."""
        return (of for parameters, _, _ in self._tables for of in parameters.values() if of is not None)

    def is_that_of(self, module: Module) -> bool:
        """Return whether nothing has changed; see [Note: looking again]."""
        try:
            return self.is_live and self._look == self._looked(self.modules(module))
        except KeyError:  # an attribute was deleted
            return False

    def _looked(self, modules: Sequence[Module]) -> list[list[Any]]:
        buffers = [of for _, of, _ in self._tables if of]
        return [
            list(map(type, modules)),
            list(chain.from_iterable([of.values() for _, _, of in self._tables if of])),
            list(map(len, self._attributes)),
            [id(of[name]) for of, name in self._places],  # not compared as values, which may be tensors
            [(name, buffer is None) for of in buffers for name, buffer in of.items()],
        ]


def _assign(places: Sequence[tuple[dict[str, Any], str]], now: Sequence[Any], values: Sequence[Any]) -> None:
    """Let attributes have other values than now, or be missing, where they differ."""
    for (of, name), present, value in zip(places, now, values, strict=True):
        if present is not value:
            if value is _MISSING:
                of.pop(name, None)
            else:
                of[name] = value


def is_data(name: str, value: Any) -> bool:
    """Return whether an attribute is one of the program, and neither a module nor a function."""
    return not (name in OWN or name.startswith(OURS) or isinstance(value, Module) or callable(value))


def _flag(value: Any) -> Any:
    """Return what the value of an attribute says about calls: a flag, or what it is if that may change in place."""
    if value is True or value is False:
        return value
    # [guard: attributes that become tensors -> None]
    return "array" if type(value).__module__ == "numpy" else next((of for of in MUTABLE if isinstance(value, of)), None)


class Structures:
    """The structures of modules, by module."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Module, Structure] = WeakKeyDictionary()
        self._kinds: dict[Hashable, int] = {}

    def of(self, module: Module) -> Structure:
        """Return the structure that a module has now."""
        found = self._known.get(module)
        if found is None or not found.is_that_of(module):
            found = self._known[module] = Structure(module)
            # A number, because hashing what it stands for takes as long as comparing it.
            found.kind = self._kinds.setdefault(found.kind, len(self._kinds))
        return found
