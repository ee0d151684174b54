"""Timelines of a step, the result of a simulation, and their numbers as text."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from .._text import milliseconds, size


class Kind(enum.Enum):
    """Kind of work in a span of time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    D2H = "offload (D2H)"
    H2D = "reload (H2D)"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work.

    Parameters
    ----------
    kind : Kind
        What was done.
    layer : int
        For which layer; of a stall, the layer whose copy compute waited for.
    start, end : float
        Seconds since the step began.
    nbytes : int
        Bytes copied; 0 for compute and stalls.
    """

    kind: Kind
    layer: int
    start: float
    end: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Length of the span in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Spans of one step and the bytes of saved activations resident on the device.

    Parameters
    ----------
    spans : tuple of Span
        In order of their start.
    resident : tuple of (float, int)
        Seconds, and the bytes of saved activations that are on the device from then on.
    source : str
        Where the times come from: ``"simulated"``, ``"measured"`` or ``"reference device"``.
    """

    spans: tuple[Span, ...]
    resident: tuple[tuple[float, int], ...] = ()
    source: str = "measured"

    @property
    def end(self) -> float:
        """Seconds at which the last span ends."""
        return max((span.end for span in self.spans), default=0.0)

    def of(self, *kinds: Kind) -> tuple[Span, ...]:
        """Return the spans of some kinds."""
        return tuple(span for span in self.spans if span.kind in kinds)

    def seconds(self, *kinds: Kind) -> float:
        """Return the total length of the spans of some kinds in seconds."""
        return sum(span.seconds for span in self.of(*kinds))

    def nbytes(self, *kinds: Kind) -> int:
        """Return the bytes copied in the spans of some kinds."""
        return sum(span.nbytes for span in self.of(*kinds))

    @property
    def peak_bytes(self) -> int:
        """Largest number of resident bytes."""
        return max((nbytes for _, nbytes in self.resident), default=0)

    @staticmethod
    def build(spans: Iterable[Span], resident: Iterable[tuple[float, int]] = (), source: str = "measured") -> Timeline:
        """Return a timeline with its spans in order of their start."""
        ordered = sorted(spans, key=lambda span: (span.start, span.end, span.kind.value, span.layer))
        return Timeline(tuple(ordered), tuple(resident), source)


@dataclass(frozen=True)
class Simulation:
    """What is predicted for one step of a model, or of a rank of a pipeline; ``print`` gives a table.

    Parameters
    ----------
    timeline : Timeline
        Spans of compute, copies and stalls, and the resident bytes.
    step_time, forward_time, baseline : float
        Seconds of the step, until the first backward starts, and of the step without offloading.
    forward_stall, backward_stall : float
        Seconds for which compute waited for copies, until the first backward starts and later.
    reloaded_on_demand : int
        Saved tensors that were reloaded only when backward used them.
    device_peak_bytes : int
        Peak of the device memory, with all that the costs name beside the saved activations.
    bubble_seconds : float
        Seconds for which compute waited for what other ranks send.
    starts : tuple of float
        When each computation of a rank starts.
    """

    timeline: Timeline
    step_time: float
    forward_time: float
    baseline: float
    forward_stall: float
    backward_stall: float
    reloaded_on_demand: int
    device_peak_bytes: int = 0
    bubble_seconds: float = 0.0
    starts: tuple[float, ...] = ()

    @property
    def stall_seconds(self) -> float:
        """Seconds for which compute waited for copies, forward and backward together."""
        return self.forward_stall + self.backward_stall

    @property
    def slowdown(self) -> float:
        """Step time divided by that without offload; 1.0 means that offloading costs no time."""
        return self.step_time / self.baseline if self.baseline else 1.0

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes of saved activations on the device at one time."""
        return self.timeline.peak_bytes

    @property
    def bytes_offloaded(self) -> int:
        """Bytes copied to the host."""
        return self.timeline.nbytes(Kind.D2H)

    @property
    def bytes_reloaded(self) -> int:
        """Bytes copied back; less than `bytes_offloaded` if a layer was copied out but never released."""
        return self.timeline.nbytes(Kind.H2D)

    def __str__(self) -> str:
        backward = self.step_time - self.forward_time
        rows = (
            ("step", milliseconds(self.step_time, 3), f"{self.slowdown:.3f} x no offload"),
            ("forward", milliseconds(self.forward_time, 3), f"{milliseconds(self.forward_stall, 3)} stalled"),
            ("backward", milliseconds(backward, 3), f"{milliseconds(self.backward_stall, 3)} stalled"),
            ("peak", size(self.peak_bytes), "saved activations on the device"),
            ("offloaded", size(self.bytes_offloaded), "device to host"),
            ("reloaded", size(self.bytes_reloaded), f"host to device, {self.reloaded_on_demand} tensors on demand"),
        )
        width = max(len(value) for _, value, _ in rows)
        return "\n".join(f"{name:<10}{value:>{width}}  {note}" for name, value, note in rows)
