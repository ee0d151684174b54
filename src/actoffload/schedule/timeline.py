"""A step as spans of time: what `simulate` predicts and what a recorder measures are the same object."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Kind", "Span", "Timeline"]


class Kind(enum.Enum):
    """What a span of time was spent on."""

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
        For which layer.  A stall carries the layer that was waited for.
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
        Steps of a staircase: at these seconds the bytes of saved activations on the device become this.
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
