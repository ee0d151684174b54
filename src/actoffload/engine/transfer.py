"""Copies between the device and the host pool, and every wait that they need.

`[Note: who waits for whom]`  Three kinds of streams meet.  The *home* stream of a storage is the one that was
current when its tensor was saved: compute.  The *out* stream carries copies to the host, the *back* stream copies
to the device (a program's own `offload_stream` plays both).  PassDevice memory is taken from and returned to the
allocator in the order of the home stream; so memory is free again exactly when everything that reads or writes
it has been waited for by home.  The edges:

=========================  =======================  ==========================================================
who                        waits for                because
=========================  =======================  ==========================================================
out, before a copy         the tensor's ready mark  home may still be writing what is copied
out, before a copy         the host buffer's fence  an earlier copy may still read or write that host memory
home, before release       the end of the copy out  the next tensor in this memory would be what is copied
back, before a copy        the start mark on home   home may still use the memory that the copy writes
back, before a copy        (the end of the copy out)  home has waited for it at release, so the start mark says so
a stream, before use       the end of the copy in   the bytes are not there earlier
home, before dropping      the end of copies        a copy in flight would read or write somebody else's memory
home, before dropping      other streams' use       a stream other than home may still read what it unpacked
=========================  =======================  ==========================================================

Streams of a program other than home may own the memory of a saved tensor; the same pass has seen them, and they
wait for whatever home waits for.

`[Note: capture]`  While a graph is captured a stream may wait only for events of the same capture, and events of a
capture mean nothing outside.  Before the first layer that stays, home has waited for every copy out, and each copy
in is waited for by its use; so nothing has to cross the border between the capture of forward and that of backward.
What seems to cross is work from before the capture, which `torch.cuda.graph` has synchronized, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from ..device.base import Backend, Pairs, Stream, StreamPosition
from ..schedule.timeline import Kind
from .hostpool import HostBuffer, HostPool
from .recorder import TimelineRecorder
from .statistics import Counters

__all__ = ["PassDevice", "Transfers"]

OUT, BACK, COMPUTE = 0, 1, 2

_mark = partial(tuple.__new__, StreamPosition)  # without the frame of Python's that a named tuple makes


class Transfers:
    """The transfer streams and the host pool of one device.

    Parameters
    ----------
    backend : Backend
        The kind of device.
    device : torch.device
        Which one.
    max_host_bytes : int or None
        Limit of the host pool.
    stream : Stream or None
        A program's own stream for both directions; two of our own otherwise.
    """

    def __init__(
        self, backend: Backend, device: torch.device, max_host_bytes: int | None, stream: Stream | None
    ) -> None:
        self.backend = backend
        self.device = device
        self.pool = HostPool(backend, max_host_bytes)
        self.out: Stream = backend.new_stream(device) if stream is None else backend.adopt(stream)
        self.back: Stream = backend.new_stream(device) if stream is None else self.out
        self.recorder: TimelineRecorder | None = None
        self._orders = count(1)  # finalizers take numbers too, in any thread
        self._waited = 0  # order of the last mark of `back` that `out` has waited for

    def position(self, stream: Stream, lane: int = COMPUTE, captured: bool | None = None) -> StreamPosition:
        """Return a mark at the present end of a stream; `captured` saves asking, where the caller knows."""
        if captured is None:
            captured = self.backend.capturing()
        return _mark((self.backend.record(stream), lane, next(self._orders), captured))

    def wait(self, stream: Stream, mark: StreamPosition, captured: bool | None = None) -> None:
        """Let a stream wait for a mark, unless the border of a capture lies between; see [Note: capture]."""
        if captured is None:
            captured = self.backend.capturing()
        if mark.captured == captured:  # [guard: wait across a capture -> True]
            # [wait: any]
            self.backend.wait(stream, mark.event)

    def join(
        self,
        home: Stream,
        others: Sequence[Stream],
        mark: StreamPosition,
        layer: int | None = None,
        captured: bool | None = None,
    ) -> None:
        """Let home, and the other streams of a pass, wait for a transfer before memory changes hands."""
        if captured is None:
            captured = self.backend.capturing()
        recorder = self.recorder
        if recorder is None or layer is None:
            if mark.captured == captured:  # [guard: release across a capture -> True]
                self.backend.wait(home, mark.event)  # [wait: home before memory changes hands]
        else:
            with recorder.span(Kind.STALL, layer, home, 0):
                self.wait(home, mark, captured)  # [wait: home before memory changes hands, recorded]
        if len(others) > 1:
            for stream in others:
                if stream != home:
                    self.wait(stream, mark, captured)  # [wait: other streams before memory changes hands]

    def order_behind(self, home: Stream, others: Sequence[Stream]) -> None:
        """Let the other streams of a pass wait for home, whose reads of freed memory may be under way."""
        mark = self.position(home)
        for stream in others:
            if stream != home:
                self.wait(stream, mark)  # [wait: other streams for home]

    def to_host(
        self, pairs: Pairs, host: HostBuffer, home: Stream, ready: StreamPosition | None, layer: int, captured: bool
    ) -> None:
        """Queue a copy out, after the tensor is ready, at `ready` or now, and the host buffer is free."""
        if ready is None:
            self.backend.wait_stream(self.out, home)  # [wait: copy out for the tensor saved now]
        else:
            self.wait(self.out, ready, captured)  # [wait: copy out for the tensor saved before]
        for mark in host.fence:
            if mark.order > self._waited and mark.captured == captured:
                self.wait(self.out, mark, captured)  # [wait: copy out for the host buffer]
                self._waited = mark.order  # [guard: fences waited for]
        recorder = self.recorder
        if recorder is None:
            self.backend.to_host(pairs, self.out)
        else:
            with recorder.span(Kind.D2H, layer, self.out, host.nbytes):
                self.backend.to_host(pairs, self.out)

    def end_of_copies_out(self, captured: bool | None = None) -> StreamPosition:
        """Return a mark after all copies out that are queued so far."""
        if captured is None:
            captured = self.backend.capturing()
        return _mark((self.backend.record(self.out), OUT, next(self._orders), captured))

    def begin_reload(self, home: Stream) -> None:
        """Let copies in start only after home has reached this point, where their memory was allocated."""
        self.backend.wait_stream(self.back, home)  # [wait: copy in for its memory]

    def to_device(self, pairs: Pairs, layer: int, captured: bool) -> StreamPosition:
        """Queue a copy in; `begin_reload` came first.  Return its end."""
        recorder = self.recorder
        if recorder is None:
            self.backend.to_device(pairs, self.back)
        else:
            with recorder.span(Kind.H2D, layer, self.back, sum(host.nbytes for host, _ in pairs)):
                self.backend.to_device(pairs, self.back)
        return _mark((self.backend.record(self.back), BACK, next(self._orders), captured))

    def use(self, stream: Stream, copied_in: StreamPosition, layer: int, captured: bool) -> None:
        """Let a stream wait for a copy in before it reads."""
        recorder = self.recorder
        if recorder is None:
            if copied_in.captured == captured:  # [guard: use across a capture -> True]
                self.backend.wait(stream, copied_in.event)  # [wait: use for the copy in]
        else:
            with recorder.span(Kind.STALL, layer, stream, 0):
                self.wait(stream, copied_in, captured)  # [wait: use for the copy in, recorded]


@dataclass(slots=True)
class PassDevice:
    """What serves one device in one pass, and the streams on which the pass saved tensors there."""

    transfers: Transfers
    counters: Counters
    device: torch.device  # where its tensors are
    streams: list[Stream]
