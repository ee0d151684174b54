"""What the passes of one context share."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from .._warnings import warn
from ..device.base import Backend
from ..schedule.plan import Plan
from . import eligibility
from .eligibility import Limit
from .host_pool import HostPool
from .statistics import Counters, Statistics, TimelineRecorder
from .transfer import Transfers


class HostMemoryWarning(UserWarning):
    """There was no host memory for a saved tensor, which therefore stayed on the device."""


@dataclass(eq=False, repr=False)
class Engine:
    """What the passes of one context share: the plan, the device, the transfers and the counters."""

    plan: Plan
    backend: Backend
    max_host_bytes: int | None = None  # limit of the host memory held for each device
    stream: object = None  # the program's own, for all transfers
    min_bytes: int | None = None  # smaller tensors stay; None for Transformer Engine's limit in elements
    counters: Counters = field(init=False, default_factory=Counters)
    lock: Any = field(init=False, default_factory=threading.RLock)
    recorder: TimelineRecorder | None = field(init=False, default=None)
    doubling: bool = field(init=False, default=False)  # host memory grows by what is held, until `fit` is called
    # Passes, by weak references: whose backward runs, by autograd's number of it; and the latest one of any thread.
    in_backward: dict[int, weakref.ref[Any]] = field(init=False, default_factory=dict)
    latest: weakref.ref[Any] | None = field(init=False, default=None)
    _transfers: dict[torch.device, Transfers] = field(init=False, default_factory=dict)
    _warned: bool = field(init=False, default=False)

    def limit(self) -> Limit:
        """Return below which size tensors stay."""
        return Limit(eligibility.MIN_ELEMENTS, 0) if self.min_bytes is None else Limit(0, self.min_bytes)

    def transfers(self, device: torch.device) -> Transfers:
        """Return the streams and the host pool that serve a device."""
        found = self._transfers.get(device)
        if found is None:
            found = self._transfers[device] = Transfers(self.backend, device, self.max_host_bytes, self.stream)
            found.recorder = self.recorder
            found.pool.doubling = self.doubling
        return found

    def record(self, recorder: TimelineRecorder | None) -> None:
        """Install a recorder, or remove it."""
        self.recorder = recorder
        for transfers in list(self._transfers.values()):
            transfers.recorder = recorder

    @property
    def _pools(self) -> list[HostPool]:
        return [transfers.pool for transfers in self._transfers.values()]

    def statistics(self) -> Statistics:
        """Return a snapshot of the counters, with the host memory of all devices."""
        with self.lock:
            pools = self._pools
            for pool in pools:
                pool.settle()
            return self.counters.snapshot(
                host_bytes=sum(pool.bytes_held for pool in pools),
                host_bytes_used=sum(pool.bytes_taken for pool in pools),
                host_bytes_high_water=sum(pool.high_water for pool in pools),
            )

    def host_room(self) -> int | None:
        """Return the bytes of host memory that saved tensors may use, with those that are held; None if not known."""
        with self.lock:
            pools = self._pools
            held, more = sum(pool.bytes_held for pool in pools), self.backend.host_room()
            if any(pool.exhausted for pool in pools):
                more = 0
            if self.max_host_bytes is not None:
                own = max(len(pools), 1) * self.max_host_bytes - held
                more = own if more is None else min(more, own)
        return None if more is None else held + max(more, 0)

    def reset_statistics(self) -> None:
        """Reset all counts and sums to zero, and the peaks to what is held now."""
        with self.lock:
            self.counters.reset()

    def fit(self, nbytes: int = 0) -> int:
        """Free unused host memory above `nbytes` a device, and return how much; a single one takes what is missing."""
        with self.lock:
            self.doubling = False
            return sum(pool.fit(nbytes, grow=len(self._transfers) == 1) for pool in self._pools)

    def close(self) -> None:
        """Free the host memory; buffers of passes in flight are freed with them."""
        with self.lock:
            for pool in self._pools:
                pool.close()

    def warn_once(self, refusal: str) -> None:
        """Warn, the first time, that a tensor is kept because there is no host memory for it."""
        if not self._warned:
            self._warned = True
            warn(
                f"A saved tensor stays on the device: {refusal}. Gradients are the same, the memory is not saved. This "
                "is reported once; the statistics count every tensor.",
                HostMemoryWarning,
            )
