"""Who in Python keeps a storage alive: memory that was copied to the host is freed only when nobody refers to it.

The search asks Python's garbage collector which tensors lie on the storage and what refers to them, level by level,
until something has a name.  It sees what Python holds.  A tensor that only C++ holds, a node of autograd for
instance, has no holder in this sense.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .holder_names import (
    CALL,
    CONTAINERS,
    LOCAL,
    NAMELESS,
    PACKAGE,
    PASSED,
    PASSING,
    SOMEWHERE,
    Names,
    is_call,
    is_part_of,
    passed,
    where_of,
)

__all__ = ["find_all_holders", "find_holders"]

LEVELS = 12  # the cache of keys and values of an encoder with a decoder takes ten
MOST_NODES = 2000
MOST_PATHS = 500
MOST_LINES = 16
# Up to so many objects the collector's own search is faster than asking every object what it refers to.
FEW = 32


def find_holders(address: int, modules: Mapping[torch.nn.Module, str] | None = None) -> tuple[str, ...]:
    """Return who in Python holds a tensor on a storage, one readable line for each holder.

    Parameters
    ----------
    address : int
        ``tensor.untyped_storage()._cdata`` of a tensor on the storage.
    modules : mapping of torch.nn.Module to str, optional
        Names of modules: ``{module: name for name, module in model.named_modules()}``.

    Returns
    -------
    tuple of str
        What holds longest comes first: attributes of modules, globals and classes, closures, local variables.
        If there is none of these, what a module that is being called was called with, and returns.  Empty if Python
        holds nothing: the storage is gone, or only C++ holds it, for instance autograd.

    Notes
    -----
    Every object of the process is looked at, so a call takes a good part of a second in a large program.  A
    local variable of the caller is a holder like any other.  Objects of this package are none.

    Examples
    --------
    >>> from actoffload.report.holders import find_holders
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    >>> model[0].cache = [torch.ones(1024)]
    >>> address = model[0].cache[0].untyped_storage()._cdata
    >>> find_holders(address, {module: name for name, module in model.named_modules()})
    ('attribute `cache[0]` of 0 (Linear)',)
    """
    return find_all_holders([address], modules)[address]


def find_all_holders(
    addresses: Iterable[int], modules: Mapping[torch.nn.Module, str] | None = None
) -> dict[int, tuple[str, ...]]:
    """Return the holders of several storages by their addresses, in one search; see `find_holders`."""
    search = _Search(modules or {})
    try:
        return search.run(dict.fromkeys(addresses))
    finally:
        search.forget()


@dataclass(frozen=True, slots=True)
class _Local:
    """A local variable: what its name says, the name, and its function; of a call of a module, that module."""

    rank: int
    name: str
    where: str

    def line(self, path: str = "") -> str:
        """Return the line for what is reached from the variable in this way."""
        if self.rank == CALL:
            return passed(self.name, path, self.where)
        return f"local variable `{self.name}{path}` of {self.where}"


class _Search:
    """The objects found so far, and who refers to whom.

    What this object holds is found by the search as well, so all of its containers are in `ignored`.
    """

    def __init__(self, modules: Mapping[torch.nn.Module, str]) -> None:
        self.names = Names(modules)
        self.nodes: dict[int, Any] = {}
        self.parents: dict[int, list[int]] = {}
        self.ours: set[int] = set()  # what this package refers to
        self.ignored = self.names.ignored
        self.ignored.update(map(id, (self.nodes, self.names, self)))
        self.locals: dict[int, list[_Local]] = {}  # by the address of what they refer to
        for frame in _running_frames():
            self._note_locals(frame)

    def run(self, addresses: Iterable[int]) -> dict[int, tuple[str, ...]]:
        """Return the holders of each storage."""
        tensors = self._tensors(addresses)
        frontier = [tensor for found in tensors.values() for tensor in found]
        frontier += [self.nodes[parent] for parents in self.parents.values() for parent in parents]
        self.ignored.update(map(id, (tensors, *tensors.values())))
        self.nodes.update((id(node), node) for node in frontier)
        for _ in range(LEVELS):
            self.ignored.add(id(frontier))
            frontier = self._expand(frontier)
            if not frontier or len(self.nodes) > MOST_NODES:
                break
        return {address: self._lines(found) for address, found in tensors.items()}

    def forget(self) -> None:
        """Let go of what was found: the frames of the search itself are among it, and hold the search."""
        self.nodes.clear()
        self.parents.clear()
        self.locals.clear()
        self.names.forget()

    def _note_locals(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED:
            self.names.note_globals(frame)
            return
        variables = self.names.variables(frame)
        rank, where, module = PASSING if is_part_of("torch", frame) else LOCAL, where_of(code, frame.f_lineno), None
        if is_call(frame.f_globals.get("__name__"), code.co_qualname):
            module = next((self.names.module(value) for name, value in variables if name == "self"), None)
        for name, value in variables:
            if name not in code.co_freevars:  # those are found as the closure of a function
                local = (
                    _Local(rank, name, where) if module is None or name not in PASSED else _Local(CALL, name, module)
                )
                self.locals.setdefault(id(value), []).append(local)

    def _tensors(self, addresses: Iterable[int]) -> dict[int, list[Any]]:
        """Return the tensors and storage objects at each address."""
        found: dict[int, list[Any]] = {address: [] for address in addresses}
        with torch._C.DisableTorchFunctionSubclass():  # a subclass is not asked what it does with the names below
            for obj in gc.get_objects():
                # Not isinstance: it asks objects for their class, and a lazy proxy then loads what it stands for.
                kind = type(obj)
                if issubclass(kind, torch.Tensor):
                    _add(found.get(_address(obj)), obj)
                    self._note_gradient(obj, found)
                elif kind is torch.UntypedStorage:
                    _add(found.get(obj._cdata), obj)
        return found

    def _note_gradient(self, tensor: Any, found: dict[int, list[Any]]) -> None:
        """Note the gradient of a tensor: C++ holds it, where the collector does not look."""
        base: Any = torch._C.TensorBase
        try:
            leaf = base.requires_grad.__get__(tensor) and base.is_leaf.__get__(tensor)
            gradient = base.grad.__get__(tensor) if leaf else None
        except Exception:  # half-built subclasses
            return
        same = None if gradient is None else found.get(_address(gradient))
        if same is not None:
            _add(same, gradient)
            self.nodes[id(tensor)] = tensor
            self.parents[id(gradient)] = [id(tensor)]

    def _expand(self, frontier: list[Any]) -> list[Any]:
        """Note who refers to these objects; return those referrers that have no name of their own."""
        wanted = set(map(id, frontier))
        nameless = []
        for referrer in _referrers(frontier, wanted):
            if id(referrer) in self.ignored:
                continue
            children = wanted.intersection(map(id, gc.get_referents(referrer)))
            if is_part_of(PACKAGE, referrer):
                self.ours.update(children)
                continue
            for child in children:
                self.parents.setdefault(child, []).append(id(referrer))
            if id(referrer) not in self.nodes:
                self.nodes[id(referrer)] = referrer
                if not self.names.is_root(referrer):
                    nameless.append(referrer)
        return nameless

    def _lines(self, tensors: list[Any]) -> tuple[str, ...]:
        """Return a line for each holder of these tensors, the best names first."""
        lines: set[tuple[int, str]] = set()
        for tensor in tensors:
            lines.update((local.rank, local.line()) for local in self.locals.get(id(tensor), ()))
            for parent in self.parents.get(id(tensor), ()):
                try:
                    best = self._best([tensor, self.nodes[parent]])
                except Exception:  # other people's objects: a holder without a name is better than no report
                    best = NAMELESS, f"an object of class {type(self.nodes[parent]).__name__}"
                if best is not None:
                    lines.add(best)
        named = {entry for entry in lines if entry[0] < CALL} or {entry for entry in lines if entry[0] == CALL}
        return tuple(dict.fromkeys(line for _, line in sorted(named or lines)))[:MOST_LINES]

    def _best(self, start: list[Any]) -> tuple[int, str] | None:
        """Return the best of the names that a holder has, with its rank; of two as good, the shorter one."""
        found: list[tuple[int, str]] = []
        paths = [start]
        for path in paths:  # grows while it is walked; the same object may be reached in several ways
            node = path[-1]
            for local in self.locals.get(id(node), ()):
                found.append((local.rank, local.line(self.names.path(path))))
            if self.names.is_root(node):
                found.append((self.names.rank(node), self.names.of_root(path)))
                continue
            for parent in self.parents.get(id(node), ()):
                if len(paths) < MOST_PATHS and not any(id(other) == parent for other in path):
                    paths.append([*path, self.nodes[parent]])
        if found:
            return min(found, key=lambda name: (name[0], SOMEWHERE in name[1], len(name[1]), name[1]))
        for node in paths[-1][1:]:
            if type(node) not in CONTAINERS:
                break
            if id(node) in self.ours:
                return None
        return self.names.of_nameless(paths[-1])


def _add(found: list[Any] | None, obj: object) -> None:
    if found is not None and not any(obj is other for other in found):
        found.append(obj)


def _address(tensor: Any) -> int:
    """Return the address of a tensor's storage; 0 for a tensor without one."""
    try:
        return int(torch._C.TensorBase.untyped_storage(tensor)._cdata)
    except Exception:  # sparse, nested, wrapped: each has an error of its own
        return 0


def _referrers(objects: list[Any], addresses: set[int]) -> list[Any]:
    """Return the objects that refer to any of some objects."""
    if len(objects) <= FEW:
        return gc.get_referrers(*objects)
    return [obj for obj in gc.get_objects() if not addresses.isdisjoint(map(id, gc.get_referents(obj)))]


def _running_frames() -> list[types.FrameType]:
    """Return the frames of every thread but those of this package."""
    found: list[types.FrameType] = []
    running = sys._current_frames()
    # Not this one: a frame that holds itself lives, with all that called it, until the collector comes.
    running[threading.get_ident()] = sys._getframe(1)
    for frame in running.values():
        at: types.FrameType | None = frame
        while at is not None:
            if not is_part_of(PACKAGE, at):
                found.append(at)
            at = at.f_back
    return found
