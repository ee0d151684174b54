"""Notes on storages: keep this one; this one is final.

A note is found by the address of its storage.  It holds a weak reference, which keeps the address from being
given to another storage, so a note can never be mistaken for somebody else's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from ..device.base import Event
from .weak import StorageRef

__all__ = ["Final", "final", "is_kept", "keep", "take_final"]


@dataclass(frozen=True, slots=True)
class Final:
    """A storage was final at an event."""

    storage: StorageRef
    version: int
    event: Event
    captured: bool
    whole: bool


_lock = threading.Lock()
_kept: dict[int, StorageRef] = {}
_final: dict[int, Final] = {}
_sweep_at = {"kept": 64, "final": 64}


def keep(tensor: torch.Tensor) -> None:
    """Note that a tensor's storage stays on the device."""
    storage = tensor.untyped_storage()
    with _lock:
        _kept[storage._cdata] = StorageRef(storage)  # [keep: address of a marked storage]
        if len(_kept) >= _sweep_at["kept"]:
            for key in [key for key, weak in _kept.items() if weak.expired]:
                del _kept[key]
            _sweep_at["kept"] = 2 * len(_kept) + 64


def is_kept(key: int) -> bool:
    """Whether the storage at an address, which the caller holds, is noted to stay."""
    return key in _kept


def final(tensor: torch.Tensor, event: Event, captured: bool, *, whole: bool) -> None:
    """Note that a tensor's storage is final after an event."""
    storage = tensor.untyped_storage()
    with _lock:
        # [keep: address of a final storage]
        note = Final(StorageRef(storage), tensor._version, event, captured, whole)
        _final[storage._cdata] = note
        if len(_final) >= _sweep_at["final"]:
            for key in [key for key, note in _final.items() if note.storage.expired]:
                del _final[key]
            _sweep_at["final"] = 2 * len(_final) + 64


def any_final() -> bool:
    """Whether there is any note of this kind, so that most programs never pay for looking."""
    return bool(_final)


def take_final(key: int, version: int) -> Final | None:
    """Return the note on the storage at an address, unless it was changed since."""
    note = _final.get(key)
    return note if note is not None and note.version == version else None
