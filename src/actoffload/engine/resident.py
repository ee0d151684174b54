"""A storage saved in a layer that stays: counted as long as autograd holds it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from ..observe.counters import Counters
from .dynamo import opaque

__all__ = ["Resident"]


class Resident:
    """Held by everything that autograd keeps of one such storage in one pass.

    As long as this object is alive, so is the storage; by its address the pass finds it when another tensor on the
    same storage is saved.

    Parameters
    ----------
    nbytes : int
        Size of the storage in bytes.
    counters : Counters
        Where it is counted.
    """

    __slots__ = ("__weakref__", "_counters", "nbytes", "used")

    def __init__(self, nbytes: int, counters: Counters) -> None:
        self.nbytes = nbytes
        self.used: Callable[[], None] | None = None  # whom to tell when backward asks for it
        self._counters = counters
        counters.tensors_saved += 1
        counters.bytes_saved += nbytes
        counters.rise(nbytes)

    def __del__(self) -> None:
        self._counters.freed(self.nbytes)


opaque(Resident.__del__)
