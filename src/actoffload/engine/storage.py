"""One storage that autograd saved in one pass: moved once, however many tensors and layers view it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .._torch import base_of, free_storage_weakref, opaque, storage_weakref, version_of
from ..device.base import Pairs, Stream, StreamPosition
from ..engine.versions import drop_data
from .hostpool import HostBuffer
from .layout import Piece, View, dense, gaps, loose_pieces, reload_spans
from .residency import Residency
from .transfer import Home
from .versions import Wrappers, changed

if TYPE_CHECKING:
    from .pack import Moved

__all__ = ["SavedStorage"]


class SavedStorage:
    """A storage between its saving and the last backward that needs it.

    Only the objects that autograd holds refer to it strongly; when the last of them is dropped, everything is
    given back, whatever the state.  So there is no pass to end and nothing to reset.  The pass that owns it
    guards all methods but the finalizer with one lock.

    Nearly every storage of a model is saved as one tensor that fills it.  Such a *plain* storage is copied from and to
    tensors of its own type and layout; everything else goes through byte views.

    Parameters
    ----------
    version : int
        At which version its first tensor was saved.
    memory : torch.UntypedStorage
        The storage.
    home : Home
        Streams and counters of its pass.
    stream : Stream
        The stream on which it was saved; its memory is freed, and taken again, in the order of this one.
    """

    # Defaults of the class, so that making one sets only what differs: a training step makes many.
    where = Residency.DEVICE
    refused = ""  # why the host did not take it
    pinned = False  # saved in a layer that stays, before one that leaves: a copy would free nothing
    shared = False  # saved in a layer that stays, after one that leaves, and counted as such
    ready: StreamPosition | None = None  # after what copies out must come; None for the moment at which they are queued
    left: StreamPosition | None = None  # after its copies out; None as long as more may come
    within: Wrappers = ()  # the wrappers in which it was saved; see [Note: outer tensors]
    bytes_copied = 0
    plain: View | None = None  # the layout of a plain storage
    first: weakref.ref[Moved] | None = None  # what autograd holds for the tensor that made it plain
    root: weakref.ref[torch.Tensor]  # that tensor, or the one of which it is a view
    _typed: torch.Tensor | None = None  # its host copy, if that is in one part
    _host: HostBuffer | None = None  # and where that lies
    loose: Sequence[View] = ()  # saved, and waiting for the end of the layer
    _pieces: Sequence[Piece] = ()
    _buffers: Sequence[tuple[int, int, torch.Tensor]] = ()
    _clean: Sequence[int] = ()  # the versions at which the buffers came back
    _arrived: StreamPosition | None = None
    _awaited = True
    _users: Sequence[Stream] = ()

    def __init__(self, version: int, memory: torch.UntypedStorage, home: Home, stream: Stream) -> None:
        self.home = home
        self.stream = stream
        self.version = version
        self.nbytes = self._resident = nbytes = memory.nbytes()
        self.layers: dict[int, bool] = {}  # who saved it -> has let go of the device memory
        self._source: torch.UntypedStorage | None = memory  # [keep: source until copied]
        self.weak = storage_weakref(memory)  # [keep: address of the storage]
        self.new: list[View] = []  # saved, and not looked at yet
        self._probes: list[torch.Tensor] = []
        counters = home.counters
        counters.tensors_saved += 1
        counters.bytes_saved += nbytes
        counters.rise(nbytes)

    # Saving

    def add(self, tensor: torch.Tensor, view: View, probe: torch.Tensor) -> None:
        """Take in one more saved tensor, its layout, and a detached alias that carries its version counter."""
        if self.where is Residency.HOST:
            drop_data(probe)
            return
        whole = tensor.nbytes == self.nbytes and not (view.conj or view.neg)
        if whole and not self._probes and (tensor.is_contiguous() or view.fills(self.nbytes)):
            self.plain = view
            base = base_of(tensor)
            self.root = weakref.ref(tensor if base is None else base)
        self._probes.append(probe)
        self.new.append(view)

    def add_whole(self) -> None:
        """Move the whole storage, whatever the saved views cover."""
        self.new.append(View(torch.uint8, torch.Size((self.nbytes,)), (1,), 0, False, False))

    def holds(self, view: View) -> bool:
        """Whether the host copy has every element of a view."""
        if self._typed is not None:
            return True
        pieces = self._pieces
        if any(piece.holds(view) for piece in pieces):
            return True
        return len(pieces) > 1 and not gaps(*view.extent, pieces, self.nbytes)

    # Leaving

    def leave(self, layer: int, captured: bool, *, ended: bool) -> bool:
        """Queue copies of what was saved and is not copied yet; False if the host has no memory for it.

        Parameters
        ----------
        layer : int
            For whom, in the timeline.
        captured : bool
            A graph is being captured.
        ended : bool
            The layer has ended: nothing more will be saved that could complete a stretch.
        """
        if self._source is None or self.refused or self.pinned:
            return not self.refused
        new = self.new
        if new and new[0] is self.plain and not self.bytes_copied:
            if not self._copy_plain(layer, captured):
                return False
            if len(new) == 1:  # as nearly always
                new.clear()
        for view in new:
            if view is self.plain or self.holds(view):
                continue
            piece = dense(view, self.nbytes)
            if piece is None:
                self.loose = (*self.loose, view)
            elif not self._copy_missing(piece, layer, captured):
                return False
        new.clear()
        if ended and self.loose:
            loose = [view for view in self.loose if not self.holds(view)]
            self.loose = ()
            for piece in loose_pieces(loose, self.nbytes) if loose else ():
                if not self._copy_missing(piece, layer, captured):
                    return False
        return True

    def _copy_missing(self, piece: Piece, layer: int, captured: bool) -> bool:
        """Copy what of a piece is not copied yet: parts of a storage may have left before the whole of it."""
        if not self._pieces or piece.elements is not None:
            return self._copy(piece, layer, captured)
        return all(self._copy(gap, layer, captured) for gap in gaps(*piece.exact, self._pieces, self.nbytes))

    def _copy_plain(self, layer: int, captured: bool) -> bool:
        plain, pool = self.plain, self.home.transfers.pool
        assert plain is not None
        host = pool.take(self.nbytes, captured=captured)
        if host is None:
            return self._refuse(pool.refusal)
        typed = host.typed(plain.dtype, plain.size, plain.stride)
        if typed is None:
            self._queue_piece(Piece(0, self.nbytes, None, host), host, layer, captured)
        else:
            self._queue(((typed, self._probes[0]),), host, layer, captured)
            self._typed, self._host = typed, host
        return True

    def _copy(self, piece: Piece, layer: int, captured: bool) -> bool:
        pool = self.home.transfers.pool
        host = piece.host = pool.take(piece.nbytes, captured=captured, whole=piece.elements is not None)
        if host is None:
            return self._refuse(pool.refusal)
        self._queue_piece(piece, host, layer, captured)
        return True

    def _queue_piece(self, piece: Piece, host: HostBuffer, layer: int, captured: bool) -> None:
        assert self._source is not None
        self._queue(piece.pairs(self._source, 0, self.home.device), host, layer, captured)
        self._pieces = (*self._pieces, piece)

    def _refuse(self, refusal: str) -> bool:
        self.refused = refusal
        self.new.clear()
        self.loose = ()
        return False

    def _queue(self, pairs: Pairs, host: HostBuffer, layer: int, captured: bool) -> None:
        """Queue a copy out."""
        home, nbytes = self.home, host.nbytes
        try:
            home.transfers.to_host(pairs, host, self.stream, self.ready, layer, captured)
        except BaseException:
            home.transfers.pool.give_back(host, host.fence)
            raise
        counters = home.counters
        counters.tensors_offloaded += self.where is Residency.DEVICE
        counters.bytes_offloaded += nbytes
        self.bytes_copied += nbytes
        self.where = Residency.OFFLOADING
        # [guard: end of an earlier copy of the storage]
        self.left = None  # what was behind the copies so far is not behind this one

    def release(self, layer: int) -> int:
        """Let a layer give up the device memory; it is freed when all layers that saved the storage have.

        Home has waited for the copies of each of these layers before.  Return how many bytes were given up now.
        """
        self.layers[layer] = True
        if (
            self.where is not Residency.OFFLOADING
            or self.refused
            or (len(self.layers) > 1 and not all(self.layers.values()))  # [guard: release while shared]
        ):
            return 0
        streams = self.home.streams
        if len(streams) > 1:
            # [wait: release for what home still reads]
            self.home.transfers.order_behind(self.stream, streams)
        for probe in self._probes:  # [guard: data of aliases]
            drop_data(probe)
        self._probes.clear()
        self._source = None
        self.left = None
        self._resident = 0
        self.where = Residency.HOST
        self.home.counters.rise(-self.nbytes)
        return self.nbytes

    # Coming back

    def allocate(self) -> None:
        """Take device memory for what is on the host only; the current stream is the home stream."""
        home, plain = self.home, self.plain
        backend, place = home.transfers.backend, home.transfers.device
        if plain is not None and self._typed is not None:
            nbytes = self.nbytes
            self._buffers = ((0, nbytes, backend.empty_device(plain.size, plain.stride, plain.dtype, place)),)
        else:
            spans = reload_spans(self._pieces)
            self._buffers = [(a, b, backend.empty_device((b - a,), (1,), torch.uint8, place)) for a, b in spans]
            nbytes = sum(stop - start for start, stop in spans)
        self._resident = nbytes
        self.where = Residency.RELOADED
        self._awaited = False
        self._users = ()
        home.counters.rise(nbytes)

    def queue_reload(self, layer: int, captured: bool, *, on_demand: bool) -> None:
        """Queue the copies into the memory taken by `allocate`."""
        home, typed = self.home, self._typed
        if typed is not None:
            buffer = self._buffers[0][2]
            self._arrived = home.transfers.to_device(((typed, buffer),), layer, captured)
            self._clean = (version_of(buffer),)
        else:
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for piece in self._pieces:
                start, buffer = self._buffer_of(piece.start, piece.stop)
                pairs += piece.pairs(buffer.untyped_storage(), start, home.device)
            self._arrived = home.transfers.to_device(pairs, layer, captured)
            self._clean = [version_of(buffer) for _, _, buffer in self._buffers]
        counters = home.counters
        counters.bytes_reloaded += self.bytes_copied
        if on_demand:
            counters.reloaded_on_demand += 1
        else:
            counters.reloaded_ahead += 1

    def _buffer_of(self, start: int, stop: int) -> tuple[int, torch.Tensor]:
        return next((a, buffer) for a, b, buffer in self._buffers if a <= start and stop <= b)

    def fetch(self, view: View, probe: torch.Tensor, layer: int, captured: bool) -> torch.Tensor:
        """Return a saved tensor on the device, for the calling thread's current stream; `reload` came first."""
        if self.where is Residency.DEVICE or self.where is Residency.OFFLOADING:
            return probe.detach()  # not the probe, which is hollowed out: somebody may hold on to what he got
        transfers, arrived = self.home.transfers, self._arrived
        assert arrived is not None
        current = transfers.backend.current_stream(transfers.device)
        if current != self.stream:
            # [wait: another stream's use for the copy in]
            transfers.use(current, arrived, layer, captured)
            # [guard: users on other streams]
            # [guard: streams that waited]
            self._users = (*self._users, current)
        elif not self._awaited:
            # [wait: home's use for the copy in]
            transfers.use(current, arrived, layer, captured)
            self._awaited = True
        for (_, _, buffer), version in zip(self._buffers, self._clean):  # noqa: B905 (as long as each other)
            if version_of(buffer) != version:
                raise changed(buffer, view.size, version)
        if view is self.plain and self._typed is not None:
            return buffer
        start, buffer = self._buffer_of(*view.extent)
        return view.on(buffer, start)

    def evict(self) -> None:
        """Free the device memory again; the host copy stays for the next backward through a retained graph."""
        if self.where is Residency.RELOADED:
            self._free_buffers()
            self.home.counters.rise(-self._resident)
            self._resident = 0
            self.where = Residency.HOST

    def _free_buffers(self) -> None:
        transfers = self.home.transfers
        if not self._awaited and self._arrived is not None:
            # [wait: dropping for a copy in that nobody used]
            transfers.join(self.stream, self.home.streams, self._arrived, min(self.layers, default=0))
            self._awaited = True
        for user in self._users:
            # [wait: dropping for use on another stream]
            transfers.join(self.stream, (), transfers.mark(user))
        self._buffers = ()

    # The end

    def __del__(self) -> None:
        try:
            home = self.home
            if self.where is Residency.OFFLOADING:
                # [guard: end of a dropped copy]
                left = self.left if self.left is not None else home.transfers.end_of_copies_out()
                # [wait: dropping for a copy out]
                home.transfers.join(self.stream, home.streams, left, min(self.layers, default=0))
            elif self.where is Residency.RELOADED and (self._users or not self._awaited):
                self._free_buffers()
            fence = () if self._arrived is None else (self._arrived,)  # [guard: fence of returned host memory -> True]
            if self._host is not None:
                home.transfers.pool.give_back(self._host, fence)
            for piece in self._pieces:
                if piece.host is not None:
                    home.transfers.pool.give_back(piece.host, fence)
            home.counters.freed(self._resident)
            free_storage_weakref(self.weak)
        except Exception:
            # Half-built objects and an interpreter on its way out: there is nobody to tell and nothing to save.
            if not sys.is_finalizing() and hasattr(self, "_resident"):
                raise


opaque(SavedStorage.__del__)
