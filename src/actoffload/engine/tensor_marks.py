"""Notes on storages: keep this one; this one is final.

A note is found by the address of its storage.  It holds a weak reference, which keeps the address from being
given to another storage, so a note never applies to another storage.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from .._torch.tensors import address, storage_expired, storage_weakref, version_of
from ..device.base import Backend, StreamEvent
from .host_pool import Resources
from .versions import Wrappers, unchanged

__all__ = ["Final", "StorageRef", "enabled", "final", "finals", "keep", "kept", "running", "take_final"]


class StorageRef:
    """A weak reference to a storage; it keeps the address and not the memory."""

    __slots__ = ("__weakref__", "_resources")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._resources = Resources.of(self, storage_weakref(storage))

    @property
    def expired(self) -> bool:
        """Whether the memory is freed."""
        return storage_expired(self._resources.weak)


@dataclass(frozen=True, slots=True)
class Final:
    """A storage was final at an event."""

    storage: StorageRef
    version: int
    event: StreamEvent
    captured: bool
    whole: bool
    wrappers: Wrappers = ()


_lock = threading.Lock()
kept: dict[int, StorageRef] = {}  # by address; the caller of a look-up holds the storage that lies there now
finals: dict[int, Final] = {}
_sweep_at = {"kept": 64, "final": 64}


def keep(tensor: torch.Tensor) -> None:
    """Note that a tensor's storage stays on the device."""
    storage = tensor.untyped_storage()
    with _lock:
        kept[address(storage)] = StorageRef(storage)  # [keep: address of a marked storage]
        if len(kept) >= _sweep_at["kept"]:  # [guard: sweep of kept marks]
            for key in [key for key, weak in kept.items() if weak.expired]:
                del kept[key]
            _sweep_at["kept"] = 2 * len(kept) + 64


def final(tensor: torch.Tensor, event: StreamEvent, captured: bool, *, whole: bool, wrappers: Wrappers = ()) -> None:
    """Note that a tensor's storage is final after an event, unless one of the wrappers around it is changed."""
    storage = tensor.untyped_storage()
    with _lock:
        # [keep: address of a final storage]
        note = Final(StorageRef(storage), version_of(tensor), event, captured, whole, wrappers)
        finals[address(storage)] = note
        if len(finals) >= _sweep_at["final"]:  # [guard: sweep of final marks]
            for key in [key for key, note in finals.items() if note.storage.expired]:
                del finals[key]
            _sweep_at["final"] = 2 * len(finals) + 64


def take_final(key: int, version: int) -> Final | None:
    """Return the note on the storage at an address, unless it was changed since."""
    note = finals.get(key)
    if note is None or not unchanged(note.wrappers):
        return None
    if note.version != version:  # [guard: edit after start_offload]
        return None
    return note


class _Running(threading.local):
    """The kinds of device of the contexts that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.backends: list[Backend] = []


running = _Running()


def enabled() -> bool:
    """Whether this thread is inside an enabled context."""
    return bool(running.backends)
