"""Where the bytes of a saved storage are, and weak references to storages."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable

import torch

from .._torch import free_storage_weakref, opaque, storage_expired, storage_weakref
from .statistics import Counters

__all__ = ["Residency", "Resident", "StorageRef"]


class Residency(enum.Enum):
    """Where the bytes are."""

    DEVICE = "on the device"
    OFFLOADING = "on the device, copied or being copied to the host"
    HOST = "on the host only"
    RELOADED = "on the host and, again, on the device"


class StorageRef:
    """Knows whether a storage still exists, without keeping its memory.

    While it exists, the address of the storage (``_cdata``) is not given to another one, so what was found by
    that address cannot belong to somebody else.

    Notes
    -----
    Uses the same primitives of PyTorch as `torch.multiprocessing` does for shared storages.
    """

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = storage_weakref(storage)

    @property
    def expired(self) -> bool:
        """Whether the memory is gone."""
        return bool(storage_expired(self._weak))

    def __del__(self) -> None:
        if not sys.is_finalizing():  # by then torch may be gone, and the process gives everything back
            free_storage_weakref(self._weak)


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
