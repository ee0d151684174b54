"""Saved tensors made of several plain ones: each part is offloaded by itself, the whole is rebuilt.

Two conventions say what a tensor is made of.  PyTorch's traceable wrappers have ``__tensor_flatten__`` and
``__tensor_unflatten__`` (`torch.utils._python_dispatch`): DTensor, jagged nested tensors, torchao's tensors.
Transformer Engine's quantized tensors have ``prepare_for_saving``, ``restore_from_saved`` and ``get_data_tensors``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import Parameter

from .._torch.tensors import base_of
from . import tensor_marks
from .versions import Seen, Wrappers

__all__ = ["Compound", "as_part", "has_parts", "is_compound", "parts_to_save", "plain_parts", "take_apart"]


def is_compound(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others in one of the two ways."""
    return _flattens(type(tensor)) or _gives_parts(tensor)


def _flattens(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _gives_parts(thing: object) -> bool:
    return hasattr(thing, "prepare_for_saving") and hasattr(thing, "restore_from_saved")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Compound:
    """A saved tensor that was taken apart; put together anew each time, so that nothing of it stays on the device."""

    seen: Seen  # the version counter, when the tensor was saved
    size: torch.Size
    parts: Mapping[str | int, Any]  # by name, what the pack hook returned
    build: Callable[[dict[Any, torch.Tensor]], torch.Tensor]  # makes the whole from the parts as tensors

    def unpack(self) -> torch.Tensor:
        """Return the whole, for autograd; a kept part is as it is now, and the counter of the whole decides."""
        outer, version = self.seen
        outer.check(version, self.size)
        parts = {name: part[0] if isinstance(part, tuple) else part.unpack() for name, part in self.parts.items()}
        with torch.no_grad():
            whole = self.build(parts)
        outer.returned(whole)
        return whole


_Taken: TypeAlias = tuple[dict[Any, torch.Tensor], Callable[[dict[Any, torch.Tensor]], torch.Tensor]]
"""The parts of a tensor, and a function that makes the whole from them."""


def take_apart(tensor: torch.Tensor) -> _Taken | None:
    """Take a compound tensor apart; return None if that is not possible."""
    return _take_flat(tensor) if _flattens(type(tensor)) else _take_shell(tensor)


def _take_flat(tensor: Any) -> _Taken | None:
    """Take a traceable wrapper apart."""
    try:
        inner, context = _flatten(tensor)
    except NotImplementedError:
        return None
    parts: dict[Any, torch.Tensor] = {}
    others: dict[Any, Any] = {}
    for name, part in inner.items():
        (parts if isinstance(part, torch.Tensor) else others)[name] = part
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()
    if tensor.layout is torch.jagged:
        # Two ragged dimensions are equal if they come from the same tensor of offsets, the same object.
        for part in (tensor.offsets(), tensor.lengths()):
            if part is not None:
                tensor_marks.keep(part)
    return parts, lambda parts: kind.__tensor_unflatten__({**others, **parts}, context, size, stride)


def _take_shell(tensor: Any) -> _Taken | None:
    """Take the data out of a second tensor of Transformer Engine's convention; the program may go on with the first."""
    twin = tensor.detach()
    if twin is tensor or type(twin) is not type(tensor):
        return None
    saved, shell = twin.prepare_for_saving()
    count, lock = len(saved), threading.Lock()

    def build(parts: dict[Any, torch.Tensor]) -> torch.Tensor:
        with lock:
            shell.restore_from_saved([parts.get(k) for k in range(count)])
            try:
                whole: torch.Tensor = shell.detach()
            finally:
                shell.prepare_for_saving()
        return whole

    return {k: part for k, part in enumerate(saved) if part is not None}, build


def _flatten(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Return what a traceable wrapper is made of, by name, and the rest that puts it together again."""
    if hasattr(tensor, "trigger_wait"):  # the result of a collective that may be still under way
        tensor.trigger_wait()
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def as_part(part: torch.Tensor) -> torch.Tensor:
    """Return a part as a tensor that is no leaf, unless it is a leaf of the program's own.

    `DTensor.from_local` makes its part as a view without a graph that requires a gradient: no leaf of the program's.
    """
    if part.requires_grad and part.is_leaf and not isinstance(part, Parameter):
        base = base_of(part)
        if base is not None and not base.is_leaf:
            return part.detach()
    return part


def has_parts(thing: object) -> bool:
    """Whether something is a tensor, or an object made of tensors."""
    return isinstance(thing, torch.Tensor) or _gives_parts(thing) or hasattr(thing, "get_data_tensors")


def plain_parts(thing: Any) -> list[torch.Tensor]:
    """Return the plain tensors that hold the data of a tensor or an object; a plain tensor itself."""
    inside = _inside(thing, to_save=False)
    if inside is None:
        return [thing] if isinstance(thing, torch.Tensor) else []
    return [part for thing in inside for part in plain_parts(thing)]


def parts_to_save(thing: Any, wrappers: Wrappers = ()) -> Iterator[tuple[torch.Tensor, Wrappers]]:
    """Yield the plain tensors that are saved when a tensor or an object is, each with the wrappers around it.

    An object with `prepare_for_saving` is taken apart and restored at once.
    """
    inside = _inside(thing, to_save=True)
    if isinstance(thing, torch.Tensor):
        if inside is None:
            yield thing, wrappers
            return
        wrappers = (*wrappers, Seen.of(thing))
    for part in inside or ():
        yield from parts_to_save(part, wrappers)


def _inside(thing: Any, *, to_save: bool) -> Iterable[Any] | None:
    """Return what something is made of; None if it is not made of anything."""
    kind = type(thing)
    if kind is torch.Tensor or kind is Parameter:
        return None
    if _flattens(kind):
        return [part for part in _flatten(thing)[0].values() if isinstance(part, torch.Tensor)]
    if to_save and _gives_parts(thing):
        parts, shell = thing.prepare_for_saving()
        shell.restore_from_saved(list(parts))
    elif hasattr(thing, "get_data_tensors"):
        parts = thing.get_data_tensors()
    else:
        return None
    return [parts] if isinstance(parts, torch.Tensor) else [part for part in parts if part is not None]
