"""The version counters of tensors that are made of others.

`[Note: outer tensors]`  A wrapper and the plain tensors in it have version counters of their own.  An in-place
operation on the wrapper counts on the wrapper's alone (and on that of its views), though it writes the memory of the
parts.  So three checks that are made by the counter of a plain tensor need the wrapper's too: whether what was saved
is still what it was; whether a storage that was saved before can serve a tensor saved now; whether a tensor is still
as final as `start_offload` was told.  Whoever checks holds an `Outer`, which has the counter and neither memory nor
graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .hollow import hollow
from .inplace import changed

__all__ = ["Outer", "Seen", "Within", "serves", "together", "unchanged"]

RETURNED = 1024
"""How many tensors that were given back for one are watched: it takes so many backwards of a retained graph."""


class Outer:
    """The version counter that a wrapper tensor shares with its views.

    Make it with `Outer.of`, which gives the same object for all tensors that share a counter.

    Parameters
    ----------
    tensor : torch.Tensor
        The wrapper.
    root : torch.Tensor
        The tensor of which it is a view, or itself.
    """

    __slots__ = ("__weakref__", "_counter", "_returned", "_root")

    def __init__(self, tensor: torch.Tensor, root: torch.Tensor) -> None:
        self._counter = _counter(tensor)
        self._root = weakref.ref(root)
        self._returned: deque[tuple[torch.Tensor, int]] = deque(maxlen=RETURNED)

    @staticmethod
    def of(tensor: torch.Tensor) -> Outer:
        """Return what has the counter of a tensor."""
        root = tensor if tensor._base is None else tensor._base
        outer = _outers.get(id(root))
        if outer is None or outer._root() is not root:
            outer = _outers[id(root)] = Outer(tensor, root)
        return outer

    @property
    def version(self) -> int:
        """How often the tensor was changed so far."""
        return int(self._counter._version)

    def returned(self, tensor: torch.Tensor) -> None:
        """Watch a tensor that autograd gets in place of the saved one; see [Note: in-place edits] in saved.py."""
        self._returned.append((_counter(tensor), tensor._version))

    def check(self, version: int, size: torch.Size) -> None:
        """Raise autograd's error if the tensor, or one that was returned for it, was changed since `version`."""
        if self._counter._version != version:
            raise changed(self._counter, size, version)
        for counter, clean in self._returned:
            if counter._version != clean:
                raise changed(counter, size, clean)


_outers: weakref.WeakValueDictionary[int, Outer] = weakref.WeakValueDictionary()


class Seen(NamedTuple):
    """A wrapper at the moment at which something in it was saved.

    Parameters
    ----------
    outer : Outer
        Whose counter.
    version : int
        What it showed.
    """

    outer: Outer
    version: int


Within = tuple[Seen, ...]
"""The wrappers around a plain tensor, outermost first; empty for what is no part of anything."""


def unchanged(seen: Iterable[Seen]) -> bool:
    """Whether none of some wrappers was changed since."""
    return all(outer.version == version for outer, version in seen)


def serves(before: Sequence[Seen], within: Within) -> bool:
    """Whether a storage that was saved in some wrappers is still what a part of others has.

    A wrapper that was changed at all may have been changed after the storage was saved, unless it was there already.
    """
    if not unchanged(before):
        return False
    return all(version == 0 or any(outer is known for known, _ in before) for outer, version in within)


def together(before: Sequence[Seen], within: Within) -> Within:
    """Return the wrappers of a storage with those of one more tensor on it."""
    return (*before, *(seen for seen in within if seen not in before))


def _counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the version counter of another and nothing else of it.

    Below the dispatch to Python a wrapper is an ordinary tensor that has no memory, and can be detached as such.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        alias = tensor.detach()
    if alias.layout is torch.strided:
        hollow(alias)
    return alias
