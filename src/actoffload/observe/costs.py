"""From measured timelines to the costs that `simulate` takes: what a model's layers save, and when."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..schedule.costs import LayerCost, Saved
from ..schedule.timeline import Kind, Span, Timeline

__all__ = ["measured_costs"]


def measured_costs(timelines: Timeline | Sequence[Timeline]) -> tuple[LayerCost, ...]:
    """Return the cost of each layer of a step that was recorded while nothing moved.

    Record with a context of manual synchronization on whose controller nothing is called: every layer's saved
    bytes are counted then, and no copy disturbs the compute.

    Parameters
    ----------
    timelines : Timeline or sequence of Timeline
        One or several recordings of the same step; times are the medians over them.

    Returns
    -------
    tuple of LayerCost
        In order of the forward.  When a tensor is saved and when backward needs it are read off the steps of
        the resident bytes; tensors are taken to be needed in the reverse order of their saving.

    Raises
    ------
    ValueError
        If there is no recording, a recording has no layers, or something was copied.

    Examples
    --------
    >>> from actoffload.observe.costs import measured_costs
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
        raise ValueError("No timeline was given; record at least one step.")
    parsed = [_one(timeline) for timeline in recordings]
    first = parsed[0]
    if any([cost.nbytes for cost in costs] != [cost.nbytes for cost in first] for costs in parsed):
        raise ValueError("The recordings are of different steps: their layers save different bytes.")
    return tuple(
        LayerCost(
            median(costs[k].forward for costs in parsed),
            median(costs[k].backward for costs in parsed),
            first[k].saved,
        )
        for k in range(len(first))
    )


def _one(timeline: Timeline) -> list[LayerCost]:
    if timeline.of(Kind.D2H, Kind.H2D):
        raise ValueError("The recorded step copied tensors; record one in which nothing moves.")
    forward = {span.layer: span for span in timeline.of(Kind.FORWARD)}
    backward = {span.layer: span for span in timeline.of(Kind.BACKWARD)}
    if not forward or set(forward) != set(backward):
        raise ValueError("The recording has no whole step: every layer needs its forward and its backward.")
    costs = []
    for layer in sorted(forward):
        saved_at = _rises(timeline, forward[layer])
        sizes = [nbytes for _, nbytes in saved_at]
        needed_at = _needed(timeline, backward[layer], sizes)
        saved = [
            Saved(nbytes, saved_at=at, needed_at=needed)
            for (at, nbytes), needed in zip(saved_at, needed_at, strict=True)
        ]
        costs.append(LayerCost(forward[layer].seconds, backward[layer].seconds, tuple(saved)))
    return costs


def _within(timeline: Timeline, span: Span) -> list[tuple[float, int, int]]:
    """Return (fraction of the span, bytes before, bytes after) for each step of the resident bytes in a span."""
    found, before = [], 0
    for time, nbytes in timeline.resident:
        if span.start <= time <= span.end and nbytes != before:
            fraction = (time - span.start) / span.seconds if span.seconds else 0.0
            found.append((min(max(fraction, 0.0), 1.0), before, nbytes))
        before = nbytes
    return found


def _rises(timeline: Timeline, span: Span) -> list[tuple[float, int]]:
    return [(at, after - before) for at, before, after in _within(timeline, span) if after > before]


def _needed(timeline: Timeline, span: Span, sizes: Sequence[int]) -> list[float]:
    """Return when backward needs each tensor: the next one is needed where those before it are gone."""
    falls = [(at, before - after) for at, before, after in _within(timeline, span) if after < before]
    needed = [0.0] * len(sizes)
    at, freed, used = 0.0, 0, 0
    for k in reversed(range(len(sizes))):
        while falls and freed < used:
            at, nbytes = falls.pop(0)
            freed += nbytes
        needed[k] = at
        used += sizes[k]
    return needed
