"""What the planner takes, from what a meter saw: the cost of each group, of its hooks, and the rates of copies."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from statistics import median
from typing import Any, TypeAlias

from ...schedule.costs import LayerCost, Link, Saved
from ...schedule.timeline import Kind
from .metering import Copy, Meter, Times
from .timed_pass import TimedPass

__all__ = [
    "at_the_pace_of",
    "beside",
    "for_inputs",
    "hook_seconds",
    "layer_costs",
    "measured_link",
    "steady",
    "without_hooks",
]


SHARED = 0.05
"""Part of the time of copies for which both directions must have been busy, so that their common rate is known."""
INTERRUPTED, MOMENT = 1.5, 1e-3
"""Times the usual time and seconds beyond which a group was interrupted."""
CLOCKS = 0.15
"""By how much a warm device computes slower at most than a cool one, as a part of the time."""


_TIMES = "forward", "backward", "gap_forward", "gap_backward"  # of the device
_BYTES = "forward_temporary", "backward_temporary", "gap_forward_temporary", "gap_backward_temporary", "kept_bytes"


def measured_link(meter: Meter) -> Link | None:
    """Return the link with the rates of the copies in a step, as they ran; None if a direction had none."""
    out, back = meter.copies(Kind.D2H), meter.copies(Kind.H2D)
    beside = list(map(_beside(back), out)), list(map(_beside(out), back))
    rates = list(map(_rate, (out, back), beside))
    first, second = rates
    if first is None or second is None:
        return None
    together = (sum(beside[0]) + sum(beside[1])) / 2
    if together < SHARED * sum(copy.seconds for copy in (*out, *back)):
        return Link(first, second)
    # While both directions are busy: all bytes without those that were copied before and after.
    nbytes = 0.0
    for copies, shared, rate in zip((out, back), beside, (first, second), strict=True):
        pairs = zip(copies, shared, strict=True)
        nbytes += sum(copy.nbytes - rate * (copy.seconds - part) for copy, part in pairs if part)
    return Link(first, second, both=min(max(nbytes / together, first, second), first + second))


def _beside(others: Sequence[Copy]) -> Callable[[Copy], float]:
    """Return a function: for how many seconds others, of which one ran at a time, ran beside a copy."""
    starts, until = [copy.begun for copy in others], [0.0, *accumulate(copy.seconds for copy in others)]

    def before(now: float) -> float:
        count = bisect_right(starts, now)
        return until[count] - max(others[count - 1].ended - now, 0.0) if count else 0.0

    return lambda copy: max(before(copy.ended) - before(copy.begun), 0.0)


def _rate(copies: Sequence[Copy], shared: Sequence[float]) -> float | None:
    """Return the bytes per second of copies in one direction, of those that ran alone if there are such.

    Half of the bytes travelled faster: a copy that found its queue empty waited for the host, too.
    """
    alone = [copy for copy, part in zip(copies, shared, strict=True) if not part] or copies
    rates = sorted((copy.nbytes / copy.seconds, copy.nbytes) for copy in alone if copy.seconds > 0)
    half = sum(nbytes for _, nbytes in rates) / 2
    return next(
        (rate for (rate, _), until in zip(rates, accumulate(n for _, n in rates), strict=True) if until >= half), None
    )


def hook_seconds(sizes: Sequence[Sequence[int]], offloaded: Meter, without: Meter) -> float | None:
    """Return how long the host takes for one tensor that is offloaded, with all that is saved beside it.

    Of the first four groups behind the first that save anything: the first has costs of its own, and later the host may
    wait for the device.
    """
    hooked, plain = offloaded.times().host, without.times().host

    def forward(host: dict[tuple[Kind, int, bool], float], k: int) -> float:
        return host[Kind.FORWARD, k, True] - host[Kind.FORWARD, k, False]

    saving = [k for k in range(1, len(sizes)) if sizes[k]][:4]
    each = [(forward(hooked, k) - forward(plain, k)) / len(sizes[k]) for k in saving]
    return max(median(each), 0.0) if each else None


def layer_costs(
    lean: TimedPass,
    timed: TimedPass,
    memory: TimedPass | None = None,
    compiled: Collection[int] = (),
    allocated: int = 0,
) -> tuple[LayerCost, ...]:
    """Return the cost of each group.

    Parameters
    ----------
    lean : TimedPass
        A pass that offloaded everything that can be.
    timed : TimedPass
        A pass that offloaded nothing, or the best there is.
    memory : TimedPass, optional
        A pass that offloaded nothing and read device memory, if there was one.
    compiled : collection of int
        Groups that are compiled: they save everything at the end of their forward.
    allocated : int
        Bytes that may be allocated before a pass: as much more other memory is there, if it was less before these.

    Notes
    -----
    When storages that were not offloaded are saved and needed is taken from a group that saves as many bytes.  Where
    there is none, they count as needed when backward starts.  A group that has no backward, because its weights and
    inputs need no gradients, takes no time in it.
    """
    assert lean.meter is not None
    assert timed.meter is not None
    sizes, moments = lean.sizes, lean.meter.moments()
    clock, larger = _Clock(timed.meter.times()), lean.larger(timed.elements)
    other = _other_bytes(lean, timed, memory, allocated)
    alike = {tuple(sorted(sizes[k])): k for kind, k in moments if kind is Kind.BACKWARD}
    costs, forward, backward = [], [], []
    for k in range(len(sizes)):
        forward.append(clock.span(Kind.FORWARD, k))
    for k in reversed(range(len(sizes))):
        backward.append(clock.span(Kind.BACKWARD, k))
    for k, (ahead, behind) in enumerate(zip(forward, reversed(backward), strict=True)):
        if k in compiled:
            saved = [Saved(max(round(nbytes * larger), 1)) for nbytes in sizes[k]]
        else:
            like = k if (Kind.BACKWARD, k) in moments else alike.get(tuple(sorted(sizes[k])), k)
            saves, uses = (moments.get((kind, like), ()) for kind in (Kind.FORWARD, Kind.BACKWARD))
            saved = _saved(sizes[like], saves, uses, larger)
        borders = [(kind, k, ends) for kind in (Kind.FORWARD, Kind.BACKWARD) for ends in (False, True)]
        least = min((other[border][0] for border in borders if border in other), default=0)
        levels, temporaries = zip(*(other.get(border, (least, 0)) for border in borders), strict=True)
        costs.append(
            LayerCost(
                ahead.seconds,
                behind.seconds,
                tuple(saved),
                host_forward=ahead.host,
                host_backward=behind.host,
                gap_forward=ahead.gap,
                gap_backward=behind.gap,
                other_bytes=levels,
                gap_forward_temporary=temporaries[0],
                forward_temporary=temporaries[1],
                gap_backward_temporary=temporaries[2],
                backward_temporary=temporaries[3],
                unpacks_at_once=k in compiled,
            )
        )
    return tuple(costs)


def for_inputs(layers: Sequence[LayerCost], factor: float) -> list[LayerCost]:
    """Return costs with times and activations multiplied by a factor, as with so much larger inputs."""

    def scaled(layer: LayerCost) -> LayerCost:
        changes: dict[str, Any] = {name: factor * getattr(layer, name) for name in _TIMES}
        changes |= {name: math.ceil(factor * getattr(layer, name)) for name in _BYTES}
        saved = tuple(replace(each, nbytes=math.ceil(factor * each.nbytes)) for each in layer.saved)
        return replace(layer, saved=saved, **changes)

    return list(map(scaled, layers))


def at_the_pace_of(others: Sequence[LayerCost], layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Return costs with times as they would be in another pass, whose forwards did the same work.

    A device that waits for copies is cooler and computes faster than one that never waits.  If the difference is larger
    than clocks explain, the device had to wait for the host, which says nothing about compute.
    """
    pairs = zip(others, layers, strict=True)
    pace = median([other.forward / layer.forward for other, layer in pairs if layer.forward] or [1.0])
    if abs(pace - 1.0) > CLOCKS:
        pace = 1.0
    return tuple(replace(layer, **{name: pace * getattr(layer, name) for name in _TIMES}) for layer in layers)


