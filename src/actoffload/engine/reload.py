"""The host copy of a storage, and the device memory into which it is reloaded."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .._torch.tensors import version_of
from ..device.base import Stream, StreamPosition
from .host_pool import HostBuffer, Resources
from .layout import Layout, Piece, View, gaps, reload_spans
from .transfer import PassDevice, Transfers
from .versions import changed

__all__ = ["HostCopy", "Residency", "reload"]


class Residency(enum.Enum):
    """Where the bytes are."""

    DEVICE = "on the device"
    OFFLOADING = "on the device, copied or being copied to the host"
    HOST = "on the host only"
    RELOADED = "on the host and, again, on the device"


@dataclass(slots=True, eq=False)
class HostCopy:
    """The host copy of a saved storage, and the device memory into which it is reloaded.

    The lock of the engine guards all methods.
    """

    pass_device: PassDevice
    stream: Stream  # on which it was saved; its memory is freed and allocated in the order of this one
    nbytes: int
    layers: dict[int, bool] = field(default_factory=dict)  # that saved it -> whether they have released it
    resources: Resources = field(init=False)
    residency: Residency = Residency.DEVICE
    plain: View | None = None  # the layout of a storage that one saved tensor fills
    layout: Layout = field(init=False)
    bytes_copied: int = 0
    _typed: torch.Tensor | None = None  # the copy of a plain storage, if it is in one part
    _host: HostBuffer | None = None  # and the memory of that
    _pieces: Sequence[Piece] = ()  # all other copies
    _buffers: Sequence[tuple[int, int, torch.Tensor]] = ()  # first byte, end, memory
    _clean: Sequence[int] = ()  # the versions of the buffers when they were reloaded
    _copied_in: StreamPosition | None = None
    _awaited: bool = True  # the compute stream has waited for `_copied_in`
    _users: Sequence[Stream] = ()  # other streams that have

    at_rest: ClassVar[type[HostCopy]]
    in_flight: ClassVar[type[HostCopy]]  # has a finalizer: see [Note: finalizers]

    def holds(self, view: View) -> bool:
        """Whether the host copy has every element of a view."""
        if self._typed is not None:
            return True
        pieces = self._pieces
        if any(piece.holds(view) for piece in pieces):
            return True
        return len(pieces) > 1 and not gaps(*view.extent, pieces, self.nbytes)

    def allocate(self) -> None:
        """Allocate device memory for what is on the host only; the stream of the storage is the current one."""
        device, plain = self.pass_device, self.plain
        transfers = device.transfers
        empty = transfers.backend.empty_device
        if plain is not None and self._typed is not None:
            nbytes = self.nbytes
            self._buffers = ((0, nbytes, empty(plain.size, plain.stride, plain.dtype, transfers.device)),)
        else:
            spans = reload_spans(self._pieces)
            self._buffers = [(a, b, empty((b - a,), (1,), torch.uint8, transfers.device)) for a, b in spans]
            nbytes = sum(stop - start for start, stop in spans)
        self.residency = Residency.RELOADED
        self._awaited = False
        self._users = ()
        self.__class__ = self.in_flight
        device.counters.rise(nbytes, self.resources)

    def queue_reload(self, layer: int, captured: bool) -> None:
        """Queue the copies into the memory of `allocate`."""
        device, typed, buffers, resources = self.pass_device, self._typed, self._buffers, self.resources
        transfers = device.transfers
        if typed is not None:
            buffer = buffers[0][2]
            copied_in = self._copied_in = transfers.to_device(((typed, buffer),), layer, captured)
            self._clean = (version_of(buffer),)
        else:
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for piece in self._pieces:
                start, buffer = self._buffer_of(piece.start, piece.stop)
                pairs += piece.pairs(buffer.untyped_storage(), start, device.device)
            copied_in = self._copied_in = transfers.to_device(pairs, layer, captured)
            self._clean = [version_of(buffer) for _, _, buffer in buffers]
        resources.fence = (copied_in,)  # [guard: fence of returned host memory]
        resources.in_flight = buffers, transfers.join, self.stream, device.streams, copied_in

    def _buffer_of(self, start: int, stop: int) -> tuple[int, torch.Tensor]:
        return next((a, buffer) for a, b, buffer in self._buffers if a <= start and stop <= b)

    def fetch(self, view: View, probe: torch.Tensor, layer: int, captured: bool) -> torch.Tensor:
        """Return a saved tensor on the device, for the current stream of the calling thread; `reload` came first."""
        if self.residency is not Residency.RELOADED:
            return probe.detach()  # not the alias itself, which loses its data at the release
        transfers, copied_in = self.pass_device.transfers, self._copied_in
        assert copied_in is not None
        current = transfers.backend.current_stream(transfers.device)
        if current != self.stream:
            # [wait: another stream's use for the copy in]
            transfers.use(current, copied_in, layer, captured, self.nbytes)
            # [guard: users on other streams]
            # [guard: streams that waited]
            self._users = (*self._users, current)
            self.__class__ = self.in_flight
        elif not self._awaited:
            # [wait: use on the compute stream for the copy in]
            transfers.use(current, copied_in, layer, captured, self.nbytes)
            self._awaited = True
            self.resources.in_flight = None
            if not self._users:
                self.__class__ = self.at_rest
        for (_, _, buffer), version in zip(self._buffers, self._clean):  # noqa: B905 (as long as each other)
            if version_of(buffer) != version:
                raise changed(buffer, view.size, version)
        if view is self.plain and self._typed is not None:
            return buffer
        start, buffer = self._buffer_of(*view.extent)
        return view.on(buffer, start)

    def evict(self) -> None:
        """Free the reloaded memory; the host copy stays for the next backward through a retained graph."""
        if self.residency is Residency.RELOADED:
            self._free_buffers()
            self.pass_device.counters.rise(-self.resources.nbytes, self.resources)
            self.residency = Residency.HOST

    def _free_buffers(self) -> None:
        transfers = self.pass_device.transfers
        if not self._awaited and self._copied_in is not None:
            # [wait: dropping for a copy in without a use]
            transfers.join(self.stream, self.pass_device.streams, self._copied_in, min(self.layers, default=0))
            self._awaited = True
        for user in self._users:
            # [wait: dropping for use on another stream]
            transfers.join(self.stream, (), transfers.position(user))
        self._buffers = self._users = ()
        self.resources.in_flight = None
        self.__class__ = self.at_rest


def reload(storages: Sequence[HostCopy], layer: int, *, on_demand: bool = False) -> None:
    """Reload storages in the given order; those that are on the device are passed over.

    All device memory is allocated before the first copy starts, so one position of the compute stream serves all.  If
    the memory runs out, those that have theirs are reloaded all the same, and the error is the allocator's own.
    """
    waiting = [storage for storage in storages if storage.residency is Residency.HOST]
    while waiting:
        device, stream = waiting[0].pass_device, waiting[0].stream
        group = [s for s in waiting if s.pass_device is device and s.stream == stream]
        # Nearly always all are of one device and stream.
        waiting = [] if len(group) == len(waiting) else [s for s in waiting if s not in group]
        _reload_group(device.transfers, stream, group, layer, on_demand)


def _reload_group(transfers: Transfers, stream: Stream, group: list[HostCopy], layer: int, on_demand: bool) -> None:
    backend = transfers.backend
    taken = 0
    try:
        if backend.current_stream(transfers.device) == stream:  # [guard: stream of the allocation -> True]
            for storage in group:
                storage.allocate()
                taken += 1
        else:
            with backend.on(stream):
                for storage in group:
                    storage.allocate()
                    taken += 1
    finally:
        if taken:
            captured = backend.capturing()
            # [wait: copies in for their memory]
            transfers.begin_reload(stream)
            done = 0
            try:
                for storage in group[:taken]:
                    storage.queue_reload(layer, captured)
                    done += 1
            finally:
                counters = group[0].pass_device.counters
                counters.reloaded(done, sum(storage.bytes_copied for storage in group[:done]), on_demand=on_demand)
                for storage in group[done:taken]:  # their copies could not be queued, so this memory has no content
                    storage.evict()
