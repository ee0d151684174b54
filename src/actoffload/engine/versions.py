"""Version counters of saved tensors: how in-place edits are caught."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .._torch.tensors import base_of, counter_of, version_of

__all__ = ["Seen", "Wrapper", "Wrappers", "changed", "serves", "together", "unchanged"]


def changed(tensor: torch.Tensor, size: tuple[int, ...], version: int) -> RuntimeError:
    """Return the error that autograd raises without hooks, for a saved tensor of a size that is not at `version` now.

    `tensor` shares the version counter of the saved one; its own shape does not matter.
    """
    shape = ", ".join(map(str, size))
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} [{shape}]] is at version {version_of(tensor)}; expected version {version} instead. "
        "Change a copy of it, or change it before it is used or after backward. "
        "torch.autograd.set_detect_anomaly(True) shows where it was used."
    )


RETURNED = 1024
"""How many rebuilt tensors of one wrapper are watched: one for each backward of a retained graph."""


class Wrapper:
    """The version counter that a wrapper tensor shares with its views; made by `of`, once for all of them."""

    __slots__ = ("__weakref__", "_returned", "_root", "counter")

    def __init__(self, tensor: torch.Tensor, root: torch.Tensor) -> None:
        self.counter = counter_of(tensor)
        self._root = weakref.ref(root)
        self._returned: deque[tuple[torch.Tensor, int]] = deque(maxlen=RETURNED)

    @staticmethod
    def of(tensor: torch.Tensor) -> Wrapper:
        """Return what has the counter of a tensor."""
        base = base_of(tensor)
        root = tensor if base is None else base
        wrapper = _wrappers.get(id(root))
        if wrapper is None or wrapper._root() is not root:
            wrapper = _wrappers[id(root)] = Wrapper(tensor, root)
        return wrapper

    def returned(self, tensor: torch.Tensor) -> None:
        """Watch a tensor that autograd gets in place of the saved one; see [Note: in-place edits] in pack.py."""
        self._returned.append((counter_of(tensor), version_of(tensor)))

    def check(self, version: int, size: torch.Size) -> None:
        """Raise autograd's error if the tensor, or one that was returned for it, was changed since `version`."""
        if version_of(self.counter) != version:
            raise changed(self.counter, size, version)
        for counter, clean in self._returned:
            if version_of(counter) != clean:
                raise changed(counter, size, clean)


_wrappers: weakref.WeakValueDictionary[int, Wrapper] = weakref.WeakValueDictionary()


class Seen(NamedTuple):
    """A wrapper at the moment at which something in it was saved."""

    wrapper: Wrapper
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Seen:
        """Return what has the counter of a tensor, and its version now."""
        return cls(Wrapper.of(tensor), version_of(tensor))


Wrappers = tuple[Seen, ...]
"""The wrappers around a plain tensor, outermost first; empty for what is no part of anything."""


def unchanged(seen: Iterable[Seen]) -> bool:
    """Whether none of some wrappers was changed since."""
    return all(version_of(wrapper.counter) == version for wrapper, version in seen)


def serves(before: Sequence[Seen], wrappers: Wrappers) -> bool:
    """Whether a storage that was saved in some wrappers is still what a part of others has.

    A wrapper that was changed at all may have been changed after the storage was saved, unless it was there already.
    """
    if not unchanged(before):
        return False
    return all(version == 0 or any(wrapper is known for known, _ in before) for wrapper, version in wrappers)


def together(before: Sequence[Seen], wrappers: Wrappers) -> Wrappers:
    """Return the wrappers of a storage with those of one more tensor on it."""
    return (*before, *(seen for seen in wrappers if seen not in before))
