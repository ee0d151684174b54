"""Counting what happened, and the statistics that people see."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from tabulate import tabulate

from ..schedule.timeline import mebibytes
from .host_pool import Resources, dropped, settle

__all__ = ["Counters", "Reason", "Statistics"]


class Reason(enum.Enum):
    """Why a saved tensor was kept on the device."""

    # Members are singletons; the hash of Enum is a function of Python's, called for every tensor that stays.
    __hash__ = object.__hash__

    PARAMETER = "parameter"
    BUFFER = "module buffer"
    LEAF = "leaf that requires grad"
    MARKED = "marked with mark_not_offload"
    SMALL = "smaller than the limit"
    DEVICE = "not on the offloading device"
    LAYOUT = "not strided"
    SUBCLASS = "tensor subclass"
    HOST_FULL = "no host memory left"
    SHARED = "shared with a layer that stays"
    OUTSIDE = "saved outside of the chosen modules"
    KEPT = "in a module that keep names"


@dataclass(frozen=True)
class Statistics:
    """What a context has done so far; a snapshot.

    All sizes are in bytes.  Counts and sums run since the context was made or `reset_statistics` was called;
    *now* values are those of the moment.

    Parameters
    ----------
    passes : int
        Forward passes begun.
    tensors_saved, bytes_saved : int
        Storages saved in the layers that could be offloaded, scheduled or not; each storage of a pass once.
    tensors_offloaded, bytes_offloaded : int
        Storages copied to the host, and bytes copied.
    tensors_kept, bytes_kept : mapping of Reason to int
        Saved tensors that could not be offloaded, by reason.
    reloaded_ahead, reloaded_on_demand, bytes_reloaded : int
        Storages copied back as scheduled; those that backward needed earlier (compute waits for
        the whole copy); the bytes of both.
    resident_bytes, peak_resident_bytes : int
        Bytes of the storages above that are on the device now, and their largest number.
    host_bytes, host_bytes_used, host_bytes_high_water : int
        Page-locked memory held now; the part in use now; the largest part ever in use.
    """

    passes: int = 0
    tensors_saved: int = 0
    bytes_saved: int = 0
    tensors_offloaded: int = 0
    bytes_offloaded: int = 0
    tensors_kept: Mapping[Reason, int] = field(default_factory=dict)
    bytes_kept: Mapping[Reason, int] = field(default_factory=dict)
    reloaded_ahead: int = 0
    reloaded_on_demand: int = 0
    bytes_reloaded: int = 0
    resident_bytes: int = 0
    peak_resident_bytes: int = 0
    host_bytes: int = 0
    host_bytes_used: int = 0
    host_bytes_high_water: int = 0

    def __str__(self) -> str:
        reloaded = f"{self.reloaded_ahead} ahead, {self.reloaded_on_demand} on demand (stalls)"
        host = f"in use {mebibytes(self.host_bytes_used)}, at most {mebibytes(self.host_bytes_high_water)}"
        rows = [
            ("saved", self.bytes_saved, f"{self.tensors_saved} storages"),
            ("offloaded", self.bytes_offloaded, f"{self.tensors_offloaded} storages"),
            ("reloaded", self.bytes_reloaded, reloaded),
            ("resident", self.resident_bytes, f"peak {mebibytes(self.peak_resident_bytes)}"),
            ("host memory", self.host_bytes, host),
        ]
        for reason, count in self.tensors_kept.items():
            rows.append(("kept", self.bytes_kept[reason], f"{count} tensors: {reason.value}"))
        cells = [(name, mebibytes(nbytes), what) for name, nbytes, what in rows]
        return str(tabulate(cells, tablefmt="plain", colalign=("left", "right", "left"), disable_numparse=True))


class Counters:
    """The running sums behind `Statistics`, as plain attributes guarded by the lock of the engine."""

    def __init__(self) -> None:
        self.freed: deque[int] = deque()  # sizes of what was dropped, in bytes; without the lock, in any thread
        self.resident = 0  # bytes, of which those in `freed` are not yet subtracted
        self.reset()

    def reset(self) -> None:
        """Start every count and sum anew; what is resident now is the new peak."""
        self.passes = self.tensors_saved = self.tensors_offloaded = self.reloaded_ahead = self.reloaded_on_demand = 0
        self.bytes_saved = self.bytes_offloaded = self.bytes_reloaded = 0
        self._kept: dict[Reason, list[int]] = {}
        self._peak = self.resident_bytes

    def keep(self, reason: Reason, nbytes: int, count: int = 1) -> None:
        """Count tensors that are kept, by reason."""
        entry = self._kept.setdefault(reason, [0, 0])
        entry[0] += count
        entry[1] += nbytes

    def saved(self, nbytes: int, resources: Resources) -> None:
        """Count a storage that was saved, and is on the device."""
        self.tensors_saved += 1
        self.bytes_saved += nbytes
        if dropped or self.freed:
            self._settle()
        # No call in between: see [Note: finalizers].
        resources.nbytes = nbytes
        self.resident += nbytes
        if self.resident > self._peak:
            self._peak = self.resident

    def reloaded(self, count: int, nbytes: int, *, on_demand: bool) -> None:
        """Count storages that are reloaded."""
        self.bytes_reloaded += nbytes
        if on_demand:
            self.reloaded_on_demand += count
        else:
            self.reloaded_ahead += count

    def rise(self, nbytes: int, resources: Resources) -> None:
        """Add to the bytes on the device, as those of an object."""
        if dropped or self.freed:
            self._settle()
        # No call in between: see [Note: finalizers].
        resources.nbytes += nbytes
        self.resident += nbytes
        if self.resident > self._peak:
            self._peak = self.resident

    def _settle(self) -> None:
        """Subtract what was dropped."""
        settle()
        with suppress(IndexError):  # another thread was faster
            while self.freed:
                self.resident -= self.freed[0]
                del self.freed[0]

    @property
    def resident_bytes(self) -> int:
        """Bytes resident now."""
        self._settle()
        return self.resident

    def snapshot(self, **host: int) -> Statistics:
        """Return the sums as statistics; `host` is its fields that describe host memory."""
        names = {field.name for field in fields(Statistics)}
        sums: dict[str, Any] = {name: value for name, value in vars(self).items() if name in names}
        return Statistics(
            **sums,
            **host,
            tensors_kept={reason: entry[0] for reason, entry in self._kept.items()},
            bytes_kept={reason: entry[1] for reason, entry in self._kept.items()},
            resident_bytes=self.resident_bytes,
            peak_resident_bytes=self._peak,
        )
