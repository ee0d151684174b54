"""One storage that autograd saved in one pass: offloaded once, however many tensors and layers view it."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import torch

from .._torch.modules import opaque
from .._torch.subclasses import Wrappers, changed
from .._torch.tensors import drop_data, same_counter, storage_weakref, version_of
from ..device.base import Pairs, Stream, StreamPosition
from .host_pool import HostBuffer, Resources, raise_later
from .layout import Stretch, View, missing, union
from .statistics import Reason
from .transfer import CopyOut, PassDevice


class Residency(enum.Enum):
    """Where the bytes are."""

    DEVICE = "on the device"
    OFFLOADING = "on the device, copied or being copied to the host"
    HOST = "on the host only"
    RELOADED = "on the host and, again, on the device"


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedStorage:
    """A storage between its saving and the last backward that needs it, guarded by the lock of the engine.

    Only objects that autograd holds refer to it strongly, so all memory is returned with the last of them.  Nearly
    every storage is saved as one tensor that fills it: such a *plain* one is copied as a tensor, others as bytes.
    """

    pass_device: PassDevice
    stream: Stream  # on which it was saved; its memory is freed and allocated in the order of this one
    nbytes: int
    version: int  # of its first tensor when that was saved
    memory: InitVar[torch.UntypedStorage]  # the storage itself
    layers: dict[int, bool] = field(default_factory=dict)  # that saved it -> whether they have released it
    resources: Resources = field(init=False)
    residency: Residency = Residency.DEVICE
    refused: str = ""  # why the host had no memory for it
    pinned: bool = False  # saved in a layer that is kept, before an offloaded one: a copy would free nothing
    shared: bool = False  # saved in a layer that is kept, after an offloaded one, and counted as such
    wrappers: Wrappers = ()  # the wrappers in which it was saved
    plain: View | None = None  # the layout of a storage that one saved tensor fills
    new: Sequence[View] = ()  # saved, and not looked at yet
    copied: Sequence[Stretch] = ()  # what the host copy has, gaps between the elements of views included
    covered: Sequence[Stretch] = ()  # the part of it that views without gaps cover
    bytes_copied: int = 0  # in `copied`
    ready: StreamPosition | None = None  # copies out come after it; None for the moment at which they are queued
    copied_out: StreamPosition | None = None  # after its copies out; None as long as more may come
    _probes: Sequence[torch.Tensor] = ()  # in order of saving; without data once the storage is released
    _host: HostBuffer | None = None  # as large as the storage
    _buffer: torch.Tensor | None = None  # the device memory into which it is reloaded, as large too
    _clean: int = 0  # version of the buffer when it was reloaded
    _users: Sequence[Stream] = ()  # other streams that have waited for the reload

    def __post_init__(self, memory: torch.UntypedStorage) -> None:
        counters = self.pass_device.counters
        weak = storage_weakref(memory)  # [keep: address of the storage]
        self.resources = Resources.of(self, weak, counters.freed, self.pass_device.transfers.pool.returned)
        counters.tensors_saved += 1
        counters.bytes_saved += self.nbytes
        counters.rise(self.nbytes, self.resources)

    # Saving

    def add(self, tensor: torch.Tensor, view: View, probe: torch.Tensor) -> None:
        """Note one more saved tensor, its layout, and a detached alias that carries its version counter."""
        if self.residency is Residency.HOST:
            drop_data(probe)
            return
        if not self._probes:
            whole = tensor.nbytes == self.nbytes and not (view.conj or view.neg)
            if whole and (tensor.is_contiguous() or (view.dense and view.extent == (0, self.nbytes))):
                self.plain = view
        self._probes = (*self._probes, probe)
        self.new = (*self.new, view)

    def has_values_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the values that were saved first; operators may make new version counters."""
        version = version_of(tensor)
        if version != self.version:  # [guard: copy of an older version]
            return False
        first = self._probes[0]
        if version_of(first) != version:  # copy of an older version, with a counter of its own
            return False
        return version == 0 or same_counter(first, tensor)  # [guard: other version counter of a copy -> True]

    # Offloading

    def prepare_copy(self, captured: bool, *, ended: bool) -> CopyOut | None:
        """Return the copy of what is not copied yet, or None; views with gaps wait until the layer has `ended`."""
        first = self._probes[0]
        if first.untyped_storage().nbytes() < self.nbytes:  # [guard: memory that the program frees before its copy]
            self.pinned = True
            self.pass_device.counters.keep(Reason.FREED, self.nbytes)
            return None
        ready, self.ready = self.ready, None
        plain, new = self.plain, self.new
        if plain is None and not ended and not all(view.dense for view in new):
            return None
        self.new = ()
        if plain is None:
            stretches = missing(union(view.extent for view in new), self.covered)
            # [guard: gaps of earlier copies] a kernel may write there later
            self.covered = union((*self.covered, *(view.extent for view in new if view.dense)))
        else:
            stretches = [] if self.copied else [(0, self.nbytes)]
            self.covered = ((0, self.nbytes),)
        if not stretches:
            return None
        host = self._host
        if host is None:
            pool = self.pass_device.transfers.pool
            self._host = host = pool.take(self.nbytes, captured=captured, owner=self.resources)
            if host is None:
                self.refused = pool.refusal
                return None
        host.captured = host.captured or captured
        self.__class__ = StorageInFlight
        return CopyOut(self._pairs(first, stretches), host, self.stream, ready, stretches)

    def _pairs(self, tensor: torch.Tensor, stretches: Sequence[Stretch]) -> Pairs:
        """Return the parts of a transfer of some stretches of the memory of a tensor, which fills it if it is plain."""
        host, plain = self._host, self.plain
        assert host is not None
        typed = None if plain is None else host.typed((plain.dtype, plain.size, plain.stride))
        if typed is not None:
            return ((typed, tensor),)
        memory, pairs = tensor.untyped_storage(), list[tuple[torch.Tensor, torch.Tensor]]()
        for start, stop in stretches:
            place = 0
            for part in host.parts:
                a, b = max(start, place), min(stop, place + part.numel())
                if a < b:
                    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    pairs.append((part[a - place : b - place], data.set_(memory, a, (b - a,), (1,))))
                place += part.numel()
        return pairs

    def copy_queued(self, copy: CopyOut) -> None:
        """Note that a copy is queued."""
        counters, nbytes = self.pass_device.counters, copy.nbytes
        counters.tensors_offloaded += self.residency is Residency.DEVICE
        counters.bytes_offloaded += nbytes
        if self.copied:
            self.copied = union((*self.copied, *copy.stretches))
            self.bytes_copied = sum(stop - start for start, stop in self.copied)
        else:
            self.copied, self.bytes_copied = copy.stretches, nbytes
        self.residency = Residency.OFFLOADING
        # [guard: end of an earlier copy of the storage]
        self.copied_out = None  # what was behind the copies so far is not behind this one

    def copy_failed(self) -> None:
        """Note that a copy could not be queued: what is not on the host stays on the device."""
        self.refused = "A copy to the host failed."
        host = self._host
        if host is not None and not self.copied:
            self._host = None
            self.resources.buffer = 0
            self.pass_device.transfers.pool.give_back(host, host.fence)

    def release(self, layer: int, awaited: StreamPosition | None = None) -> None:
        """Free the device memory if all layers have released it; compute has waited for copies until `awaited`."""
        layers = self.layers
        layers[layer] = True
        if (
            self.residency is not Residency.OFFLOADING
            or self.refused
            or (len(layers) > 1 and not all(layers.values()))  # [guard: release while shared]
        ):
            end = self.copied_out
            waited = end is not None and awaited is not None and end.order <= awaited.order
            if waited and self.residency is Residency.OFFLOADING:
                self.__class__ = SavedStorage
            return
        device, nbytes, resources = self.pass_device, self.nbytes, self.resources
        if len(device.streams) > 1:
            # [wait: release for what the compute stream still reads]
            device.transfers.order_behind(self.stream, device.streams)
        for probe in self._probes:  # [guard: data of aliases]
            drop_data(probe)
        self.copied_out = None
        self.residency = Residency.HOST
        self.__class__ = SavedStorage
        # No call in between: see [Note: finalizers].
        resources.nbytes -= nbytes
        device.counters.resident -= nbytes

    # Reloading

    def holds(self, view: View) -> bool:
        """Whether the host copy has every element of a view."""
        return not missing([view.extent], self.covered)

    def allocate(self) -> None:
        """Allocate device memory for what is on the host only; the stream of the storage is the current one."""
        device, plain = self.pass_device, self.plain
        transfers = device.transfers
        empty = transfers.backend.empty_device
        if plain is not None:
            self._buffer = empty(plain.size, plain.stride, plain.dtype, transfers.device)
        else:
            self._buffer = empty((self.nbytes,), (1,), torch.uint8, transfers.device)
        self.residency = Residency.RELOADED
        self._users = ()
        self.__class__ = StorageInFlight
        device.counters.rise(self.nbytes, self.resources)

    def pairs_to_reload(self) -> Pairs:
        """Return what is copied into the memory of `allocate`."""
        assert self._buffer is not None
        return self._pairs(self._buffer, self.copied)

    def reload_queued(self, copied_in: StreamPosition) -> None:
        """Note that these copies are queued, and what comes after them."""
        device, buffer, resources = self.pass_device, self._buffer, self.resources
        assert buffer is not None
        self._clean = version_of(buffer)
        resources.fence = copied_in  # [guard: fence of returned host memory]
        layer = min(self.layers, default=0)
        resources.in_flight = buffer, device.transfers.join, self.stream, device.streams, copied_in, layer

    def fetch(self, view: View, probe: torch.Tensor, layer: int, captured: bool) -> torch.Tensor:
        """Return a saved tensor on the device, for the current stream of the calling thread; `reload` came first."""
        if self.residency is not Residency.RELOADED:
            return probe.detach()  # not the alias itself, which loses its data at the release
        transfers, copied_in = self.pass_device.transfers, self.resources.fence
        assert copied_in is not None
        current = transfers.backend.current_stream(transfers.device)
        if current != self.stream:
            # [wait: another stream's use for the copy in]
            transfers.use(current, copied_in, layer, captured, self.nbytes)
            # [guard: users on other streams]
            # [guard: streams that waited]
            self._users = (*self._users, current)
            self.__class__ = StorageInFlight
        elif self.resources.in_flight is not None:
            # [wait: use on the compute stream for the copy in]
            transfers.use(current, copied_in, layer, captured, self.nbytes)
            self.resources.in_flight = None
            if not self._users:
                self.__class__ = SavedStorage
        buffer = self._buffer
        assert buffer is not None
        if version_of(buffer) != self._clean:
            raise changed(buffer, view.size, self._clean)
        return buffer if view == self.plain else view.on(buffer)

    def evict(self) -> None:
        """Free the reloaded memory; the host copy stays for the next backward through a retained graph."""
        if self.residency is Residency.RELOADED:
            self._free_buffers()
            self.pass_device.counters.rise(-self.resources.nbytes, self.resources)
            self.residency = Residency.HOST

    def _free_buffers(self) -> None:
        transfers = self.pass_device.transfers
        if self.resources.in_flight is not None:
            _, join, *arguments = self.resources.in_flight
            # [wait: dropping for a copy in without a use]
            join(*arguments)
        for user in self._users:
            position = transfers.position(user)
            # [wait: dropping for use on another stream]
            transfers.wait(self.stream, position, position.captured)
        self._buffer, self._users = None, ()
        self.resources.in_flight = None
        self.__class__ = SavedStorage


class StorageInFlight(SavedStorage):
    """A storage that a transfer or another stream uses: only such a one has a finalizer, see [Note: finalizers]."""

    __slots__ = ()

    def __del__(self) -> None:
        try:
            self._end_transfers()
        except BaseException as error:  # a signal handler may raise anything
            raise_later(error)
            self._end_transfers()

    def _end_transfers(self) -> None:
        """Let the compute stream wait before the device memory is freed."""
        if sys.is_finalizing():  # the process frees everything
            return
        device, transfers = self.pass_device, self.pass_device.transfers
        if self.residency is Residency.RELOADED:
            self._free_buffers()
        else:
            # [guard: end of a dropped copy]
            end = self.copied_out if self.copied_out is not None else transfers.position(transfers.out)
            # [wait: dropping for a copy out]
            transfers.join(self.stream, device.streams, end, min(self.layers, default=0))


opaque(StorageInFlight.__del__)