def without_hooks(
    costs: Sequence[LayerCost], meter: Meter, kinds: Sequence[Hashable], seconds: float
) -> list[LayerCost]:
    """Return costs of groups that were offloaded, with the time of the host as it is without that.

    A host that waits for copies is late for another reason than its work, so groups of one kind have the median of what
    they took, if that is less; `seconds` of it are for each tensor that was offloaded.
    """
    host = meter.host_seconds()
    alike = defaultdict[tuple[Kind, Hashable], list[float]](list)
    for (kind, k), taken in host.items():
        alike[kind, kinds[k]].append(taken)

    def work(kind: Kind, k: int) -> float:
        own = host.get((kind, k), 0.0)
        return max(min(own, median(alike[kind, kinds[k]] or [own])) - seconds * len(costs[k].saved), 0.0)

    return [
        replace(cost, host_forward=work(Kind.FORWARD, k), host_backward=work(Kind.BACKWARD, k))
        for k, cost in enumerate(costs)
    ]


def steady(costs: Sequence[LayerCost], kinds: Sequence[Hashable]) -> list[LayerCost]:
    """Return costs without interruptions: groups of one kind, if there are three or more, take about as long.

    A pass is measured once, and the program or the system may interrupt it.
    """
    usual = dict[tuple[Hashable, str], float]()
    for kind in set(kinds):
        alike = [cost for cost, of in zip(costs, kinds, strict=True) if of == kind]
        for name in _TIMES:
            usual[kind, name] = median(getattr(cost, name) for cost in alike) if len(alike) >= 3 else inf

    def seconds(k: int, name: str) -> float:
        own: float = getattr(costs[k], name)
        edge = (name, k) in (("gap_forward", 0), ("gap_backward", len(costs) - 1))  # input and loss
        middle = usual[kinds[k], name]
        return own if edge or own <= INTERRUPTED * middle + MOMENT else middle

    return [
        replace(
            cost,
            forward=seconds(k, "forward"),
            backward=seconds(k, "backward"),
            gap_forward=seconds(k, "gap_forward"),
            gap_backward=seconds(k, "gap_backward"),
        )
        for k, cost in enumerate(costs)
    ]


