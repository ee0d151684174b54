"""Weak references to storages."""

from __future__ import annotations

import sys

import torch

__all__ = ["StorageRef"]


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
        self._weak = storage._weak_ref()

    @property
    def expired(self) -> bool:
        """Whether the memory is gone."""
        return bool(torch.UntypedStorage._expired(self._weak))

    def __del__(self) -> None:
        if not sys.is_finalizing():  # by then torch may be gone, and the process gives everything back
            torch.UntypedStorage._free_weak_ref(self._weak)  # type: ignore[no-untyped-call]
