"""Words for the references between Python objects: ``.cache[0]``, ``local variable `hidden` of train_step``."""

from __future__ import annotations

import re
import sys
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["CALLED", "RETURNS", "Names", "is_call", "is_part_of", "passed", "where_of"]

PACKAGE = __name__.partition(".")[0]
CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)
SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
SOMEWHERE = "[…]"  # inside an object that does not tell under which name

RETURNS, CALLED = "returns", "was called with"
PASSED = {"args": CALLED, "kwargs": CALLED, "result": RETURNS}
"""What a call of a module hands on, by the names that `torch.nn.Module` has for it."""

IN_A_CALL = ("Module._call_impl", "Module._wrapped_call_impl")

# What a name says; the smallest is the best, and the last three are worth a line only if there is no better one.
MODULE, LASTING, FUNCTION, LOCAL, CALL, NAMELESS, PASSING = range(7)


class Names:
    """Names objects by what refers to them, for one search.

    Parameters
    ----------
    modules : mapping of torch.nn.Module to str
        Dotted names of modules, as ``named_modules`` gives them the other way round.

    Attributes
    ----------
    ignored : set of int
        Addresses of objects that only this search needs; they are no holders.
    """

    def __init__(self, modules: Mapping[torch.nn.Module, str]) -> None:
        self.ignored: set[int] = set()
        self._snapshots: list[object] = []  # alive until the end, so that their addresses are not used again
        self._modules = {id(module): name for module, name in modules.items()}
        self._namespaces = _namespaces()

    def forget(self) -> None:
        """Let go of what the search has kept alive so far."""
        self._snapshots.clear()

    def note_globals(self, frame: types.FrameType) -> None:
        """Take the variables of a frame for globals, under the name of its module: or it runs the body of a class."""
        self._namespaces.setdefault(id(frame.f_globals), _name_of_globals(frame.f_globals, frame.f_code))

    def variables(self, frame: types.FrameType) -> list[tuple[str, object]]:
        """Return the local variables of a function's frame without keeping them alive.

        Before Python 3.13, reading ``f_locals`` leaves a dict in the frame that holds every variable until the
        function returns.  It is emptied again unless somebody else has it: a debugger, or a program that called
        ``locals()``.  While a function is traced, what is in the dict is written back, so it is left alone then.
        """
        values = frame.f_locals
        found = list(values.items())
        if type(values) is dict:
            self.ignored.add(id(values))
            self._snapshots.append(values)
            mine = 4  # the frame, `values`, the list of snapshots, and the argument of getrefcount
            if sys.getrefcount(values) == mine and sys.gettrace() is None and frame.f_trace is None:
                values.clear()
        return found

    def is_root(self, node: object) -> bool:
        """Whether an object has a name of its own, so that nobody need ask who holds it."""
        kind = type(node)
        if id(node) in self._modules or (kind is dict and self._namespace(node) is not None):
            return True
        if kind is types.FunctionType or kind is types.FrameType or kind in SUSPENDED:
            return True
        return issubclass(kind, (types.ModuleType, type, torch.autograd.function.FunctionCtx))

    def rank(self, node: object) -> int:
        """Return how much the name of a root says.

        What belongs to functions of torch is passed through a call, as a rule: it ends with the call, and there is
        nothing to be done about it.
        """
        kind = type(node)
        if id(node) in self._modules:
            return MODULE
        if kind is types.FunctionType or kind is types.FrameType or kind in SUSPENDED:
            return PASSING if is_part_of("torch", node) else FUNCTION
        return LASTING

    def path(self, nodes: list[Any]) -> str:
        """Return how the first object is reached from the last: ``.cache[0]``."""
        return self._walk(nodes)[0]

    def of_root(self, nodes: list[Any]) -> str:
        """Return the line for a holder whose last object is a root."""
        root = nodes[-1]
        kind = type(root)
        suffix, role = self._walk(nodes)
        name = suffix.removeprefix(".")
        if id(root) in self._modules:
            word = "buffer" if name in root._buffers else "parameter" if name in root._parameters else "attribute"
            return f"{word} `{name}` of {self._modules[id(root)] or 'the root module'} ({_class(root)})"
        if kind is dict:
            return f"global `{name}` of module {self._namespace(root)}"
        if kind is types.FunctionType:
            return f"{role} `{name}` of {where_of(root.__code__, root.__code__.co_firstlineno)}"
        if kind is types.FrameType:
            return f"local variable `{name}` of {where_of(root.f_code, root.f_lineno)}, kept by a traceback"
        if kind in SUSPENDED:
            frame = _frame_of(root)
            assert frame is not None
            return f"local variable `{name}` of the suspended {where_of(frame.f_code, frame.f_lineno)}"
        if issubclass(kind, torch.autograd.function.FunctionCtx):
            return f"attribute `{name}` of ctx in the autograd function {_class(root).removesuffix('Backward')}"
        if issubclass(kind, types.ModuleType):
            return f"global `{name}` of module {self._namespace(_dict_of(root))}"
        return f"attribute `{name}` of class {_name(root)}"

    def of_nameless(self, nodes: list[Any]) -> tuple[int, str] | None:
        """Return the rank and line for a holder that nothing nameable holds in turn; None if it is this package's."""
        for k, node in enumerate(nodes[1:], start=1):
            if type(node) not in CONTAINERS:
                name = self.path(nodes[: k + 1]).removeprefix(".")
                return LOCAL, f"attribute `{name}` of an object of class {_class(node)}"
        if any(is_part_of(PACKAGE, part) for node in nodes[1:] if type(node) is tuple for part in node):
            return None  # what the pack hook returned
        return NAMELESS, f"element `{self.path(nodes)}` of a {type(nodes[-1]).__name__} without a name"

    def module(self, module: object) -> str:
        """Return what a module is called."""
        name = self._modules.get(id(module))
        return _class(module) if name is None else name or "the root module"

    def _namespace(self, node: Any) -> str | None:
        found = self._namespaces.get(id(node))
        if found is None and type(dict.get(node, "__name__")) is str and "__builtins__" in node:
            return str(node["__name__"])
        return found

    def _walk(self, nodes: list[Any]) -> tuple[str, str]:
        """Return how the first object is reached from the last, and what it is to the last: "attribute"."""
        suffix, role, k = "", "attribute", 0
        while k + 1 < len(nodes):
            child, parent = nodes[k], nodes[k + 1]
            owner = nodes[k + 2] if k + 2 < len(nodes) else None
            variable = _variable_of_function(child, parent, owner)
            if variable is not None:
                suffix, role, k = variable[0] + suffix, variable[1], k + 2
            elif type(parent) is dict and type(owner) is types.FrameType:  # what locals() returned there
                suffix, k = f"{_key(parent, child)}{suffix}", k + 2
            elif issubclass(type(parent), dict) and owner is not None and _is_dict_of(parent, owner, child):
                suffix, k = f".{_key(parent, child)}{suffix}", k + 2
            else:
                suffix, k = self._step(parent, child) + suffix, k + 1
        # What a module registers lies in a dict of the module, and is an attribute all the same.
        return re.sub(r"\._(?:buffers|parameters|modules)\['([^']*)'\]", r".\1", suffix), role

    def _step(self, parent: Any, child: Any) -> str:
        kind = type(parent)
        if kind is types.CellType:
            return ""
        if issubclass(kind, dict):
            key = _key(parent, child)
            if key is child:
                return SOMEWHERE
            return str(key) if self._namespace(parent) is not None else f"[{_readable(key)}]"
        if issubclass(kind, (list, tuple, deque)):
            position = _index(parent, child)
            return SOMEWHERE if position is None else f"[{position}]"
        if issubclass(kind, torch.Tensor) and _is_gradient(child, parent):
            return ".grad"
        frame = parent if kind is types.FrameType else _frame_of(parent) if kind in SUSPENDED else None
        if frame is not None:
            return next((name for name, value in self.variables(frame) if value is child), SOMEWHERE)
        name = _attribute(parent, child)
        return SOMEWHERE if name is None else f".{name}"


