"""Copies between the device and the host pool, and every wait that they need.

`[Note: stream order]`  Three kinds of streams take part.  The *compute* stream of a storage is the one that was current
when its tensor was saved.  The *out* stream carries copies to the host, the *in* stream copies to the device; a
program's own `offload_stream` is both.  Device memory is allocated and freed in the order of the compute stream.  So
memory is free as soon as the compute stream has waited for everything that reads or writes it.

========================  ===========================  ======================================================
stream                    waits for                    because
========================  ===========================  ======================================================
out, before a copy        the tensor's ready position  compute may still write what is copied
out, before a copy        the host buffer's fence      an earlier copy may still use that host memory
compute, before release   the end of the copy out      the next tensor in this memory would be what is copied
in, before a copy         compute, at the allocation   compute may still use the memory that the copy writes
any stream, before use    the end of the copy in       the bytes are not there earlier
compute, before dropping  the end of copies            a copy in flight would use memory of another tensor
compute, before dropping  other streams' use           another stream may still read what it unpacked
========================  ===========================  ======================================================

A copy in need not wait for the copy out: compute has waited for that at the release.  Other streams of a program may
own the memory of a saved tensor.  The pass has seen them, and they wait for whatever compute waits for.

`[Note: capture]`  While a graph is captured, a stream may wait only for events of the same capture, and events of a
capture mean nothing outside of it.  When the forward of a model ends, compute has waited for every copy out, and each
copy in is waited for by its use.  So no wait crosses the border between the captures of forward and backward.  Waits
for work from before the capture, which `torch.cuda.graph` has synchronized, are left out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch

from ..device.base import Backend, Pairs, Stream, StreamPosition
from ..schedule.timeline import Kind
from .host_pool import HostBuffer, HostPool
from .layout import Stretch
from .statistics import Counters, TimelineRecorder


class CopyOut(NamedTuple):
    """A copy to the host that is to be queued."""

    pairs: Pairs
    host: HostBuffer
    compute: Stream
    ready: StreamPosition | None  # what the copy waits for; None for the present end of the compute stream
    stretches: Sequence[Stretch]

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return sum(stop - start for start, stop in self.stretches)


class Link:
    """The transfer streams of one device, which all contexts and handles of the device share."""

    def __init__(self, backend: Backend, device: torch.device, stream: Stream | None) -> None:
        self.backend = backend  # `_links` has its id
        self.out: Stream = backend.new_stream(device) if stream is None else backend.adopt(stream)
        self.back: Stream = backend.new_stream(device) if stream is None else self.out
        self.orders = count(1)  # finalizers take numbers too, in any thread
        self.waited = 0  # order of the last position of `back` that `out` has waited for

    @staticmethod
    def of(backend: Backend, device: torch.device, stream: Stream | None) -> Link:
        """Return the link of a device, or a new one for a stream of the program."""
        if stream is not None:
            return Link(backend, device, stream)
        with _links_lock:
            key = id(backend), device
            return _links.get(key) or _links.setdefault(key, Link(backend, device, None))


_links: weakref.WeakValueDictionary[tuple[int, torch.device], Link] = weakref.WeakValueDictionary()
_links_lock = threading.Lock()


class Transfers:
    """The transfers of one context or handle on one device."""

    def __init__(
        self, backend: Backend, device: torch.device, max_host_bytes: int | None, stream: Stream | None
    ) -> None:
        self.backend = backend
        self.device = device
        self.link = link = Link.of(backend, device, stream)
        self.pool = HostPool(backend, max_host_bytes, device)
        self.out: Stream = link.out
        self.back: Stream = link.back
        self.recorder: TimelineRecorder | None = None

    def position(self, stream: Stream, captured: bool | None = None) -> StreamPosition:
        """Return a position at the present end of a stream; `captured` saves asking, where the caller knows."""
        if captured is None:
            captured = self.backend.capturing()
        return StreamPosition(self.backend.record(stream), next(self.link.orders), captured)

    def wait(self, stream: Stream, position: StreamPosition, captured: bool) -> None:
        """Let a stream wait for a position, unless the border of a capture lies between; see [Note: capture]."""
        if position.captured == captured:  # [guard: wait across a capture -> True]
            # [wait: any]
            self.backend.wait(stream, position.event)

    def _span(self, kind: Kind, layer: int, stream: Stream, nbytes: int) -> AbstractContextManager[None]:
        """Record what a stream does in a ``with`` block as one span, if a step is recorded."""
        return nullcontext() if self.recorder is None else self.recorder.span(kind, layer, stream, nbytes)

    def join(self, compute: Stream, others: Sequence[Stream], position: StreamPosition, layer: int) -> None:
        """Let compute, and the other streams of a pass, wait for a transfer before memory changes hands."""
        captured = self.backend.capturing()
        with self._span(Kind.STALL, layer, compute, 0):
            self.wait(compute, position, captured)  # [wait: compute before memory changes hands]
        if len(others) > 1:
            for stream in others:
                if stream != compute:
                    self.wait(stream, position, captured)  # [wait: other streams before memory changes hands]

    def order_behind(self, compute: Stream, others: Sequence[Stream]) -> None:
        """Let the other streams of a pass wait for compute, whose reads of freed memory may be under way."""
        position = self.position(compute)
        for stream in others:
            if stream != compute:
                self.wait(stream, position, position.captured)  # [wait: other streams for compute]

    def to_host(self, copies: Sequence[CopyOut], layer: int, captured: bool) -> None:
        """Queue copies out, after their tensors are ready and their host buffers are free."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        waited: list[Stream] = []
        for some, host, compute, ready, _ in copies:
            pairs += some
            if ready is not None:
                self.wait(self.out, ready, captured)  # [wait: copy out for the tensor saved before]
            elif compute not in waited:
                waited.append(compute)
                self.backend.wait_stream(self.out, compute)  # [wait: copy out for the tensor saved now]
            fence = host.fence
            if fence is not None and fence.order > self.link.waited and fence.captured == captured:
                self.wait(self.out, fence, captured)  # [wait: copy out for the host buffer]
                self.link.waited = fence.order  # [guard: fences waited for]
        with self._span(Kind.D2H, layer, self.out, sum(copy.nbytes for copy in copies)):
            self.backend.to_host(pairs, self.out)

    def begin_reload(self, compute: Stream) -> None:
        """Let copies in start only after compute has reached this point, where their memory was allocated."""
        self.backend.wait_stream(self.back, compute)  # [wait: copy in for its memory]

    def to_device(self, pairs: Pairs, layer: int, captured: bool) -> StreamPosition:
        """Queue a copy in; `begin_reload` came first.  Return its end."""
        with self._span(Kind.H2D, layer, self.back, sum(host.nbytes for host, _ in pairs)):
            self.backend.to_device(pairs, self.back)
        return self.position(self.back, captured)

    def use(self, stream: Stream, copied_in: StreamPosition, layer: int, captured: bool, nbytes: int) -> None:
        """Let a stream wait for a copy in of `nbytes` bytes before it reads."""
        with self._span(Kind.STALL, layer, stream, nbytes):
            self.wait(stream, copied_in, captured)  # [wait: use for the copy in]


@dataclass(slots=True)
class PassDevice:
    """What serves one device in one pass, and the streams on which the pass saved tensors there."""

    transfers: Transfers
    counters: Counters
    streams: list[Stream]
