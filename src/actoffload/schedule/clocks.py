"""The clocks of a simulated step: compute, host, one copy queue for each direction; and the spans that they give."""

from __future__ import annotations

from dataclasses import dataclass, field

from .costs import Link
from .timeline import Kind, Span

__all__ = ["Clocks"]


@dataclass(slots=True)
class _Queue:
    """The copies in one direction."""

    kind: Kind
    bandwidth: float
    end: float = 0.0  # of the last copy


@dataclass(slots=True)
class Clocks:
    """When compute, the host and the copies are done with what they have, in seconds since the step began."""

    link: Link
    compute: float = 0.0
    host: float = 0.0
    stalled: float = 0.0
    running: tuple[Kind, int] | None = None  # the forward or backward of a layer
    start: float = 0.0  # when it began
    since: float = 0.0  # when it began, or went on after a stall
    stalled_before: float = 0.0
    host_start: float = 0.0
    d2h: _Queue = field(init=False)
    h2d: _Queue = field(init=False)
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.d2h = _Queue(Kind.D2H, self.link.d2h)
        self.h2d = _Queue(Kind.H2D, self.link.h2d)

    def begin(self, kind: Kind, layer: int) -> None:
        """Begin the compute of a layer."""
        self.running = kind, layer
        self.start = self.since = self.compute
        self.stalled_before = self.stalled
        self.host_start = self.host

    def reach(self, seconds: float, host_seconds: float) -> None:
        """Let compute run until a time, in seconds since the begin of the layer without stalls, and never back.

        The host needs `host_seconds` to queue this compute; compute waits for it, which is no stall.
        """
        self.host = max(self.host, self.host_start + host_seconds)
        self.compute = max(self.compute, self.start + seconds + self.stalled - self.stalled_before, self.host)

    def hook(self, seconds: float) -> None:
        """Let the host spend some seconds on a saved tensor."""
        self.host += seconds
        self.host_start += seconds

    def end(self) -> None:
        """End the compute of a layer, or of the part of it before a stall."""
        if self.running is not None and self.compute > self.since:
            self.spans.append(Span(*self.running, self.since, self.compute))
        self.running = None

    def wait(self, time: float, layer: int) -> None:
        """Let compute wait for a copy of a layer."""
        start, running = self.compute, self.running
        if time <= start:
            return
        self.end()
        self.compute = self.since = time
        self.stalled += time - start
        self.spans.append(Span(Kind.STALL, layer, start, time))
        self.running = running

    def copy_out(self, layer: int, nbytes: int, ready: float) -> float:
        """Queue a copy to the host; return when it is done."""
        return self._copy(self.d2h, self.h2d, layer, nbytes, ready)

    def copy_back(self, layer: int, nbytes: int) -> float:
        """Queue a copy to the device, at the present time of compute; return when it is done."""
        return self._copy(self.h2d, self.d2h, layer, nbytes, self.compute)

    def _copy(self, queue: _Queue, other: _Queue, layer: int, nbytes: int, ready: float) -> float:
        start = max(queue.end, ready)
        if self.link.both is None or self.link.both >= queue.bandwidth + other.bandwidth or other.end <= start:
            queue.end = start + (self.link.latency + nbytes / queue.bandwidth)
        else:
            queue.end = self._shared(queue, other, start + self.link.latency, nbytes, self.link.both)
        self.spans.append(Span(queue.kind, layer, start, queue.end, nbytes))
        return queue.end

    @staticmethod
    def _shared(queue: _Queue, other: _Queue, start: float, left: float, both: float) -> float:
        """Return the end of a copy that has what the other direction leaves of the bandwidth while that is busy."""
        rest, together = max(both - other.bandwidth, 0.0), max(other.end - start, 0.0)
        if left <= rest * together:
            return start + left / rest
        return start + together + (left - rest * together) / queue.bandwidth
