"""Count what happened, and record a step: events around compute, copies and stalls, turned into a timeline afterwards.

Nothing is recorded, and no event is made, while no recorder is installed.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any

from .._torch.tensors import backward_id
from ..device.base import Backend, Stream, StreamEvent, current_stream
from ..schedule.timeline import Kind, Span, Timeline
from .host_pool import Resources, dropped, settle
from .layout import union


class Reason(enum.StrEnum):
    """Why a saved tensor was kept on the device; a text, so that reports can be written as JSON."""

    PARAMETER = "parameter"
    BUFFER = "module buffer"
    LEAF = "leaf that requires grad"
    MARKED = "marked with mark_not_offload"
    SMALL = "smaller than the limit"
    DEVICE = "not on the offloading device"
    LAYOUT = "not strided"
    SUBCLASS = "tensor subclass"
    FREED = "memory freed by the program"
    HOST_FULL = "no host memory left"
    SHARED = "shared with layers that need it on the device"
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
        self.tensors_kept, self.bytes_kept = Counter[Reason](), Counter[Reason]()
        self.peak_resident_bytes = self.resident_bytes

    def keep(self, reason: Reason, nbytes: int, count: int = 1) -> None:
        """Count tensors that are kept, by reason."""
        self.tensors_kept[reason] += count
        self.bytes_kept[reason] += nbytes

    def rise(self, nbytes: int, resources: Resources) -> None:
        """Add to the bytes on the device, as those of an object."""
        if dropped or self.freed:
            self._settle()
        # No call in between: see [Note: finalizers].
        resources.nbytes += nbytes
        self.resident += nbytes
        if self.resident > self.peak_resident_bytes:
            self.peak_resident_bytes = self.resident

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
        names = {each.name for each in fields(Statistics)} - host.keys()
        sums: dict[str, Any] = {name: getattr(self, name) for name in names}
        sums |= {name: dict(sums[name]) for name in ("tensors_kept", "bytes_kept")}
        return Statistics(**sums | host)


# Recording a step


class TimelineRecorder:
    """Collects the spans of one step; made by `OffloadContext.record_timeline`."""

    def __init__(self, backend: Backend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        # These only grow by `append`: a finalizer, or another thread, may record a wait in the middle of anything.
        self._spans: list[tuple[Kind, int, StreamEvent, StreamEvent, int]] = []  # start, end and bytes at the end
        self._starts: list[StreamEvent] = []
        self._resident: list[tuple[StreamEvent, int]] = []
        # By owner, kind, layer and backward.
        self._running: dict[tuple[int, Kind, int, int], tuple[Stream, StreamEvent]] = {}
        self._gaps: list[tuple[StreamEvent, StreamEvent]] = []

    @contextmanager
    def span(self, kind: Kind, layer: int, stream: Stream, nbytes: int) -> Iterator[None]:
        """Record what a stream does in this block as one span."""
        begun = self._backend.record_timed(stream)
        yield
        end = self._backend.record_timed(stream)
        self._spans.append((kind, layer, begun, end, 0 if kind is Kind.STALL else nbytes))

    def begin(self, owner: object, kind: Kind, layer: int) -> None:
        """Start a span of compute on the current stream; that of another owner in the same backward ends."""
        stream = current_stream(self._backend)
        if kind is Kind.BACKWARD:
            # Autograd runs what was computed last first, so backward does not return to a pass that it has left.
            for key, (on, *_) in list(self._running.items()):
                if key[1] is kind and key[0] != id(owner) and key[3] == backward_id() and on == stream:
                    self._finish(key)  # [guard: recorded backward of an earlier pass]
        event = self._backend.record_timed(stream)
        self._starts.append(event)
        self._running[(id(owner), kind, layer, backward_id())] = stream, event

    def finish(self, owner: object, kind: Kind, layer: int) -> None:
        """End a span of compute that `begin` started; nothing happens if there is none."""
        for key in [key for key in list(self._running) if key[:3] == (id(owner), kind, layer)]:
            self._finish(key)

    def _finish(self, key: tuple[int, Kind, int, int]) -> None:
        begun = self._running.pop(key, None)
        if begun is not None:
            self._spans.append((*key[1:3], begun[1], self._backend.record_timed(begun[0]), 0))

    def level(self, *, outside: bool = False) -> None:
        """Note the resident bytes as of the present end of the current stream; `outside` of groups they changed."""
        event = self._backend.record_timed(current_stream(self._backend))
        self._starts.append(event)
        self._resident.append((event, self._counters.resident_bytes))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave what the host does in this block, which is no part of the step, out of the timeline."""
        begun = self._backend.record_timed(current_stream(self._backend))
        yield
        self._gaps.append((begun, self._backend.record_timed(current_stream(self._backend))))

    def timeline(self) -> Timeline:
        """Return the spans in seconds since the first event; the first call waits for the device."""
        return self._resolved

    @cached_property
    def _resolved(self) -> Timeline:
        source = "reference device" if self._backend.name == "reference" else "measured"
        if not self._starts:
            return Timeline((), (), source)
        self._backend.synchronize(self._backend.current_device())
        elapsed = partial(self._backend.elapsed, self._starts[0])
        gaps = union((elapsed(begun), elapsed(end)) for begun, end in self._gaps)  # of several threads

        def seconds(event: StreamEvent) -> float:
            time = elapsed(event)
            return time - sum(min(max(time - begun, 0.0), end - begun) for begun, end in gaps)

        spans = (Span(kind, layer, seconds(start), seconds(end), n) for kind, layer, start, end, n in self._spans)
        # A wait that found its transfer done takes a few microseconds of stream time, and is no stall.
        kept = (s for s in spans if s.kind is not Kind.STALL or s.seconds > self._backend.resolution)
        return Timeline.build(kept, [(seconds(event), nbytes) for event, nbytes in self._resident], source)
