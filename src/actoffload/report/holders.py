"""Memory that was not freed: storages that were copied to the host, and what in Python keeps them alive.

The search walks from what has a name in the program, modules, globals and local variables, through containers and
attributes to the tensors.  A tensor that only C++ or a library keeps alive, a node of autograd for instance, has no
holder.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import threading
import traceback
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from .._text import fold, numberless
from .._torch.modules import CALL_VARIABLES, CALLS
from .._torch.tensors import gradient_of, no_torch_function, storage_address
from .._warnings import is_library

# What a report says

FIRST = re.compile(r"\[[^]]*\]|[^.[]*")  # the first name, key or index of a path


@dataclass(frozen=True)
class Holder:
    """A reference that keeps memory alive; ``str`` gives ``attribute `cache[0]` of encoder (Encoder)`` or the like.

    Parameters
    ----------
    kind : str
        What refers to the memory: ``"attribute"``, ``"global"``, ``"local variable"``, ``"input"``, ``"output"`` etc.
    path, owner : str, str
        How the memory is reached; what the reference belongs to: a module, or a function with its file and line.
    """

    kind: str
    path: str
    owner: str

    def __str__(self) -> str:
        return f"{self.kind} `{self.path}` of {self.owner}" if self.path else f"the {self.kind} of {self.owner}"


@dataclass(frozen=True)
class HeldStorage:
    """A storage that was copied to the host and not freed.

    Parameters
    ----------
    group, nbytes : str, int
        Name of the group that saved it; size in bytes.
    holders : tuple of Holder, or None
        What in Python refers to it.  Empty if only autograd of another graph, a library or C++ does; None if a step was
        not recorded.
    is_input : bool
        Whether it is an input of the model, which its caller may refer to.
    """

    group: str
    nbytes: int
    holders: tuple[Holder, ...] | None = None
    is_input: bool = False


def merge_held(held: Sequence[HeldStorage]) -> list[tuple[tuple[str, ...], int, tuple[Holder, ...] | None]]:
    """Merge storages with the same holders: (groups, bytes, holders of the first of them), most bytes first.

    The same are holders that differ in numbers alone or behind the first name of their paths, as keys and values do.
    """

    def key(storage: HeldStorage) -> object:
        return storage.holders and tuple(
            (holder.kind, numberless(FIRST.findall(holder.path)[0]), numberless(holder.owner))
            for holder in storage.holders
        )

    entries = []
    for same in fold(held, key):
        groups = tuple(dict.fromkeys(storage.group for storage in same))
        entries.append((groups, sum(storage.nbytes for storage in same), same[0].holders))
    return sorted(entries, key=lambda entry: (-entry[1], entry[0]))


# The search

PACKAGE = __name__.partition(".")[0]  # its objects are no holders
PACKAGES = ("torch", PACKAGE)  # nor are the variables of their functions
UNKNOWN = "[…]"  # in an object that does not tell the name
LEAVES = {str, int, float, bool, types.NoneType}  # refer to nothing
MOST_OBJECTS = 40_000  # that are visited for each rank of names
MOST_ELEMENTS = 1000  # of a container
MOST_HOLDERS = 16

# How much a holder says, best first.  Those of calls are reported only if there is no better one.
MODULE, LASTING, FUNCTION, LOCAL, CALL = range(5)

Name = tuple[int, str, str]  # rank, kind and owner of a holder


def find_all_holders(
    addresses: Iterable[int], modules: Mapping[torch.nn.Module, str] | None = None
) -> dict[int, tuple[Holder, ...]]:
    """Return what in Python refers to tensors on storages, by address: ``tensor.untyped_storage()._cdata``.

    What lasts longest comes first: attributes of modules, globals and classes, closures, local variables.  Without any,
    inputs and outputs of modules that are being called.  Objects of this package are no holders.
    """
    return _Search(addresses, modules or {}).run()


class _Search:
    """A walk from names to tensors, breadth first; an object is visited once, by its best name."""

    def __init__(self, addresses: Iterable[int], modules: Mapping[torch.nn.Module, str]) -> None:
        self.found: dict[int, dict[Holder, int]] = {address: {} for address in addresses}  # with their ranks
        self.modules = {id(module): name or "the model" for module, name in modules.items()}
        self.visited: set[int] = set()
        self.number = Counter[int]()  # of visited objects, by rank
        self.roots: list[tuple[Name, str, object]] = []  # with the path to the object
        for module in modules:
            owner = f"{self.modules[id(module)]} ({_class(module)})"
            self.roots += [((MODULE, "attribute", owner), path, value) for path, value in _attributes(module)]
        for name in list(sys.modules):
            for variable, value in list((_globals(name) or {}).items()):
                self.roots.append(((LASTING, "global", f"module {name}"), variable, value))
        running = sys._current_frames()
        # Not this frame: one that refers to itself lives, with all that called it, until the collector runs.
        running[threading.get_ident()] = sys._getframe(2)
        for innermost in running.values():
            for frame, _ in traceback.walk_stack(innermost):
                self._add_frame(frame)

    def run(self) -> dict[int, tuple[Holder, ...]]:
        """Return the holders of each storage."""
        with no_torch_function():
            level = sorted(self.roots, key=lambda root: root[0][0])
            while level:
                level = [below for name, path, value in level for below in self._visit(name, path, value)]
        best = {}
        for address, holders in self.found.items():
            ordered = sorted(holders, key=lambda holder: (holders[holder], str(holder)))
            named = [holder for holder in ordered if holders[holder] < CALL]
            best[address] = tuple(named or ordered)[:MOST_HOLDERS]
        return best

    def _add_frame(self, frame: types.FrameType) -> None:
        """Add the local variables of a function; those of a module that is being run are globals."""
        code, is_call = frame.f_code, frame.f_code in CALLS
        if not code.co_flags & inspect.CO_OPTIMIZED or (
            not is_call and _is_part_of(PACKAGES, frame.f_globals.get("__name__"))
        ):
            return
        module = ""
        for variable, value in _variables(frame):
            if variable in code.co_freevars:
                continue  # found as the closure of a function
            if is_call and variable == "self":  # the first variable
                module = self.modules.get(id(value)) or _class(value)
            if not is_call:
                self.roots.append(((LOCAL, "local variable", _where(code, frame.f_lineno)), variable, value))
            elif module and variable in CALL_VARIABLES:
                path = "" if variable == "result" else variable
                self.roots.append(((CALL, CALL_VARIABLES[variable], module), path, value))

    def _visit(self, name: Name, path: str, value: Any) -> Iterator[tuple[Name, str, object]]:
        """Note a tensor, and yield what an object refers to."""
        kind = type(value)
        if issubclass(kind, (torch.Tensor, torch.UntypedStorage)):
            self._note(name, path, value)
            self._note(name, f"{path}.grad", gradient_of(value))
        elif kind in LEAVES or issubclass(kind, types.ModuleType) or self.number[name[0]] > MOST_OBJECTS:
            return
        if id(value) in self.visited or id(value) in self.modules:
            return
        module, is_function = _module(value), kind is types.FunctionType
        if _is_part_of(PACKAGES if is_function else (PACKAGE,), module):
            return
        if issubclass(kind, type) and _globals(module) is None:
            return
        self.visited.add(id(value))
        self.number[name[0]] += 1
        if is_function:
            name, path = (FUNCTION, "closure variable", _where(value.__code__, value.__code__.co_firstlineno)), ""
        for step, child in _children(value):
            yield name, f"{path}{step}".removeprefix("."), child

    def _note(self, name: Name, path: str, tensor: object) -> None:
        holders = self.found.get(storage_address(tensor))
        if holders is not None:
            rank, kind, owner = name
            # What a module registers lies in a dict of the module, and is an attribute as well.
            path = re.sub(r"(?:^|\.)_(?:buffers|parameters|modules)\['([^']*)'\]", r".\1", path)
            holders.setdefault(Holder(kind, path.removeprefix("."), owner), rank)


def _globals(name: str) -> dict[str, object] | None:
    """Return the global variables of a module of the program; None for one of a library."""
    module = sys.modules.get(name)
    is_module = issubclass(type(module), types.ModuleType)
    if not is_module or _is_part_of((*PACKAGES, *sys.stdlib_module_names), name):
        return None
    # A lazy module loads if asked for an attribute.
    variables: dict[str, object] = types.ModuleType.__getattribute__(module, "__dict__")
    return None if is_library(str(variables.get("__file__"))) else variables


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return the attributes of an object with their steps of a path; code of other classes does not run."""
    get: Any = type.__getattribute__ if issubclass(type(value), type) else object.__getattribute__
    try:
        found = get(value, "__dict__")
    except Exception:  # it has none
        return []
    return [(f".{name}", each) for name, each in list(found.items())]


