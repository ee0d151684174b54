"""Measuring a step: events around compute, copies and stalls, turned into a timeline when the step is over.

Nothing is recorded, and no event is made, while no recorder is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..device.base import Backend, Event, Stream
from ..schedule.timeline import Kind, Span, Timeline
from .counters import Counters

__all__ = ["TimelineRecorder"]


@dataclass(frozen=True, slots=True)
class _Open:
    kind: Kind
    layer: int
    stream: Stream
    start: Event
    end: Event
    nbytes: int


class TimelineRecorder:
    """Collects the spans of one step; made by `OffloadContext.record_timeline`.

    Parameters
    ----------
    backend : Backend
        The kind of device.
    counters : Counters
        Where the resident bytes are read.
    """

    def __init__(self, backend: Backend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        self._lock = threading.RLock()  # a finalizer may record a wait in the middle of anything
        self._spans: list[_Open] = []
        self._resident: list[tuple[Event, int]] = []
        self._running: dict[tuple[int, Kind, int], tuple[Stream, Event]] = {}
        self._zero: Event | None = None
        self._done: Timeline | None = None

    @contextmanager
    def span(self, kind: Kind, layer: int, stream: Stream, nbytes: int) -> Iterator[None]:
        """Record what a stream does in this block as one span."""
        start = self._backend.record_timed(stream)
        yield
        end = self._backend.record_timed(stream)
        with self._lock:
            self._spans.append(_Open(kind, layer, stream, start, end, nbytes))

    def begin(self, owner: object, kind: Kind, layer: int) -> None:
        """Start a span of compute on the current stream."""
        stream = self._stream()
        event = self._backend.record_timed(stream)
        with self._lock:
            self._start(event)
            self._running[(id(owner), kind, layer)] = (stream, event)

    def finish(self, owner: object, kind: Kind, layer: int) -> None:
        """End a span of compute that `begin` started; nothing happens if there is none."""
        with self._lock:
            begun = self._running.pop((id(owner), kind, layer), None)
        if begun is None:
            return
        stream, start = begun
        end = self._backend.record_timed(stream)
        with self._lock:
            self._spans.append(_Open(kind, layer, stream, start, end, 0))

    def level(self) -> None:
        """Note the resident bytes as of the present end of the current stream."""
        event = self._backend.record_timed(self._stream())
        nbytes = self._counters.resident_bytes
        with self._lock:
            self._start(event)
            self._resident.append((event, nbytes))

    def _stream(self) -> Stream:
        return self._backend.current_stream(self._backend.current_device())

    def _start(self, event: Event) -> None:
        if self._zero is None:
            self._zero = event

    def timeline(self) -> Timeline:
        """Return the spans in seconds since the first event.

        The first call waits for the device; later ones return the same object.
        """
        if self._done is None:
            self._done = self._resolve()
        return self._done

    def _resolve(self) -> Timeline:
        source = "reference device" if self._backend.name == "reference" else "measured"
        zero = self._zero
        if zero is None:
            return Timeline((), (), source)
        self._backend.synchronize(self._backend.current_device())

        def seconds(event: Event) -> float:
            return self._backend.elapsed(zero, event)

        spans = (Span(s.kind, s.layer, seconds(s.start), seconds(s.end), s.nbytes) for s in self._spans)
        # A wait that found its transfer done takes a few microseconds of stream time, and is no stall.
        shortest = self._backend.resolution
        kept = (s for s in spans if s.kind is not Kind.STALL or s.seconds > shortest)
        return Timeline.build(kept, [(seconds(event), nbytes) for event, nbytes in self._resident], source)
