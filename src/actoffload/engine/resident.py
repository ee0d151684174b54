"""A storage saved in a layer that stays: counted as long as autograd holds it, and nothing else."""

from __future__ import annotations

from ..observe.counters import Counters

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

    __slots__ = ("__weakref__", "_counters", "_nbytes")

    def __init__(self, nbytes: int, counters: Counters) -> None:
        self._nbytes = nbytes
        self._counters = counters
        counters.tensors_saved += 1
        counters.bytes_saved += nbytes
        counters.rise(nbytes)

    def __del__(self) -> None:
        self._counters.freed(self._nbytes)
