"""The arguments of a call that is recomputed, and objects among them that are no trees of tensors but contain some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module

from .._torch.tensors import tree_flatten, tree_unflatten
from .state import version

__all__ = ["Arguments", "objects_among", "tensors_inside", "unchanged"]

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor in an "
    "object that was passed to a module that is recomputed in backward was changed, or replaced, after the forward of "
    "the module. Pass recompute=False."
)

FLAGS = frozenset((bool, str, type(None)))
"""Types of arguments that say what a call does."""
PLAIN = FLAGS | {int, float, complex, bytes}
"""Types of arguments that contain no tensors."""


def objects_among(leaves: Iterable[Any]) -> list[Any]:
    """Return the arguments that may contain tensors, and are none."""
    return [of for of in leaves if type(of) not in PLAIN and not isinstance(of, Tensor)]


def unchanged(objects: Any, parts: Sequence[tuple[Tensor, int]]) -> bool:
    """Return whether objects still contain given tensors, each at a given version."""
    now = tensors_inside(objects)
    return len(now) == len(parts) and all(
        one is of and version(of) == before for one, (of, before) in zip(now, parts, strict=True)
    )


def tensors_inside(of: Any, depth: int = 6, met: set[int] | None = None) -> list[Tensor]:
    """Return the tensors among the attributes of an object, and deeper inside."""
    met = set() if met is None else met
    if isinstance(of, Tensor):
        return [of]
    if not depth or id(of) in met or isinstance(of, Module | ModuleType | type):
        return []
    met.add(id(of))
    if not isinstance(of, dict | list | tuple):
        of = getattr(of, "__dict__", {})
    return [
        tensor
        for part in (of.values() if isinstance(of, dict) else of)
        for tensor in tensors_inside(part, depth - 1, met)
    ]


class Arguments:
    """The arguments of one call, to call the function with them again.

    Attributes
    ----------
    tensors : list of torch.Tensor
        The tensors among them, each once: the function may ask whether two arguments are one.
    flags : tuple
        The arguments that say what the call does, and the types of the others.  Numbers may differ, as the longest
        sequence of a packed batch does in each step.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._leaves, self._tree = tree_flatten((args, kwargs))
        leaves = self._leaves
        self.flags = tuple([of if type(of) in FLAGS else type(of) for of in leaves])
        found: dict[int, Tensor] = {}
        self._places = dict[int, int]()  # from those of leaves to those of tensors
        places = dict[int, int]()
        for k, of in enumerate(leaves):
            if isinstance(of, Tensor) and not of.is_inference():
                found[id(of)] = of
                self._places[k] = places.setdefault(id(of), len(places))  # [guard: identity of inputs]
                leaves[k] = None
        self.tensors = list(found.values())
        self._attributes = [dict(vars(of)) if type(of) is Tensor and vars(of) else None for of in self.tensors]
        self._objects = objects_among(leaves)
        self._parts = [(of, version(of)) for of in tensors_inside(self._objects)]

    def again(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of `tensors`.

        Containers are new: the function may have changed those of the program.  Objects are the same, and a
        `RuntimeError` is raised if a tensor in one of them was changed since.
        """
        if self._objects and not unchanged(self._objects, self._parts):  # [guard: objects that are changed since]
            raise RuntimeError(CHANGED)
        for tensor, had in zip(tensors, self._attributes, strict=True):
            if had:  # [guard: attributes of inputs]
                vars(tensor).update(had)
        leaves = [tensors[self._places[k]] if k in self._places else of for k, of in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._tree)
        return args, kwargs
