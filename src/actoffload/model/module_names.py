"""Names and types of the modules of a model, with and without what wrappers add to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch.nn import DataParallel, Module, ModuleDict, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel

from .._torch.modules import SHARDED, WRAPPED_AS, registered

__all__ = [
    "CONTAINERS",
    "Named",
    "Names",
    "block_type",
    "children",
    "inner_name",
    "runs",
    "starred",
    "unwrap",
    "written",
]

CONTAINERS = (ModuleList, ModuleDict, Sequential)


# Wrappers


def inner_name(module: Module) -> str | None:
    """Return the attribute under which a wrapper holds its module; None for what is no wrapper.

    Wrappers are those of data parallelism, ``torch.compile``, activation checkpointing and the older FSDP.
    """
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    return next((name for name in WRAPPED_AS if registered(module)[2].get(name) is not None), None)


def unwrap(module: Module) -> Module:
    """Return the module inside of all wrappers."""
    while (name := inner_name(module)) is not None:
        module = module.get_submodule(name)
    return module


def block_type(module: Module) -> type:
    """Return the class that a module was created with: without wrappers, sharding and parametrizations."""
    kind: type = type(unwrap(module))
    while True:
        *others, base = kind.__bases__
        sharded = len(others) == 1 and others[0].__name__ in SHARDED
        if not (sharded or kind.__name__ == f"Parametrized{base.__name__}"):
            return kind
        kind = base


def children(module: Module) -> list[Module]:
    """Return the children in registration order; one that was registered twice is there twice."""
    return [child for child in registered(module)[2].values() if child is not None]


def runs(module: Module) -> bool:
    """Return whether a module has a forward; a ``ModuleList`` has none and is never called."""
    return getattr(module.forward, "__func__", None) is not Module.forward  # a compiled module sets one on itself


# Names


class Named(NamedTuple):
    """A module under one of its names: as registered, and without the parts that wrappers add."""

    full: str
    clean: str
    module: Module


class Names:
    """All names of all modules of a model, in registration order; a module that is registered twice has two."""

    def __init__(self, root: Module) -> None:
        self.all = list(_walk(root, "", "", ()))
        self.title = block_type(root).__name__
        self.first: dict[Module, Named] = {}  # the names that named_modules() gives
        for named in self.all:
            self.first.setdefault(named.module, named)
        self._full = {named.full: named for named in self.all}
        self._clean = {named.clean: named for named in reversed(self.all)}  # the first one counts

    def at(self, path: str) -> Named | None:
        """Return the module of this name; of a wrapper and what it wraps the wrapper, which comes first."""
        return self._clean.get(path) or self._full.get(path)

    def of_group(self, name: str) -> Named | None:
        """Return the module of a group that a plan names, which may be of this model in other wrappers, or in none."""
        if name in self._full:
            return self._full[name]
        parts = [part for part in name.split(".") if part not in WRAPPED_AS]
        while parts:  # what is around the whole model
            if found := self.at(".".join(parts)):
                return found
            if parts[0] != "module":
                return None
            del parts[0]
        return self._full[""]

    def matching(self, pattern: str) -> list[Named]:
        """Return the outermost modules whose names match a glob pattern; the root has no name to match."""
        for clean in (True, False):
            found: list[Named] = []
            for named in self.all:  # a module is followed by those in it
                name = named.clean if clean else named.full
                inside = found and named.full.startswith(f"{found[-1].full}.")
                if name and not inside and fnmatchcase(name, pattern):
                    found.append(named)
            if found:
                return found
        return []

    def kind(self, named: Named) -> str:
        """Return a clean name with ``*`` in place of indices, also in names like ``block_3`` in a list."""
        *parents, last = named.clean.split(".")
        above = self._full.get(named.full.rpartition(".")[0])
        if above is not None and isinstance(above.module, CONTAINERS):
            last = re.sub(r"\d+$", "*", last)
        return starred(".".join([*parents, last])) or block_type(named.module).__name__


def _walk(module: Module, full: str, clean: str, above: tuple[Module, ...]) -> Iterator[Named]:
    yield Named(full, clean, module)
    wrapped = inner_name(module)
    if wrapped is None and not clean and list(registered(module)[2]) == ["module"]:
        wrapped = "module"  # around a whole model this is what engines and data parallel wrappers of others look like
    for name, child in registered(module)[2].items():
        if child is not None and child is not module and child not in above:  # a circle of modules has no names
            below = f"{full}.{name}" if full else name
            inside = clean if name == wrapped else f"{clean}.{name}" if clean else name
            yield from _walk(child, below, inside, (*above, module))


def starred(name: str) -> str:
    """Return a dotted name with ``*`` in place of indices."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def written(root: Module, given: Any) -> list[Any] | None:
    """Return the entries of ``layers`` or ``keep`` as strings, classes and ``...``; None for None."""
    if given is None:
        return None
    names = Names(root)
    if isinstance(given, CONTAINERS) and given not in names.first:
        given = children(given)
    entries = [given] if isinstance(given, (str, Module, type)) or given is ... else list(given)
    return [names.first[entry].clean if isinstance(entry, Module) else entry for entry in entries]
