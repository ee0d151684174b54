"""Measuring a step: events around compute, copies and stalls, turned into a timeline when the step is over.

Nothing is recorded, and no event is made, while no recorder is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from .._torch.autograd import backward_id
from .._torch.tensors import has_nvtx
from ..device.base import Backend, Stream, StreamEvent
from ..schedule.timeline import Kind, Span, Timeline
from .layout import union
from .statistics import Counters

__all__ = ["TimelineRecorder"]


class TimelineRecorder:
    """Collects the spans of one step; made by `OffloadContext.record_timeline`."""

    levels = True  # every change of the resident bytes is noted, so every saved tensor is followed

    def __init__(self, backend: Backend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        # These only grow by `append`: a finalizer, or another thread, may record a wait in the middle of anything.
        self._spans: list[tuple[Kind, int, StreamEvent, StreamEvent, int]] = []  # start, end and bytes at the end
        self._starts: list[StreamEvent] = []
        self._resident: list[tuple[StreamEvent, int]] = []
        # By owner, kind, layer and backward.
        self._running: dict[tuple[int, Kind, int, int], tuple[Stream, StreamEvent, object]] = {}
        self.name_of: Callable[[int], str] | None = None  # of layers, for NVTX ranges of compute and copies
        self._gaps: list[tuple[StreamEvent, StreamEvent]] = []
        self._done: Timeline | None = None

    def _start_range(self, kind: Kind, layer: int) -> object:
        """Begin an NVTX range that any thread may end."""
        if not has_nvtx or self.name_of is None or kind is Kind.STALL:
            return None
        return torch.cuda.nvtx.range_start(f"{kind.value} of {self.name_of(layer)}")

    @contextmanager
    def span(self, kind: Kind, layer: int, stream: Stream, nbytes: int) -> Iterator[None]:
        """Record what a stream does in this block as one span."""
        shown = self._start_range(kind, layer)
        begun = self._backend.record_timed(stream)
        yield
        self._add(kind, layer, stream, begun, shown, nbytes)

    def _add(self, kind: Kind, layer: int, stream: Stream, begun: StreamEvent, shown: object, nbytes: int) -> None:
        """Add a span that ends now, and end the NVTX range that shows it."""
        end = self._backend.record_timed(stream)
        if shown is not None:
            torch.cuda.nvtx.range_end(shown)
        self._spans.append((kind, layer, begun, end, 0 if kind is Kind.STALL else nbytes))

    def begin(self, owner: object, kind: Kind, layer: int) -> None:
        """Start a span of compute on the current stream; that of another owner in the same backward ends."""
        stream = self._stream()
        if kind is Kind.BACKWARD:
            # Autograd runs what was computed last first, so backward does not return to a pass that it has left.
            for key, (on, *_) in list(self._running.items()):
                if key[1] is kind and key[0] != id(owner) and key[3] == backward_id() and on == stream:
                    self._finish(key)  # [guard: recorded backward of an earlier pass]
        event = self._backend.record_timed(stream)
        shown = self._start_range(kind, layer)
        self._starts.append(event)
        self._running[(id(owner), kind, layer, backward_id())] = stream, event, shown

    def finish(self, owner: object, kind: Kind, layer: int) -> None:
        """End a span of compute that `begin` started; nothing happens if there is none."""
        for key in [key for key in list(self._running) if key[:3] == (id(owner), kind, layer)]:
            self._finish(key)

    def _finish(self, key: tuple[int, Kind, int, int]) -> None:
        begun = self._running.pop(key, None)
        if begun is not None:
            self._add(*key[1:3], *begun, 0)

    def before_actions(self) -> None:
        """Do nothing; a meter notes the memory that an event of the plan finds."""

    def level(self) -> None:
        """Note the resident bytes as of the present end of the current stream."""
        event = self._backend.record_timed(self._stream())
        self._starts.append(event)
        self._resident.append((event, self._counters.resident_bytes))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave what the host does in this block, which is no part of the step, out of the timeline."""
        begun = self._backend.record_timed(self._stream())
        yield
        self._gaps.append((begun, self._backend.record_timed(self._stream())))

    def _stream(self) -> Stream:
        return self._backend.current_stream(self._backend.current_device())

    def timeline(self) -> Timeline:
        """Return the spans in seconds since the first event; the first call waits for the device."""
        if self._done is None:
            self._done = self._resolve()
        return self._done

    def _resolve(self) -> Timeline:
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
