"""Arguments of a recomputed call that are no trees of tensors, such as a data class, but may contain some.

Recomputation gets the objects themselves, so that it must notice if the program has changed what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module

from .state import version

__all__ = ["FLAGS", "objects_among", "tensors_inside", "unchanged"]

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