def beside(others: Sequence[LayerCost], layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Return costs as they are where other groups have the costs of another pass, in which they keep less.

    What a group keeps on the device that cannot be offloaded is in the other bytes of all groups behind it.
    """
    found, kept = list[LayerCost](), 0
    for k, (other, layer) in enumerate(zip(others, layers, strict=True)):
        if k + 1 < len(layers):
            more = layers[k + 1].other_bytes[0] - layer.other_bytes[0]
            more -= others[k + 1].other_bytes[0] - other.other_bytes[0]
        else:
            more = (layer.other_bytes[1] - layer.other_bytes[0]) - (other.other_bytes[1] - other.other_bytes[0])
        more = max(more, 0)
        start, end, again, last = layer.other_bytes
        forward = max(start - kept, 0), max(end - kept - more, 0)
        backward = max(again - kept - more, 0), max(last - kept, 0)
        found.append(replace(layer, kept_bytes=more, other_bytes=(*forward, *backward)))
        kept += more
    return tuple(found)


def _scaled(sizes: Sequence[Sequence[int]], factor: float) -> list[list[int]]:
    return [[round(nbytes * factor) for nbytes in of_group] for of_group in sizes]


_Bytes: TypeAlias = dict[tuple[Kind, int, bool], tuple[int, int]]
"""By border: the bytes that are no activations, and those that were allocated for a time before it."""


def _other_bytes(lean: TimedPass, timed: TimedPass, memory: TimedPass | None, allocated: int) -> _Bytes:
    """Return what is known from a pass that read device memory: `memory`, which offloaded nothing, if there is one."""
    found: _Bytes = {}
    of_pass = lean if memory is None else memory
    assert of_pass.meter is not None
    sizes, larger = _scaled(lean.sizes, lean.larger(of_pass.elements)), of_pass.larger(timed.elements)
    more = 0
    if allocated > of_pass.meter.allocated_before:  # [guard: gradients before some passes only]
        more = allocated - of_pass.meter.allocated_before
    for of in of_pass.meter.borders:
        other = of.other_bytes if memory is None else max(of.allocated - of.activations(sizes), 0)
        found[of.kind, of.layer, of.ends] = other + more, round(of.temporary * larger)
    return found


def _saved(
    sizes: Sequence[int], saves: Iterable[tuple[int, float]], uses: Iterable[tuple[int, float]], larger: float
) -> list[Saved]:
    """Return the storages of a group with the moments at which they are saved and needed.

    Storages are told apart by their sizes; of equal ones backward needs the one first that was saved last.
    """
    saved_at, needed_at = defaultdict[int, deque[float]](deque), defaultdict[int, deque[float]](deque)
    for found, moments in (saved_at, saves), (needed_at, uses):
        for nbytes, moment in moments:
            found[nbytes].append(moment)
    at = [saved_at[n].popleft() if saved_at[n] else (j + 1) / len(sizes) for j, n in enumerate(sizes)]
    saved = [
        Saved(max(round(n * larger), 1), moment, needed_at[n].popleft() if needed_at[n] else 0.0)
        for n, moment in zip(reversed(sizes), reversed(at), strict=True)
    ]
    saved.reverse()
    return sorted(saved, key=lambda each: each.saved_at)


@dataclass(frozen=True, slots=True)
class _Span:
    seconds: float  # of the device
    gap: float  # of the device, before it
    host: float  # seconds of the host for both, beyond the lead that it had


class _Clock:
    """Goes through the borders in order."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._at = 0.0  # of the device
        self._host = 0.0  # of the host, never before the device began

    def span(self, kind: Kind, layer: int) -> _Span:
        device, ends = self._times.device, (kind, layer, True)
        if ends not in device:
            return _Span(0.0, 0.0, 0.0)
        start, end, host = device[kind, layer, False], device[ends], max(self._times.host[ends], self._host)
        found = _Span(max(end - start, 0.0), max(start - self._at, 0.0), host - self._host)
        self._at, self._host = max(end, self._at), host
        return found
