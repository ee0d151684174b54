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
import traceback
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from .._text import fold, numberless
from .._torch.modules import CALL_VARIABLES, CALLS
from .._torch.tensors import no_torch_function, storage_address
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
        not recorded.  Not compared.
    """

    group: str
    nbytes: int
    holders: tuple[Holder, ...] | None = field(default=None, compare=False)


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

KINDS = "attribute", "global", "closure variable", "local variable", "input", "output"  # best first
CALL = KINDS[4:]  # of a call in progress: reported only if there is nothing better
PACKAGE = __name__.partition(".")[0]  # its objects are no holders
PACKAGES = ("torch", PACKAGE)  # nor are the variables of their functions
UNKNOWN = "[…]"  # in an object that does not tell the name
LEAVES = {str, int, float, bool, types.NoneType}  # refer to nothing
MOST_OBJECTS = 100_000  # that are visited
MOST_ELEMENTS = 1000  # of a container
MOST_HOLDERS = 16

Reference = tuple[Holder, object]


def find_all_holders(
    addresses: Iterable[int], modules: Mapping[Module, str] | None = None
) -> dict[int, tuple[Holder, ...]]:
    """Return what in Python refers to tensors on storages, by address: ``tensor.untyped_storage()._cdata``.

    What lasts longest comes first: attributes of modules, globals, closures, local variables.  Without any, inputs and
    outputs of modules that are being called.  Objects of this package are no holders.
    """
    names = {id(module): name or "the model" for module, name in (modules or {}).items()}
    found: dict[int, set[Holder]] = {address: set() for address in addresses}
    # Not this frame: one that refers to itself lives, with all that called it, until the collector runs.
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    level = [*_modules(modules or {}, names), *(root for frame in frames for root in _variables(frame, names))]
    level.sort(key=lambda root: KINDS.index(root[0].kind))
    visited = set(names)
    with no_torch_function():
        while level:  # breadth first; an object is visited once, by its best name
            level = [below for holder, value in level for below in _visit(holder, value, found, visited)]
    best = {}
    for address, holders in found.items():
        ordered = sorted(holders, key=lambda holder: (KINDS.index(holder.kind), str(holder)))
        named = [holder for holder in ordered if holder.kind not in CALL]
        best[address] = tuple(named or ordered)[:MOST_HOLDERS]
    return best


def _modules(modules: Iterable[Module], names: Mapping[int, str]) -> Iterator[Reference]:
    """Yield the attributes of a model's modules, and the globals of the program."""
    for module in modules:
        for name, value in _attributes(module):
            yield Holder("attribute", name, f"{names[id(module)]} ({_class(module)})"), value
    for name, found in list(sys.modules.items()):
        if issubclass(type(found), types.ModuleType) and not _is_part_of((*PACKAGES, *sys.stdlib_module_names), name):
            # A lazy module loads if asked for an attribute.
            variables: dict[str, object] = types.ModuleType.__getattribute__(found, "__dict__")
            if not is_library(str(variables.get("__file__"))):
                for variable, value in list(variables.items()):
                    yield Holder("global", variable, f"module {name}"), value


def _variables(frame: types.FrameType, names: Mapping[int, str]) -> Iterator[Reference]:
    """Yield the local variables of a function, or input and output of a call of a module; keep none of them alive."""
    code, is_call = frame.f_code, frame.f_code in CALLS
    if not code.co_flags & inspect.CO_OPTIMIZED or (  # variables of a module that is being run are globals
        not is_call and _is_part_of(PACKAGES, frame.f_globals.get("__name__"))
    ):
        return
    # Before 3.13 a dict with every variable stays in the frame.  It is emptied unless a debugger or a call of
    # locals() refers to it as well, or the function is traced: then its content is written back.
    values = frame.f_locals
    found = {name: value for name, value in values.items() if name not in code.co_freevars}  # those are of closures
    mine = 3  # the frame, `values`, and the argument of getrefcount
    if type(values) is dict and sys.getrefcount(values) == mine and sys.gettrace() is None and frame.f_trace is None:
        values.clear()
    module = found.get("self") if is_call else None
    owner = _where(code, frame.f_lineno) if module is None else names.get(id(module), _class(module))
    for name, value in found.items():
        if not is_call:
            yield Holder("local variable", name, owner), value
        elif name in CALL_VARIABLES:
            yield Holder(CALL_VARIABLES[name], "" if name == "result" else name, owner), value


def _visit(holder: Holder, value: Any, found: Mapping[int, set[Holder]], visited: set[int]) -> Iterator[Reference]:
    """Note a tensor, and yield what an object refers to."""
    kind = type(value)
    if issubclass(kind, (torch.Tensor, torch.UntypedStorage)):
        # What a module registers lies in a dict of the module, and is an attribute as well.
        path = re.sub(r"(?:^|\.)_(?:buffers|parameters|modules)\['([^']*)'\]", r".\1", holder.path).removeprefix(".")
        found.get(storage_address(value), set()).add(replace(holder, path=path))
    if kind in LEAVES or issubclass(kind, (types.ModuleType, type)) or id(value) in visited:
        return
    path, is_function = holder.path, kind is types.FunctionType
    of_kind = type.__dict__["__module__"].__get__(kind)  # whatever its metaclass says
    if len(visited) > MOST_OBJECTS or _is_part_of((PACKAGE,), of_kind):
        return
    if is_function:
        if _is_part_of(PACKAGES, value.__module__):
            return
        holder = Holder("closure variable", "", _where(value.__code__, value.__code__.co_firstlineno))
        path = ""
    visited.add(id(value))
    for step, child in _children(value):
        yield replace(holder, path=f"{path}{step}".removeprefix(".")), child


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return the attributes of an object by name; code of other classes does not run."""
    try:
        return list(object.__getattribute__(value, "__dict__").items())
    except Exception:  # it has none
        return []


def _children(value: Any) -> list[tuple[str, object]]:
    """Return what an object refers to with the steps of a path; code of other classes does not run."""
    kind, elements = type(value), list[tuple[str, object]]()
    if kind is types.FunctionType:
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, each) for name, cell in cells for each in gc.get_referents(cell)]
    if issubclass(kind, dict):
        for key, each in islice(list(dict.items(value)), MOST_ELEMENTS):
            elements.append((f"[{repr(key) if type(key) in LEAVES else f'<{_class(key)}>'}]", each))
    for base in (list, tuple, deque):
        if issubclass(kind, base):
            elements = [(f"[{k}]", each) for k, each in enumerate(islice(list(base.__iter__(value)), MOST_ELEMENTS))]
    attributes = [(f".{name}", each) for name, each in _attributes(value)]
    return [*attributes, *elements] or [(UNKNOWN, each) for each in gc.get_referents(value)]


def _is_part_of(packages: Iterable[str], name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in packages


def _where(code: types.CodeType, line: int) -> str:
    """Return the name of a function with its file, without the folder, and a line."""
    return f"{_short(code.co_qualname)} ({Path(code.co_filename).name}:{line})"


def _class(obj: object) -> str:
    return _short(type.__dict__["__qualname__"].__get__(type(obj)))  # whatever its metaclass says


def _short(qualname: str) -> str:
    return qualname.rpartition("<locals>.")[2]
