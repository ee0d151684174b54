"""Saved tensors made of several plain ones, and the version counters by which in-place edits are caught.

Each part is offloaded by itself, the whole is rebuilt.  A subclass without operators of its own, as MONAI's, has one
part, itself as a plain tensor.  PyTorch's traceable wrappers, such as DTensor, have ``__tensor_flatten__`` and
``__tensor_unflatten__``; Transformer Engine's quantized tensors have ``prepare_for_saving``, ``restore_from_saved`` and
``get_data_tensors``.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from .tensors import base_of, counter_of, has_own_dispatch, no_torch_function, version_of

# Version counters


def changed(tensor: torch.Tensor, size: tuple[int, ...], version: int) -> RuntimeError:
    """Return the error that autograd raises without hooks, for a tensor of a size and the counter of `tensor`."""
    shape = f"{tensor.type()} [{', '.join(map(str, size))}]"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{shape}] is at version {version_of(tensor)}; expected version {version} instead. "
        "Change a copy of it, or change it before it is used or after backward. "
        "torch.autograd.set_detect_anomaly(True) shows where it was used."
    )


RETURNED = 1024
"""How many rebuilt tensors of one wrapper are watched: one for each backward of a retained graph."""


class Wrapper:
    """The version counter that a wrapper tensor shares with its views; one for all of them: see `version_in`."""

    __slots__ = ("__weakref__", "_returned", "_root", "counter")

    def __init__(self, tensor: torch.Tensor, root: torch.Tensor) -> None:
        self.counter = counter_of(tensor)
        self._root = weakref.ref(root)
        self._returned: deque[tuple[torch.Tensor, int]] = deque(maxlen=RETURNED)

    def returned(self, tensor: torch.Tensor) -> None:
        """Watch a tensor that autograd gets in place of the saved one; see [Note: in-place edits] in hooks.py."""
        self._returned.append((counter_of(tensor), version_of(tensor)))

    def check(self, version: int, size: torch.Size) -> None:
        """Raise autograd's error if the tensor, or one that was returned for it, was changed since `version`."""
        if version_of(self.counter) != version:
            raise changed(self.counter, size, version)
        for counter, clean in self._returned:
            if version_of(counter) != clean:
                raise changed(counter, size, clean)


_wrappers: weakref.WeakValueDictionary[int, Wrapper] = weakref.WeakValueDictionary()


WrapperVersion: TypeAlias = tuple[Wrapper, int]
"""What has the version counter of a wrapper, and its version at the moment at which something in it was saved."""

Wrappers = tuple[WrapperVersion, ...]
"""The wrappers around a plain tensor, outermost first; empty for what is no part of anything."""


def version_in(tensor: torch.Tensor) -> WrapperVersion:
    """Return what has the version counter of a wrapper, and its version now."""
    base = base_of(tensor)
    root = tensor if base is None else base
    wrapper = _wrappers.get(id(root))
    if wrapper is None or wrapper._root() is not root:
        wrapper = _wrappers[id(root)] = Wrapper(tensor, root)
    return wrapper, version_of(tensor)


def unchanged(seen: Iterable[WrapperVersion]) -> bool:
    """Return whether none of some wrappers was changed since."""
    return all(version_of(wrapper.counter) == version for wrapper, version in seen)


def serves(before: Sequence[WrapperVersion], wrappers: Wrappers) -> bool:
    """Whether a storage saved in some wrappers is what others have; a wrapper that was changed must be known."""
    if not unchanged(before):
        return False
    return all(version == 0 or any(wrapper is known for known, _ in before) for wrapper, version in wrappers)


# Parts


def is_compound(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others, or is a plain one with a class and attributes of its own."""
    if _flattens(type(tensor)) or _gives_parts(tensor):
        return True
    return not (has_own_dispatch(type(tensor)) or isinstance(tensor, Parameter) or is_lazy(tensor))


def _flattens(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _gives_parts(thing: object) -> bool:
    return hasattr(thing, "prepare_for_saving") and hasattr(thing, "restore_from_saved")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Compound:
    """A saved tensor that was taken apart; put together anew each time, so that nothing of it stays on the device."""

    seen: WrapperVersion  # the version counter, when the tensor was saved
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


def take_apart(tensor: Any) -> _Taken | None:
    """Take a compound tensor apart; return None if that is not possible."""
    if not _flattens(type(tensor)):
        return _take_shell(tensor) if _gives_parts(tensor) else _take_dressed(tensor)
    try:
        inner, context = _flatten(tensor)
    except NotImplementedError:
        return None
    parts: dict[Any, torch.Tensor] = {name: part for name, part in inner.items() if isinstance(part, torch.Tensor)}
    others = {name: part for name, part in inner.items() if name not in parts}
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()
    return parts, lambda parts: kind.__tensor_unflatten__({**others, **parts}, context, size, stride)


def ragged_parts(tensor: Any) -> list[torch.Tensor]:
    """Return the offsets and lengths of a jagged tensor; sizes are equal if these are the same objects."""
    if tensor.layout is not torch.jagged:
        return []
    return [part for part in (tensor.offsets(), tensor.lengths()) if part is not None]


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


def _take_dressed(tensor: torch.Tensor) -> _Taken:
    """Take the class and the attributes off a tensor."""
    kind, attributes = type(tensor), dict(vars(tensor))
    with no_torch_function():
        plain = tensor.as_subclass(torch.Tensor)

    def build(parts: dict[Any, torch.Tensor]) -> torch.Tensor:
        with no_torch_function():
            whole = parts[0].as_subclass(kind)
        vars(whole).update(attributes)
        return whole

    return {0: plain}, build


def _flatten(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Return what a traceable wrapper is made of, by name, and the rest that puts it together again."""
    if hasattr(tensor, "trigger_wait"):  # the result of a collective that may be still under way
        tensor.trigger_wait()
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def as_part(part: torch.Tensor) -> torch.Tensor:
    """Return a part as a tensor that is no leaf, unless it is one of the program: `DTensor` has views like leaves."""
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
    return [part for part, _ in parts_of(thing, to_save=False)]


def parts_of(thing: Any, wrappers: Wrappers = (), *, to_save: bool = True) -> Iterator[tuple[torch.Tensor, Wrappers]]:
    """Yield the plain tensors of a tensor or an object, those that are saved with it, with the wrappers around each."""
    kind, parts = type(thing), None
    if kind is not torch.Tensor and kind is not Parameter:
        if _flattens(kind):
            parts = [part for part in _flatten(thing)[0].values() if isinstance(part, torch.Tensor)]
        elif to_save and _gives_parts(thing):
            parts, shell = thing.prepare_for_saving()
            shell.restore_from_saved(list(parts))
        elif hasattr(thing, "get_data_tensors"):
            parts = thing.get_data_tensors()
            parts = [parts] if isinstance(parts, torch.Tensor) else parts
    if parts is None:
        if isinstance(thing, torch.Tensor):
            yield thing, wrappers
        return
    if to_save and isinstance(thing, torch.Tensor):
        wrappers = (*wrappers, version_in(thing))
    for part in parts:
        yield from parts_of(part, wrappers, to_save=to_save)
