"""What the passes of one context share."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from itertools import count

import torch

from .._torch import warn
from ..device.base import Backend
from ..schedule.plan import Plan, Roles
from . import ownership
from .layout import Layout
from .ownership import Limit
from .recorder import TimelineRecorder
from .statistics import Counters, Statistics
from .transfer import Transfers

__all__ = ["Engine", "HostMemoryWarning"]


_numbers = count()


class HostMemoryWarning(UserWarning):
    """There was no host memory for a saved tensor, which therefore stayed on the device."""


class Engine:
    """What the passes of one context share: the plan, the device, the transfers and the counters.

    Parameters
    ----------
    plan : Plan
        What to do at which event.
    backend : Backend
        The kind of device.
    max_host_bytes : int or None
        Limit of the host memory held for each device.
    stream : Stream or None
        The program's own stream for all transfers.
    min_bytes : int or None
        Smaller tensors stay; None for Transformer Engine's limit in elements.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        max_host_bytes: int | None = None,
        stream: object = None,
        min_bytes: int | None = None,
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.counters = Counters()
        self.lock = threading.RLock()
        self.recorder: TimelineRecorder | None = None
        self._max_host_bytes = max_host_bytes
        self._stream = stream
        self._min_bytes = min_bytes
        self._transfers: dict[torch.device, Transfers] = {}
        self._warned = False
        self.roles = Roles.of(plan)
        self.number = next(_numbers)
        self.layouts: dict[Hashable, dict[int, Layout]] = {}  # of what each layer saved, by place in the order

    def limit(self) -> Limit:
        """Return below which size tensors stay."""
        return Limit(ownership.MIN_ELEMENTS, 0) if self._min_bytes is None else Limit(0, self._min_bytes)

    def fresh(self) -> Engine:
        """Return an engine with the same settings that has done nothing yet."""
        return Engine(self.plan, self.backend, self._max_host_bytes, self._stream, self._min_bytes)

    @property
    def portable(self) -> tuple[Plan, int | None]:
        """The settings that mean the same in another process.

        Raises
        ------
        TypeError
            If the program passed its own stream, which means nothing there.
        """
        if self._stream is not None:
            raise TypeError(
                "An offloading context with an offload_stream cannot be pickled: a stream belongs to its process. "
                "Make the context anew where it is loaded."
            )
        return self.plan, self._max_host_bytes

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """`max_host_bytes` and `min_bytes`."""
        return self._max_host_bytes, self._min_bytes

    def transfers(self, device: torch.device) -> Transfers:
        """Return the streams and the host pool that serve a device."""
        found = self._transfers.get(device)
        if found is None:
            found = Transfers(self.backend, device, self._max_host_bytes, self._stream)
            found.recorder = self.recorder
            self._transfers[device] = found
        return found

    @property
    def all_transfers(self) -> list[Transfers]:
        """The transfers of every device seen so far."""
        return list(self._transfers.values())

    def record(self, recorder: TimelineRecorder | None) -> None:
        """Install a recorder, or remove it."""
        self.recorder = recorder
        for transfers in self.all_transfers:
            transfers.recorder = recorder

    def statistics(self) -> Statistics:
        """Return a snapshot of the counters, with the host memory of all devices."""
        with self.lock:
            pools = [transfers.pool for transfers in self.all_transfers]
            for pool in pools:
                pool.settle()
            return self.counters.snapshot(
                host_bytes=sum(pool.bytes_held for pool in pools),
                host_bytes_used=sum(pool.bytes_taken for pool in pools),
                host_bytes_high_water=sum(pool.high_water for pool in pools),
            )

    def trim(self) -> int:
        """Free the host memory that no saved tensor uses; return the bytes freed."""
        with self.lock:
            return sum(transfers.pool.trim() for transfers in self.all_transfers)

    def close(self) -> None:
        """Free the host memory; buffers of passes in flight are freed with them."""
        with self.lock:
            for transfers in self.all_transfers:
                transfers.pool.close()

    def warn_once(self, refusal: str) -> None:
        """Warn, the first time, that a tensor is kept because there is no host memory for it."""
        if not self._warned:
            self._warned = True
            warn(
                f"A saved tensor stays on the device: {refusal}. Gradients are the same, the memory is not saved. This "
                "is reported once; the statistics count every tensor.",
                HostMemoryWarning,
            )