def is_part_of(package: str, obj: object) -> bool:
    """Whether an object belongs to a package: instances of its classes, its functions, frames and modules."""
    kind = type(obj)
    name: object
    if kind is types.FunctionType:
        name = obj.__module__
    elif kind is types.FrameType or kind in SUSPENDED:
        frame = _frame_of(obj)
        name = None if frame is None else frame.f_globals.get("__name__")
    elif issubclass(kind, types.ModuleType):
        name = types.ModuleType.__getattribute__(obj, "__dict__").get("__name__")
    else:  # not asked of a metaclass, which may say anything
        name = type.__dict__["__module__"].__get__(obj if issubclass(kind, type) else kind)
    return isinstance(name, str) and (name == package or name.startswith(f"{package}."))


def _namespaces() -> dict[int, str]:
    """Return the names of modules by the address of their globals."""
    found: dict[int, str] = {}
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType):
            found.setdefault(id(types.ModuleType.__getattribute__(module, "__dict__")), name)
    return found


def is_call(module: object, qualname: str) -> bool:
    """Whether a function is one of those in which torch calls the forward of a module."""
    return module == "torch.nn.modules.module" and qualname in IN_A_CALL


def passed(variable: str, path: str, module: str) -> str:
    """Return the line for what a call of a module was given, or returns."""
    if variable == "kwargs":
        path = re.sub(r"^\['(\w+)'\]", r"\1", path)
    elif variable == "args":
        path = f"args{path}"
    path = path.removeprefix(".")
    return (f"`{path}` of " if path else "") + f"what {module} {PASSED[variable]}"