def _children(value: Any) -> list[tuple[str, object]]:
    """Return what an object refers to with the steps of a path; code of other classes does not run."""
    kind, elements = type(value), list[tuple[str, object]]()
    if kind is types.FunctionType:
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, each) for name, cell in cells for each in gc.get_referents(cell)]
    if issubclass(kind, dict):
        elements = [(f"[{_readable(key)}]", each) for key, each in islice(list(dict.items(value)), MOST_ELEMENTS)]
    for base in (list, tuple, deque):
        if issubclass(kind, base):
            elements = [(f"[{k}]", each) for k, each in enumerate(islice(list(base.__iter__(value)), MOST_ELEMENTS))]
    return [*_attributes(value), *elements] or [(UNKNOWN, each) for each in gc.get_referents(value)]


def _variables(frame: types.FrameType) -> list[tuple[str, object]]:
    """Return the local variables of a frame without keeping them alive."""
    # Before 3.13 a dict with every variable stays in the frame.  It is emptied unless a debugger or a call of
    # locals() refers to it as well, or the function is traced: then its content is written back.
    values = frame.f_locals
    found = list(values.items())
    mine = 3  # the frame, `values`, and the argument of getrefcount
    if type(values) is dict and sys.getrefcount(values) == mine and sys.gettrace() is None and frame.f_trace is None:
        values.clear()
    return found


def _module(value: object) -> str:
    """Return the name of the module that defines an object's class, or the object if it is a function or class."""
    if type(value) is types.FunctionType:
        return str(value.__module__)
    kind = value if issubclass(type(value), type) else type(value)
    return str(type.__dict__["__module__"].__get__(kind))  # whatever its metaclass says


def _is_part_of(packages: Iterable[str], name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in packages


def _readable(key: object) -> str:
    """Return a key as it is written in a program; the code of other classes does not run."""
    return repr(key) if type(key) in LEAVES else f"<{_class(key)}>"


def _where(code: types.CodeType, line: int) -> str:
    """Return the name of a function with its file, without the folder, and a line."""
    return f"{_short(code.co_qualname)} ({Path(code.co_filename).name}:{line})"


def _class(obj: object) -> str:
    return _short(type.__dict__["__qualname__"].__get__(type(obj)))  # whatever its metaclass says


def _short(qualname: str) -> str:
    return qualname.rpartition("<locals>.")[2]
