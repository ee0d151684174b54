"""The arguments of a call that is recomputed, and objects among them that are no trees of tensors but contain some."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from .._torch.tensors import tree_flatten, tree_unflatten
from .state import version

__all__ = [
    "HOLDERS",
    "PLAIN",
    "Arguments",
    "Snapshot",
    "flags_of",
    "objects_among",
    "tensors_inside",
    "values_held",
    "values_inside",
]

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor in an "
    "object that was passed to a module that is recomputed in backward was changed, or replaced, after the forward of "
    "the module. Pass recompute=False."
)

FLAGS = frozenset((bool, str, type(None)))
"""Types of arguments that say what a call does."""
PLAIN = FLAGS | {int, float, complex, bytes}
"""Types of arguments that contain no tensors."""
HOLDERS = list, tuple, set, frozenset, dict, deque, SimpleNamespace
"""Types of containers."""
LARGE = 2**20
"""Bytes from which on the content of an array of NumPy is not compared."""
_EMPTY = CellType()


def flags_of(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments that say what a call does, and the types of the others.

    Numbers are among the others: the longest sequence of a packed batch is another one in each step.
    """
    return tuple([of if type(of) in FLAGS or isinstance(of, Enum) else type(of) for of in leaves])


def objects_among(leaves: Iterable[Any]) -> list[Any]:
    """Return the arguments that may contain tensors, and are none."""
    return [of for of in leaves if type(of) not in PLAIN and not isinstance(of, Tensor)]


class Snapshot:
    """What is inside of an object at one moment, by one of the functions below; of tensors also the versions."""

    def __init__(self, of: Any, look: Callable[[Any], list[Any]]) -> None:
        self._look = look
        self._of, self._values = of, look(of)
        self._marks = list(map(_mark, self._values))

    def changed(self) -> bool:
        """Return whether others are inside by now, or tensors were edited."""
        return list(map(_mark, self._look(self._of))) != self._marks  # [guard: objects that are changed]


def _mark(of: Any) -> Any:
    """Return what differs if a value does."""
    return (id(of), version(of)) if isinstance(of, Tensor) else (type(of), of)


def tensors_inside(of: Any) -> list[Tensor]:
    """Return the tensors among the attributes of an object, and deeper inside."""
    return [value for value in values_inside(of) if isinstance(value, Tensor)]


def values_held(of: Any) -> list[Any]:
    """Return tensors, numbers and text in a container, and in those inside of it; of arrays their bytes."""
    return values_inside(of, HOLDERS)


def values_inside(
    of: Any, enter: tuple[type, ...] = (object,), depth: int = 6, met: set[int] | None = None
) -> list[Any]:
    """Return the same of any object with attributes, or of those of the types to `enter`."""
    met = set() if met is None else met
    if isinstance(of, Tensor) or type(of) in PLAIN:
        return [of]
    if not depth or id(of) in met or isinstance(of, Module | ModuleType | type):
        return []
    if type(of).__module__ == "numpy":
        return [bytes(of)] if getattr(of, "nbytes", LARGE) < LARGE else []
    if not isinstance(of, enter):
        return []
    met.add(id(of))
    return [value for part in _parts(of) for value in values_inside(part, enter, depth - 1, met)]


def _parts(of: Any) -> Iterable[Any]:
    """Return what an object refers to."""
    if isinstance(of, HOLDERS) and not isinstance(of, dict | SimpleNamespace):
        return of
    if isinstance(of, partial):
        return of.func, of.args, of.keywords
    if isinstance(of, MethodType):
        return of.__self__, of.__func__
    if isinstance(of, FunctionType):
        return [cell.cell_contents for cell in of.__closure__ or () if cell != _EMPTY]
    slots = [name for kind in type(of).__mro__ for name in getattr(kind, "__slots__", ())]
    items = of.values() if isinstance(of, dict) else ()
    return [*items, *getattr(of, "__dict__", {}).values(), *(getattr(of, name, None) for name in slots)]


class Arguments:
    """The arguments of one call except its tensors, to call the function with them again; made by `of`."""

    def __init__(self, leaves: list[Any], tree: Any) -> None:
        self._leaves, self._tree = leaves, tree
        self.flags = flags_of(leaves)
        self._places = dict[int, int]()  # from those of leaves to those of tensors
        self._attributes: list[dict[str, Any] | None] = []
        self._parameters = dict[int, Parameter]()  # by place among the tensors
        self._objects: Snapshot | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Arguments, list[Tensor]]:
        """Return the arguments and, apart from them, their tensors.

        Each tensor comes once, because the function may ask whether two arguments are one.  Nothing else than what is
        returned refers to them: a group that is offloaded frees them.
        """
        leaves, tree = tree_flatten((args, kwargs))
        found, known, tensors = cls(leaves, tree), dict[int, int](), list[Tensor]()
        for k, of in enumerate(leaves):
            if isinstance(of, Tensor) and not of.is_inference():
                if id(of) not in known:  # [guard: identity of inputs -> True]
                    known[id(of)] = len(tensors)
                    if type(of) is Parameter:
                        found._parameters[len(tensors)] = of
                    tensors.append(of)
                    found._attributes.append(dict(vars(of)) if type(of) is Tensor and vars(of) else None)
                found._places[k] = known[id(of)]
                leaves[k] = None
        objects = objects_among(leaves)
        found._objects = Snapshot(objects, tensors_inside) if objects else None
        return found, tensors

    def again(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors in place of those of the first call; parameters are the same.

        Containers are new: the function may have changed those of the program.  Objects are the same, and a
        `RuntimeError` is raised if a tensor in one of them was changed since.
        """
        if self._objects is not None and self._objects.changed():  # [guard: objects that are changed since]
            raise RuntimeError(CHANGED)
        for tensor, had in zip(tensors, self._attributes, strict=True):
            if had:  # [guard: attributes of inputs]
                vars(tensor).update(had)
        tensors = [self._parameters.get(k, of) for k, of in enumerate(tensors)]  # [guard: parameters as arguments]
        leaves = [tensors[self._places[k]] if k in self._places else of for k, of in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._tree)
        return args, kwargs