def _name_of_globals(namespace: dict[str, Any], code: types.CodeType) -> str:
    name = namespace.get("__name__")
    return name if isinstance(name, str) else _file(code)


def _frame_of(obj: Any) -> types.FrameType | None:
    """Return a frame, or that of something suspended; None once it has ended."""
    if type(obj) is types.FrameType:
        return obj
    frame: types.FrameType | None = getattr(
        obj,
        {
            types.GeneratorType: "gi_frame",
            types.CoroutineType: "cr_frame",
        }.get(type(obj), "ag_frame"),
    )
    return frame


def where_of(code: types.CodeType, line: int | None) -> str:
    """Return the name of a function with its file and a line."""
    return f"{_short(code.co_qualname)} ({_file(code)}:{line})"


def _file(code: types.CodeType) -> str:
    """Return the name of a source file without its folders, which differ from machine to machine."""
    return re.split(r"[\\/]", code.co_filename)[-1]


def _short(qualname: str) -> str:
    return qualname.rpartition("<locals>.")[2]


def _class(obj: object) -> str:
    return _name(type(obj))


def _name(kind: type) -> str:
    return _short(type.__dict__["__qualname__"].__get__(kind))  # whatever its metaclass says


def _variable_of_function(child: object, values: Any, function: Any) -> tuple[str, str] | None:
    """Return the name, and what has it, if a tuple is the closure of a function or its defaults."""
    if type(values) is not tuple or type(function) is not types.FunctionType:
        return None
    code, position = function.__code__, _index(values, child)
    if function.__closure__ is values:
        return code.co_freevars[position], "closure variable"
    if function.__defaults__ is values:
        return code.co_varnames[position + code.co_argcount - len(values)], "default of argument"
    return None


def _is_gradient(tensor: object, of: object) -> bool:
    base: Any = torch._C.TensorBase
    return bool(base.is_leaf.__get__(of)) and base.grad.__get__(of) is tensor


def _key(container: dict[Any, Any], child: object) -> object:
    """Return under which key a dict has an object; the object itself if it is a key."""
    return next((key for key, value in dict.items(container) if value is child), child)


def _index(container: Any, child: object) -> Any:
    kind = next(kind for kind in (list, tuple, deque) if issubclass(type(container), kind))
    items = kind.__iter__(container)  # not what a subclass may do instead
    return next((k for k, value in enumerate(items) if value is child), None)


def _readable(key: object) -> str:
    """Return a key as people write it; the code of other classes is not run for that."""
    if type(key) in (int, bool, float, type(None)):
        return repr(key)
    if type(key) is str:
        return repr(key if len(key) <= 40 else f"{key[:39]}…")
    return f"<{type(key).__name__}>"


def _dict_of(obj: object) -> object:
    """Return the attributes of an object, or None if it has none."""
    try:
        return object.__getattribute__(obj, "__dict__")
    except Exception:  # whatever a class does with that name
        return None


def _is_dict_of(values: dict[Any, Any], owner: object, child: object) -> bool:
    """Whether a dict that refers to an object holds the attributes of an owner."""
    if issubclass(type(owner), type):  # shows a view of its dict only
        return type.__dict__["__dict__"].__get__(owner).get(_key(values, child)) is child
    return _dict_of(owner) is values


def _attribute(owner: Any, child: object) -> str | None:
    """Return the attribute of an object that is another one: in its ``__dict__`` or in a slot."""
    values = _dict_of(owner)
    if type(values) is dict:
        for name, value in values.items():
            if value is child:
                return str(name)
    for kind in type(owner).__mro__:
        for name, slot in kind.__dict__.items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    if slot.__get__(owner) is child:
                        return name
                except AttributeError:
                    continue
    return None
