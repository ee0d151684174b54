"""Input of `simulate`: bytes and times of each layer, and the bandwidth of the link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from .timeline import Kind, Span, Timeline

__all__ = ["LayerCost", "Link", "Saved", "measured_costs"]


def _seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}; expected seconds, finite and 0 or more.")


def _fraction(name: str, value: float, of: str) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}; expected a fraction of the layer's {of} time, from 0.0 to 1.0.")


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd saves in a layer and that may be offloaded.

    Parameters
    ----------
    nbytes : int
        Size in bytes; at least 1.
    saved_at, needed_at : float
        When forward saves it and when backward needs it, as fractions of the layer's forward and backward time.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    nbytes: int
    saved_at: float = 1.0
    needed_at: float = 0.0

    def __post_init__(self) -> None:
        if self.nbytes < 1:
            raise ValueError(f"nbytes is {self.nbytes}; expected the size of a tensor, at least 1 byte.")
        _fraction("saved_at", self.saved_at, "forward")
        _fraction("needed_at", self.needed_at, "backward")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Compute times of one layer and the tensors that it saves.

    Parameters
    ----------
    forward, backward : float
        Seconds of compute without any waiting.
    saved : tuple of Saved
        In the order in which forward saves them.

    Examples
    --------
    >>> from actoffload.schedule import LayerCost
    >>> cost = LayerCost.even(1000, forward=0.010, backward=0.020, pieces=4)
    >>> [(saved.nbytes, saved.saved_at, saved.needed_at) for saved in cost.saved]
    [(250, 0.25, 0.75), (250, 0.5, 0.5), (250, 0.75, 0.25), (250, 1.0, 0.0)]
    """

    forward: float
    backward: float
    saved: tuple[Saved, ...] = ()

    def __post_init__(self) -> None:
        _seconds("forward", self.forward)
        _seconds("backward", self.backward)
        object.__setattr__(self, "saved", tuple(self.saved))
        for earlier, later in pairwise(self.saved):
            if later.saved_at < earlier.saved_at:
                raise ValueError(
                    f"A tensor saved at {later.saved_at} comes after one saved at {earlier.saved_at}; "
                    "list the saved tensors in the order in which forward saves them."
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all saved tensors."""
        return sum(saved.nbytes for saved in self.saved)

    @property
    def order_of_use(self) -> tuple[int, ...]:
        """Positions in `saved` as backward needs them; of two needed at once, the last saved comes first."""
        return tuple(sorted(range(len(self.saved)), key=lambda k: (self.saved[k].needed_at, -k)))

    @classmethod
    def even(cls, nbytes: int, forward: float, backward: float, pieces: int = 8) -> LayerCost:
        """Return a layer that saves `nbytes` in equal pieces at equal distances; backward needs the last one at once.

        There are fewer pieces if there are fewer bytes than that.  The last one takes the remainder.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; expected the bytes that a layer saves, 0 or more.")
        if pieces < 1:
            raise ValueError(f"pieces is {pieces}; expected a number of saved tensors, at least 1.")
        pieces = min(pieces, nbytes)
        sizes = [nbytes // pieces] * (pieces - 1) + [nbytes // pieces + nbytes % pieces] if pieces else []
        saved = [Saved(size, (k + 1) / pieces, (pieces - 1 - k) / pieces) for k, size in enumerate(sizes)]
        return cls(forward, backward, tuple(saved))


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between device and host.

    The two directions are independent: a copy is not slower while one runs the other way.  Where host memory cannot
    keep up with both, give the bandwidths measured with both directions busy; the prediction is then an upper bound.

    Parameters
    ----------
    d2h, h2d : float
        Bytes per second from device to host and from host to device; infinity is allowed.
    latency : float
        Seconds that each copy takes in addition.
    """

    d2h: float
    h2d: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("d2h", self.d2h), ("h2d", self.h2d)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; expected bytes per second, more than 0.")
        _seconds("latency", self.latency)


def measured_costs(timelines: Timeline | Sequence[Timeline]) -> tuple[LayerCost, ...]:
    """Return the cost of each layer, in execution order, of a step that was recorded without any copy.

    Record with a context of manual synchronization and call nothing on its controller.  Backward is assumed to need the
    saved tensors in reverse order.

    Parameters
    ----------
    timelines : Timeline or sequence of Timeline
        One or several recordings of the same step; times are the medians over them.

    Raises
    ------
    ValueError
        If there is no recording, a recording has no layers, or it has copies.

    Examples
    --------
    >>> from actoffload.measure import measured_costs
    >>> context, sync, _ = actoffload.get_cpu_offload_context(
    ...     enabled=True, model_layers=2, manual_synchronization=True
    ... )
    >>> x = torch.randn(512, 512)
    >>> with context.record_timeline() as recorder:
    ...     for layer in (torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)):
    ...         with context:
    ...             x = layer(x)
    ...         x = sync(x)
    ...     x.sum().backward()
    >>> [cost.nbytes for cost in measured_costs(recorder.timeline())]
    [1048576, 1048576]
    """
    recordings = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not recordings:
        raise ValueError("measured_costs got no timeline; record at least one step.")
    parsed = [_one(timeline) for timeline in recordings]
    first = parsed[0]
    if any([cost.nbytes for cost in costs] != [cost.nbytes for cost in first] for costs in parsed):
        raise ValueError("The recordings are of different steps: their layers save different bytes.")
    return tuple(
        LayerCost(median(cost.forward for cost in costs), median(cost.backward for cost in costs), costs[0].saved)
        for costs in zip(*parsed, strict=True)
    )


def _one(timeline: Timeline) -> list[LayerCost]:
    if timeline.of(Kind.D2H, Kind.H2D):
        raise ValueError("The recorded step has copies; record one in which nothing moves.")
    forward = {span.layer: span for span in timeline.of(Kind.FORWARD)}
    backward = {span.layer: span for span in timeline.of(Kind.BACKWARD)}
    if not forward or set(forward) != set(backward):
        raise ValueError("The recording has no whole step: every layer needs its forward and its backward.")
    costs = []
    for layer in sorted(forward):
        saved = [(at, change) for at, change in _changes(timeline, forward[layer]) if change > 0]
        freed = [(at, -change) for at, change in _changes(timeline, backward[layer]) if change < 0]
        needed = _needed(freed, [nbytes for _, nbytes in saved])
        tensors = tuple(Saved(nbytes, at, needed_at) for (at, nbytes), needed_at in zip(saved, needed, strict=True))
        costs.append(LayerCost(forward[layer].seconds, backward[layer].seconds, tensors))
    return costs


def _changes(timeline: Timeline, span: Span) -> list[tuple[float, int]]:
    """Return the changes of the resident bytes in a span: (fraction of the span, bytes)."""
    seconds = span.seconds or 1.0
    levels = pairwise(((0.0, 0), *timeline.resident))
    return [
        (min(max((at - span.start) / seconds, 0.0), 1.0), nbytes - before)
        for (_, before), (at, nbytes) in levels
        if span.start <= at <= span.end and nbytes != before
    ]


def _needed(falls: list[tuple[float, int]], sizes: Sequence[int]) -> list[float]:
    """Return when backward needs each tensor: the next one is needed where those before it are freed."""
    needed = [0.0] * len(sizes)
    at, freed, used = 0.0, 0, 0
    for k in reversed(range(len(sizes))):
        while falls and freed < used:
            at, nbytes = falls.pop(0)
            freed += nbytes
        needed[k] = at
        used += sizes[k]
    return needed
