"""Memory that was not freed: storages that were copied to the host, and what in Python keeps them alive.

The garbage collector gives the tensors on it and what refers to them, level by level, up to something with a name.  A
tensor that only C++ keeps alive, a node of autograd for instance, has no holder.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from .._text import numberless
from .._torch.modules import CALL_VARIABLES, CALLS
from .._torch.tensors import gradient_of, no_torch_function, storage_address

__all__ = ["HeldStorage", "Holder", "find_all_holders", "merge_held"]

# What a report says

FIRST = re.compile(r"\[[^]]*\]|[^.[]*")  # the first name, key or index of a path


@dataclass(frozen=True)
class Holder:
    """A reference that keeps memory alive; ``str`` gives ``attribute `cache[0]` of encoder (Encoder)`` or the like.

    Parameters
    ----------
    kind : str
        What refers to the memory: ``"attribute"``, ``"global"``, ``"local variable"``, ``"input"``, ``"output"`` etc.
    paths, owner : tuple of str, str
        How the memory is reached, in several ways if storages with the same holder were merged; what the reference
        belongs to: a module, a function with its file and line, a class.
    """

    kind: str
    paths: tuple[str, ...]
    owner: str

    def __str__(self) -> str:
        if not self.paths[0]:
            return f"the {self.kind} of {self.owner}"
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.kind} `{self.paths[0]}`{more} of {self.owner}"


@dataclass(frozen=True)
class HeldStorage:
    """A storage that was copied to the host and not freed.

    Parameters
    ----------
    group, nbytes : str, int
        Name of the group that saved it; size in bytes.
    holders : tuple of Holder
        What in Python refers to it.  Empty if only autograd of another graph or C++ does.
    is_input : bool
        Whether it is an input of the model, which its caller may refer to.
    """

    group: str
    nbytes: int
    holders: tuple[Holder, ...] = ()
    is_input: bool = False


def merge_held(held: Sequence[HeldStorage]) -> list[tuple[tuple[str, ...], int, tuple[Holder, ...]]]:
    """Merge storages with the same holders: (groups, bytes, holders), most bytes first.

    The same are holders that differ in numbers alone or behind the first name of their paths, as keys and values do.
    """
    merged: dict[tuple[tuple[str, ...], ...], list[HeldStorage]] = {}
    for storage in held:
        key = tuple((h.kind, numberless(FIRST.findall(h.paths[0])[0]), numberless(h.owner)) for h in storage.holders)
        merged.setdefault(key, []).append(storage)
    entries = []
    for same in merged.values():
        groups, holders = tuple(dict.fromkeys(storage.group for storage in same)), []
        for alike in zip(*(storage.holders for storage in same), strict=True):
            paths = dict.fromkeys(holder.paths[0] for holder in alike if holder.owner == alike[0].owner)
            holders.append(replace(alike[0], paths=tuple(paths)))
        entries.append((groups, sum(storage.nbytes for storage in same), tuple(holders)))
    return sorted(entries, key=lambda entry: (-entry[1], entry[0], tuple(map(str, entry[2]))))


# The search

PACKAGE = __name__.partition(".")[0]
CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)
UNKNOWN = "[…]"  # in an object that does not tell the name

LEVELS = 12  # the cache of keys and values of an encoder with a decoder takes ten
MOST_NODES = 2000
MOST_PATHS = 500
MOST_HOLDERS = 16
FEW = 32  # objects; for more of them `gc.get_referrers` is slower than a search in Python

# How much a holder says, best first.  The last three are reported only if there is no better one.
MODULE, LASTING, FUNCTION, LOCAL, CALL, NAMELESS, PASSING = range(7)


def find_all_holders(
    addresses: Iterable[int], modules: Mapping[torch.nn.Module, str] | None = None
) -> dict[int, tuple[Holder, ...]]:
    """Return what in Python refers to tensors on storages, by address: ``tensor.untyped_storage()._cdata``.

    What lasts longest comes first: attributes of modules, globals and classes, closures, local variables.  Without any,
    inputs and outputs of modules that are being called.  Objects of this package are no holders.  Takes up to a second
    in a large program.
    """
    search = _Search(modules or {})
    try:
        return search.run(dict.fromkeys(addresses))
    finally:
        vars(search).clear()  # frames of the search are among the objects found, and refer to the search


class _Search:
    """The objects found so far, and what refers to them; the containers of the search itself are `ignored`."""

    def __init__(self, modules: Mapping[torch.nn.Module, str]) -> None:
        self.modules = {id(module): name or "the root module" for module, name in modules.items()}
        self.namespaces = {  # names of Python modules by the address of their globals
            # a lazy module loads if asked for an attribute
            id(types.ModuleType.__getattribute__(module, "__dict__")): name
            for name, module in reversed(list(sys.modules.items()))
            if issubclass(type(module), types.ModuleType)
        }
        self.nodes: dict[int, Any] = {}
        self.parents: dict[int, list[int]] = {}
        self.ours: set[int] = set()  # what this package refers to
        self.locals: dict[int, list[tuple[int, str, str, str]]] = {}  # by address: rank, kind, name, owner
        self.snapshots: list[object] = []  # alive until the end, so that their addresses are not used again
        self.ignored = set(map(id, (self.nodes, self.snapshots, self)))
        running = sys._current_frames()
        # Not this frame: one that refers to itself lives, with all that called it, until the collector runs.
        running[threading.get_ident()] = sys._getframe(1)
        for innermost in running.values():
            for frame, _ in traceback.walk_stack(innermost):
                self._note_locals(frame)

    def run(self, addresses: Iterable[int]) -> dict[int, tuple[Holder, ...]]:
        """Return the holders of each storage."""
        tensors = self._tensors(addresses)
        frontier = [tensor for found in tensors.values() for tensor in found] + list(self.nodes.values())
        self.ignored.update(map(id, (tensors, *tensors.values())))
        self.nodes.update((id(node), node) for node in frontier)
        for _ in range(LEVELS):
            self.ignored.add(id(frontier))
            frontier = self._expand(frontier)
            if not frontier or len(self.nodes) > MOST_NODES:
                break
        return {address: self._holders(found) for address, found in tensors.items()}

    def _note_locals(self, frame: types.FrameType) -> None:
        code, is_call = frame.f_code, frame.f_code in CALLS
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or of a class
            name = frame.f_globals.get("__name__")
            name = name if isinstance(name, str) else Path(code.co_filename).name
            self.namespaces.setdefault(id(frame.f_globals), name)
            return
        if _is_part_of(PACKAGE, frame) and not is_call:
            return
        module = ""
        for name, value in self._variables(frame):
            if name in code.co_freevars:
                continue  # found as the closure of a function
            if is_call and name == "self":  # the first variable
                module = self.modules.get(id(value)) or _class(value)
            if module and name in CALL_VARIABLES:
                entry = CALL, CALL_VARIABLES[name], "" if name == "result" else name, module
            else:
                entry = PASSING if _is_part_of("torch", frame) else LOCAL, "local variable", name, _where(code, frame)
            self.locals.setdefault(id(value), []).append(entry)

    def _variables(self, frame: types.FrameType) -> list[tuple[str, object]]:
        """Return the local variables of a frame without keeping them alive."""
        # Before 3.13 a dict with every variable stays in the frame.  It is emptied unless a debugger or a call of
        # locals() refers to it as well, or the function is traced: then its content is written back.
        values = frame.f_locals
        found = list(values.items())
        if type(values) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            self.ignored.add(id(values))
            self.snapshots.append(values)
            mine = 4  # the frame, `values`, the list of snapshots, and the argument of getrefcount
            if sys.getrefcount(values) == mine and sys.gettrace() is None and frame.f_trace is None:
                values.clear()
        return found

    def _tensors(self, addresses: Iterable[int]) -> dict[int, list[Any]]:
        """Return the tensors and storage objects at each address."""
        found: dict[int, dict[int, Any]] = {address: {} for address in addresses}
        with no_torch_function():
            for obj in gc.get_objects():
                # Not isinstance: it asks objects for their class, and a lazy proxy then loads what it stands for.
                if not issubclass(type(obj), (torch.Tensor, torch.UntypedStorage)):
                    continue
                if storage_address(obj) in found:
                    found[storage_address(obj)][id(obj)] = obj
                gradient = gradient_of(obj)  # C++ refers to it, where the collector does not look
                if storage_address(gradient) in found:
                    found[storage_address(gradient)][id(gradient)] = gradient
                    self.nodes[id(obj)] = obj
                    self.parents[id(gradient)] = [id(obj)]
        return {address: list(objects.values()) for address, objects in found.items()}

    def _expand(self, frontier: list[Any]) -> list[Any]:
        """Note what refers to these objects; return those referrers that have no name of their own."""
        wanted, nameless = set(map(id, frontier)), []
        if len(frontier) <= FEW:
            referrers = gc.get_referrers(*frontier)
        else:
            referrers = [o for o in gc.get_objects() if not wanted.isdisjoint(map(id, gc.get_referents(o)))]
        for referrer in referrers:
            if id(referrer) in self.ignored:
                continue
            children = wanted.intersection(map(id, gc.get_referents(referrer)))
            if _is_part_of(PACKAGE, referrer):
                self.ours.update(children)
                continue
            for child in children:
                self.parents.setdefault(child, []).append(id(referrer))
            if id(referrer) not in self.nodes:
                self.nodes[id(referrer)] = referrer
                if self._root(referrer) is None:
                    nameless.append(referrer)
        return nameless

    def _root(self, node: Any) -> tuple[int, str, str] | None:
        """Return rank, kind and owner of what an object with a name of its own refers to; None if it has no name."""
        kind = type(node)
        if id(node) in self.modules:
            return MODULE, "attribute", f"{self.modules[id(node)]} ({_class(node)})"
        if id(node) in self.namespaces:
            return LASTING, "global", f"module {self.namespaces[id(node)]}"
        if issubclass(kind, type):
            return LASTING, "attribute", f"class {_short(node.__qualname__)}"
        if issubclass(kind, FunctionCtx):
            return LASTING, "attribute", f"ctx of the autograd function {_class(node).removesuffix('Backward')}"
        rank = PASSING if _is_part_of("torch", node) else FUNCTION
        if kind is types.FunctionType:
            return rank, "closure variable", _where(node.__code__)
        if kind is types.FrameType:
            return rank, "local variable", f"{_where(node.f_code, node)}, kept by a traceback"
        return None

    def _holders(self, tensors: list[Any]) -> tuple[Holder, ...]:
        """Return the holders of these tensors, the best first."""
        found: set[tuple[int, Holder]] = set()
        for tensor in tensors:
            found.update(self._local_holders([tensor]))
            for parent in self.parents.get(id(tensor), ()):
                try:
                    found.update(self._best([tensor, self.nodes[parent]]))
                except Exception:  # objects of the program may raise: a holder without a name is better than no report
                    owner = f"an object of class {_class(self.nodes[parent])}"
                    found.add((NAMELESS, Holder("element", (UNKNOWN,), owner)))
        named = {entry for entry in found if entry[0] < CALL} or {entry for entry in found if entry[0] == CALL}
        ordered = sorted(named or found, key=lambda entry: (entry[0], str(entry[1])))
        return tuple(dict.fromkeys(holder for _, holder in ordered))[:MOST_HOLDERS]

    def _best(self, start: list[Any]) -> list[tuple[int, Holder]]:
        """Return the best of the names of a holder, with its rank; of two as good, the shorter one; none if ours."""
        found: list[tuple[int, Holder]] = []
        paths = [start]
        for path in paths:  # grows while it is walked; the same object may be reached in several ways
            found += self._local_holders(path)
            if root := self._root(path[-1]):
                rank, kind, owner = root
                found.append((rank, Holder(kind, (self._path(path).removeprefix("."),), owner)))
                continue
            for parent in self.parents.get(id(path[-1]), ()):
                if len(paths) < MOST_PATHS and not any(id(other) == parent for other in path):
                    paths.append([*path, self.nodes[parent]])
        if found:
            return [min(found, key=lambda e: (e[0], UNKNOWN in e[1].paths[0], len(str(e[1])), str(e[1])))]
        for k, node in enumerate(paths[-1][1:], start=1):
            if type(node) not in CONTAINERS:
                name = self._path(paths[-1][: k + 1]).removeprefix(".")
                return [(LOCAL, Holder("attribute", (name,), f"an object of class {_class(node)}"))]
            if id(node) in self.ours or (type(node) is tuple and any(_is_part_of(PACKAGE, part) for part in node)):
                return []  # an object of this package, or what its pack hook returned, refers to it
        owner = f"a {_class(paths[-1][-1])} without a name"
        return [(NAMELESS, Holder("element", (self._path(paths[-1]),), owner))]

    def _local_holders(self, nodes: list[Any]) -> list[tuple[int, Holder]]:
        """Return the local variables that refer to the last object of a path, with their ranks."""
        return [
            (rank, Holder(kind, (f"{name}{self._path(nodes)}".removeprefix("."),), owner))
            for rank, kind, name, owner in self.locals.get(id(nodes[-1]), ())
        ]

    def _path(self, nodes: list[Any]) -> str:
        """Return how the first object is reached from the last: ``.cache[0]``."""
        path, k = "", 0
        while k + 1 < len(nodes):
            child, parent, owner = nodes[k], nodes[k + 1], nodes[k + 2] if k + 2 < len(nodes) else None
            if type(owner) is types.FunctionType and parent is owner.__closure__:
                names = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
                path, k = next(name for name, cell in names if cell is child) + path, k + 2
            elif type(parent) is dict and getattr(owner, "__dict__", {}).get(_key(parent, child)) is child:
                path, k = f".{_key(parent, child)}{path}", k + 2
            else:
                path, k = self._step(parent, child) + path, k + 1
        # What a module registers lies in a dict of the module, and is an attribute as well.
        return re.sub(r"\._(?:buffers|parameters|modules)\['([^']*)'\]", r".\1", path)

    def _step(self, parent: Any, child: Any) -> str:
        """Return how an object is reached from one that refers to it."""
        kind = type(parent)
        if kind is types.CellType:
            return ""
        if issubclass(kind, dict):
            key = _key(parent, child)
            if key is child:
                return UNKNOWN
            return str(key) if id(parent) in self.namespaces else f"[{_readable(key)}]"
        if issubclass(kind, (list, tuple, deque)):
            return next((f"[{k}]" for k, value in enumerate(parent) if value is child), UNKNOWN)
        if issubclass(kind, torch.Tensor) and gradient_of(parent) is child:
            return ".grad"
        is_frame = kind is types.FrameType
        attributes = self._variables(parent) if is_frame else getattr(parent, "__dict__", {}).items()
        return next((f".{name}" for name, value in attributes if value is child), UNKNOWN)


def _is_part_of(package: str, obj: Any) -> bool:
    """Whether an object belongs to a package: instances of its classes, its functions, classes and frames."""
    definition = obj if type(obj) is types.FunctionType or issubclass(type(obj), type) else type(obj)
    try:
        name = obj.f_globals.get("__name__") if type(obj) is types.FrameType else definition.__module__
    except Exception:  # a metaclass may do anything
        return False
    return isinstance(name, str) and (name == package or name.startswith(f"{package}."))


def _key(container: dict[Any, Any], child: object) -> object:  # the object itself if it is a key
    return next((key for key, value in dict.items(container) if value is child), child)


def _readable(key: object) -> str:
    """Return a key as it is written in a program; the code of other classes does not run."""
    if type(key) is str:
        return repr(key if len(key) <= 40 else f"{key[:39]}…")
    return repr(key) if type(key) in (int, bool, float, type(None)) else f"<{_class(key)}>"


def _where(code: types.CodeType, frame: types.FrameType | None = None) -> str:
    """Return the name of a function with its file, without the folder, and a line."""
    line = code.co_firstlineno if frame is None else frame.f_lineno
    return f"{_short(code.co_qualname)} ({Path(code.co_filename).name}:{line})"


def _class(obj: object) -> str:
    return _short(type.__dict__["__qualname__"].__get__(type(obj)))  # whatever its metaclass says


def _short(qualname: str) -> str:
    return qualname.rpartition("<locals>.")[2]
