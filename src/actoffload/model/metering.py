"""Time passes of a model, measure one by group, and turn that into the costs that the planner takes.

`[Note: clocks]`  The device runs behind the host by an unknown and changing time, which decides whether hooks cost
anything: where it is long, the host may be late without the device noticing.  It is found without a synchronization.
At each border of a group the host asks which of the earlier borders the device has passed.  Each answer bounds the
difference between the two clocks, and the bounds of a step leave little between them.
"""

from __future__ import annotations

import enum
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

import torch

from .._torch import after_backward
from ..device.base import Backend, Stream, StreamEvent
from ..engine.model_pass import ModelPass
from ..engine.passes import Pass
from ..engine.recorder import TimelineRecorder
from ..engine.reload import Residency
from ..engine.statistics import Counters
from ..schedule.costs import LayerCost, Link, Saved
from ..schedule.execution_order import GroupKey
from ..schedule.timeline import Kind

__all__ = ["Border", "Meter", "Stage", "TimedPass", "Times", "hook_seconds", "layer_costs", "measured_link"]


class Stage(enum.Enum):
    """What a pass is for."""

    FIRST = "everything is offloaded, to warm up"
    LEAN = "everything is offloaded, measured by group"
    WARM = "nothing is offloaded, to warm up"
    BARE = "nothing is offloaded, measured by group"
    NONE = "nothing is offloaded, timed"
    PLAN = "the plan, timed"


@dataclass(frozen=True, slots=True)
class Border:
    """The start or the end of a group's forward or backward, as the host came to it."""

    kind: Kind
    layer: int
    ends: bool
    event: StreamEvent
    host: float  # seconds, without those that measuring took
    allocated: int  # bytes of device memory; 0 if not known
    other_bytes: int  # the part of it that is no activation which can be offloaded


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the first border of the step, of the device and of the host, for each border of a group.

    Those of the device are without stalls: what it would take if no copy were waited for.
    """

    device: dict[tuple[Kind, int, bool], float]
    host: dict[tuple[Kind, int, bool], float]


class Meter(TimelineRecorder):
    """Records borders of groups and copies of one step, at a cost of some microseconds each.

    Parameters
    ----------
    memory : bool
        Also read how much device memory is allocated at each border, which takes longer.
    """

    levels = False

    def __init__(self, backend: Backend, counters: Counters, *, memory: bool) -> None:
        super().__init__(backend, counters)
        self._memory = memory
        self._passed = 0  # borders that the device is known to have passed
        self._least, self._most = float("-inf"), float("inf")  # difference of the clocks
        self.borders: list[Border] = []
        self._recorded: list[tuple[Kind, StreamEvent, StreamEvent, int]] = []
        self._noted: set[tuple[Kind, int, bool]] = set()
        self._answers: list[tuple[int, float]] = []
        self._owner: weakref.ref[Pass] | None = None  # which refers to this meter
        self._thread = threading.get_ident()  # that runs the forward
        self._spent = 0.0  # seconds of the host in here

    def begin(self, owner: object, kind: Kind, layer: int) -> None:
        """Note the start of a group's forward or first backward."""
        self._note(owner, kind, layer, ends=False)

    def finish(self, owner: object, kind: Kind, layer: int) -> None:
        """Note the end of a group's forward or first backward, where it is noted first."""
        self._note(owner, kind, layer, ends=True)

    def level(self) -> None:
        """Do nothing: resident bytes are read at the borders."""

    @contextmanager
    def span(self, kind: Kind, layer: int, stream: Stream, nbytes: int) -> Iterator[None]:
        """Record a copy or a stall as one span."""
        now = self._backend.host_time()
        begun = self._backend.record_timed(stream)
        self._spent += self._backend.host_time() - now
        yield
        now = self._backend.host_time()
        self._recorded.append((kind, begun, self._backend.record_timed(stream), nbytes))
        self._spent += self._backend.host_time() - now

    def _note(self, owner: object, kind: Kind, layer: int, *, ends: bool) -> None:
        if not isinstance(owner, Pass):
            return
        if self._owner is None and threading.get_ident() == self._thread:  # of the threads that run the model
            self._owner = weakref.ref(owner)
        border = kind, layer, ends
        if self._owner is None or owner is not self._owner() or border in self._noted:
            return
        if ends and (kind, layer, False) not in self._noted:  # [guard: end without a start]
            return
        self._noted.add(border)
        event = self._backend.record_timed(_current(self._backend))
        now, borders = self._backend.host_time(), self.borders
        host = now - self._spent
        allocated = (self._backend.allocated() or 0) if self._memory else 0
        other = max(allocated - _on_device(owner), 0) if allocated else 0
        borders.append(Border(kind, layer, ends, event, host, allocated, other))
        while self._passed < len(borders) and self._backend.passed(borders[self._passed].event):
            self._passed += 1
        self._answers.append((self._passed, now))
        self._spent += self._backend.host_time() - now

    def times(self) -> Times:
        """Return the times of the borders; see [Note: clocks]."""
        borders = self.borders
        device = [self._backend.elapsed(borders[0].event, border.event) for border in borders]
        # The clock of the host minus that of the device lies between these bounds.
        most = min((now - device[passed - 1] for passed, now in self._answers if passed), default=borders[0].host)
        least = max((now - device[k] for k, now in self._answers if k < len(borders)), default=most)
        shift = max(most, least)
        keys = [(border.kind, border.layer, border.ends) for border in borders]
        host = [border.host - shift for border in borders]
        stalled = self._stalls()
        computing = [seconds - stalled(seconds) for seconds in device]
        return Times(dict(zip(keys, computing, strict=True)), dict(zip(keys, host, strict=True)))

    def _stalls(self) -> Callable[[float], float]:
        """Return a function: for how many seconds compute had stalled at a time since the first border."""
        first, elapsed = self.borders[0].event, self._backend.elapsed
        stalls = [
            (elapsed(first, end), elapsed(begun, end)) for of, begun, end, _ in self._recorded if of is Kind.STALL
        ]
        stalls = sorted((end, seconds) for end, seconds in stalls if seconds > self._backend.resolution and end > 0)
        ends, until = [end for end, _ in stalls], [0.0, *accumulate(seconds for _, seconds in stalls)]
        return lambda now: until[bisect_right(ends, now)]

    def rate(self, kind: Kind) -> float | None:
        """Return the bytes per second of the copies in one direction, as they ran; None without copies."""
        copies = [
            (self._backend.elapsed(begun, end), nbytes) for of, begun, end, nbytes in self._recorded if of is kind
        ]
        seconds = sum(each for each, _ in copies)
        return sum(nbytes for _, nbytes in copies) / seconds if seconds > 0 else None


def _on_device(owner: Pass) -> int:
    """Return the bytes of the saved activations of a pass that are on the device and can be offloaded."""
    residents = {resident for layer in owner.layers for ref in layer.residents if (resident := ref())}
    saved = sum(resident.nbytes for resident in residents)
    for layer in owner.layers:
        for storage in layer.living():
            if max(storage.layers) == layer.index and storage.residency is not Residency.HOST:
                saved += storage.nbytes
    return saved


@dataclass(eq=False)
class TimedPass:
    """One pass of the model: what it was for, when it began and ended, and what it saved."""

    stage: Stage
    number: int  # of the pass, from 1
    elements: int  # of the inputs
    begun: StreamEvent
    ended: StreamEvent | None = None
    meter: Meter | None = None
    sequence: tuple[GroupKey, ...] = ()
    sizes: list[tuple[int, ...]] = field(default_factory=list)  # by group: bytes of the storages that it saves
    adopted: int = 0  # bytes saved between the groups and offloaded with one
    peak: int = 0  # largest number of bytes allocated until its end, since the program last reset it
    waiting: int = 0  # earlier passes whose backward is still to come

    @staticmethod
    def begin(stage: Stage, number: int, elements: int, backend: Backend) -> TimedPass:
        """Return a pass that begins now."""
        return TimedPass(stage, number, elements, backend.record_timed(_current(backend)))

    def watch(self, backend: Backend, outputs: Iterable[torch.Tensor]) -> None:
        """Note the end of the first backward that comes to one of the outputs."""

        def ended() -> None:
            if self.ended is None and not backend.capturing():
                self.peak = backend.peak_allocated() or 0
                self.ended = backend.record_timed(_current(backend))

        def reached(_: Any) -> None:
            after_backward(ended)

        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(reached)

    def saw(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take what the groups saved in the forward; storages count in the last group that saved them."""
        if self.sequence:
            return
        self.sequence, self.adopted = tuple(sequence), done.adopted
        counted = set[object]()
        for layer in done.layers:
            residents = {resident for ref in layer.residents if (resident := ref())} - counted
            counted |= residents
            own = [storage.nbytes for storage in layer.living() if max(storage.layers) == layer.index]
            self.sizes.append((*own, *(resident.nbytes for resident in residents)))

    def wait(self, backend: Backend) -> None:
        """Wait until the device has run it."""
        if self.ended is not None and not backend.passed(self.ended):
            backend.synchronize(backend.current_device())

    def seconds(self, backend: Backend) -> float:
        """Return how long the device took from the start of its forward to the end of its backward."""
        assert self.ended is not None
        return backend.elapsed(self.begun, self.ended)

    def pace(self, backend: Backend) -> float:
        """Return the seconds for each element of the inputs, whose number may differ from pass to pass."""
        return self.seconds(backend) / max(self.elements, 1)

    @property
    def between(self) -> int:
        """The most bytes allocated for a time between two of its borders, or more if the peak lay outside of it."""
        assert self.meter is not None
        return max(self.peak - max((border.allocated for border in self.meter.borders), default=0), 0)

    def levels(self) -> list[int]:
        """Return the bytes on the device at its borders if nothing were offloaded."""
        assert self.meter is not None
        until = [0]
        for sizes in self.sizes:
            until.append(until[-1] + sum(sizes))
        first_in = {(Kind.FORWARD, False): 0, (Kind.FORWARD, True): 1, (Kind.BACKWARD, False): 1}
        return [
            border.other_bytes + until[border.layer + first_in.get((border.kind, border.ends), 0)]
            for border in self.meter.borders
        ]


def _current(backend: Backend) -> Stream:
    return backend.current_stream(backend.current_device())


def measured_link(meter: Meter) -> Link | None:
    """Return the link with the rates of the copies in a step, as they ran; None if a direction had none."""
    out, back = meter.rate(Kind.D2H), meter.rate(Kind.H2D)
    return None if out is None or back is None else Link(out, back)


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
    sizes: Sequence[Sequence[int]],
    timed: Meter,
    memory: Meter,
    temporary: int = 0,
    compiled: Collection[int] = (),
) -> tuple[LayerCost, ...]:
    """Return the cost of each group.

    Parameters
    ----------
    sizes : sequence of sequences of int
        Bytes of the storages that each group saves and that can be offloaded, in order of saving.
    timed : Meter
        A step in which nothing was offloaded, or the best there is.
    memory : Meter
        A step in which device memory was read.
    temporary : int
        Bytes by which the peak between two borders is higher than at the borders.
    compiled : collection of int
        Groups that are compiled: they save everything at the end of their forward.

    Notes
    -----
    When backward needs each tensor of a group is not known.  All count as needed when it starts.  A group that has no
    backward, because its weights and inputs need no gradients, takes no time in it.
    """
    times = timed.times()
    other = {(border.kind, border.layer, border.ends): border.other_bytes for border in memory.borders}
    clock = _Clock(times)
    costs, forward, backward = [], [], []
    for k in range(len(sizes)):
        forward.append(clock.span(Kind.FORWARD, k))
    for k in reversed(range(len(sizes))):
        backward.append(clock.span(Kind.BACKWARD, k))
    for k, (ahead, behind) in enumerate(zip(forward, reversed(backward), strict=True)):
        count = len(sizes[k])
        saved = [Saved(n, 1.0 if k in compiled else (j + 1) / count) for j, n in enumerate(sizes[k])]
        borders = [(kind, k, ends) for kind in (Kind.FORWARD, Kind.BACKWARD) for ends in (False, True)]
        least = min((other[border] for border in borders if border in other), default=0)
        levels: Any = tuple(other.get(border, least) for border in borders)
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
                forward_temporary=temporary,
                backward_temporary=temporary,
                unpacks_at_once=k in compiled,
            )
        )
    return tuple(costs)


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
