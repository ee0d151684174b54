"""Time passes of a model, and measure one by group.

`[Note: clocks]`  The device runs behind the host by an unknown and changing time, which decides whether hooks cost
anything: where it is long, the host may be late without the device noticing.  It is found without a synchronization.
At each border of a group the host asks which of the earlier borders the device has passed.  Each answer bounds the
difference between the two clocks, and the bounds of a step leave little between them.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch.nn import Module

from ...device.base import Backend, Stream, StreamEvent, current_stream
from ...engine.layer import Layer
from ...engine.passes import Pass
from ...engine.statistics import Counters, TimelineRecorder
from ...engine.storage import Residency, SavedStorage
from ...schedule.timeline import Kind

__all__ = ["SHARERS", "Border", "Copy", "Meter", "Times", "counts_in"]

SHARERS = 2
"""Number of groups with which a storage may be saved and still count in one of them."""


@dataclass(frozen=True, slots=True)
class Border:
    """The start or the end of a group's forward or backward, as the host came to it."""

    kind: Kind
    layer: int
    ends: bool
    event: StreamEvent
    host: float  # seconds, without those that measuring took
    allocated: int = 0  # bytes of device memory; 0 if not known
    temporary: int = 0  # bytes allocated for a time since the border before, on top of what is allocated at both
    other_bytes: int = 0  # the part of `allocated` that is no activation which can be offloaded
    gradients: int = 0  # bytes of the groups' gradients that were not there before the pass

    def activations(self, sizes: Sequence[Sequence[int]]) -> int:
        """Return the bytes of activations on the device, if each group saves storages of these sizes and keeps them."""
        until = self.layer + ((self.kind, self.ends) in ((Kind.FORWARD, True), (Kind.BACKWARD, False)))
        return sum(map(sum, sizes[:until]))


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the first border of the step, of the device and of the host, for each border of a group.

    They are without stalls: what it would take if no copy were waited for.
    """

    device: dict[tuple[Kind, int, bool], float]
    host: dict[tuple[Kind, int, bool], float]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A copy, or a wait for one, between two events of its stream."""

    kind: Kind
    layer: int
    at: StreamEvent  # of compute, where it was queued
    begun: StreamEvent
    ended: StreamEvent
    nbytes: int


class Copy(NamedTuple):
    """When a copy ran, in seconds since the first border of the step, and its bytes."""

    begun: float
    ended: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun


class Meter(TimelineRecorder):
    """Records borders of groups and copies of one step, at a cost of some microseconds each.

    Parameters
    ----------
    memory : bool
        Also read how much device memory is allocated at each border, which takes longer.
    modules : iterable of Module
        Whose gradients are counted at each border.
    """

    levels = False

    def __init__(self, backend: Backend, counters: Counters, *, memory: bool, modules: Iterable[Module] = ()) -> None:
        super().__init__(backend, counters)
        self._memory = memory
        # Weights that are referred to weakly could not be swapped.
        self._modules = [weakref.ref(module) for module in modules if module._parameters]
        self._gradients = self._gradient_bytes()  # before the pass
        self._between = True  # no group runs
        self._temporary = 0
        self._allocated = self.allocated_before = self._sample()[0]
        self._passed = 0  # borders that the device is known to have passed
        self._least, self._most = float("-inf"), float("inf")  # difference of the clocks
        self.borders: list[Border] = []
        self._transfers: list[_Transfer] = []
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

    def before_actions(self) -> None:
        """Note the memory that an event of the plan finds."""
        self.level()

    def level(self) -> None:
        """Note the memory that an action leaves: what it frees or allocates between groups is nothing temporary."""
        if self._between:
            self._take_memory()

    @contextmanager
    def span(self, kind: Kind, layer: int, stream: Stream, nbytes: int) -> Iterator[None]:
        """Record a copy or a stall as one span."""
        backend = self._backend
        now = backend.host_time()
        begun = backend.record_timed(stream)
        at = backend.record_timed(current_stream(backend)) if kind is Kind.D2H else begun
        self._spent += backend.host_time() - now
        yield
        now = backend.host_time()
        self._transfers.append(_Transfer(kind, layer, at, begun, backend.record_timed(stream), nbytes))
        self._spent += backend.host_time() - now

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
        event = self._backend.record_timed(current_stream(self._backend))
        now, borders = self._backend.host_time(), self.borders
        host = now - self._spent
        self._take_memory()
        allocated, temporary = self._allocated, self._temporary
        self._between, self._temporary = ends, 0
        other = max(allocated - _on_device(owner), 0) if allocated else 0
        gradients = max(self._gradient_bytes() - self._gradients, 0)
        borders.append(Border(kind, layer, ends, event, host, allocated, temporary, other, gradients))
        while self._passed < len(borders) and self._backend.passed(borders[self._passed].event):
            self._passed += 1
        self._answers.append((self._passed, now))
        self._spent += self._backend.host_time() - now

    def _sample(self) -> tuple[int, int]:
        """Return the bytes of device memory that are allocated, and the most since this was called before."""
        return (self._backend.allocated() if self._memory else None) or (0, 0)

    def _take_memory(self) -> None:
        now, peak = self._sample()
        self._temporary = max(self._temporary, peak - max(self._allocated, now))
        self._allocated = now

    def _gradient_bytes(self) -> int:
        modules = [module for ref in self._modules if (module := ref()) is not None]
        weights = {weight for module in modules for weight in module._parameters.values() if weight is not None}
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        return sum(getattr(gradient, "_local_tensor", gradient).nbytes for gradient in gradients)  # that of a DTensor

    def passed(self) -> bool:
        """Return whether the device has passed all borders and copies, so that they may be read."""
        events = [*(border.event for border in self.borders), *(of.ended for of in self._transfers)]
        return all(map(self._backend.passed, reversed(events)))

    def times(self) -> Times:
        """Return the times of the borders; see [Note: clocks]."""
        borders = self.borders
        device = [self._backend.elapsed(borders[0].event, border.event) for border in borders]
        # The clock of the host minus that of the device lies between these bounds.
        most = min((now - device[passed - 1] for passed, now in self._answers if passed), default=borders[0].host)
        least = max((now - device[k] for k, now in self._answers if k < len(borders)), default=most)
        shift = max(most, least)
        keys = [(border.kind, border.layer, border.ends) for border in borders]
        stalled = self._stalls()
        host = [border.host - shift for border in borders]
        # A host that is far ahead waits until the device has room for more work, and so for its stalls too.
        host = [seconds - stalled(seconds) for seconds in host]
        computing = [seconds - stalled(seconds) for seconds in device]
        return Times(dict(zip(keys, computing, strict=True)), dict(zip(keys, host, strict=True)))

    def host_seconds(self) -> dict[tuple[Kind, int], float]:
        """Return for how long the host queued the forward and the backward of each group, also while it waited."""
        at = {(border.kind, border.layer, border.ends): border.host for border in self.borders}
        return {(k, n): host - at[k, n, False] for (k, n, ends), host in at.items() if ends and (k, n, False) in at}

    def _stalls(self) -> Callable[[float], float]:
        """Return a function: for how many seconds compute had stalled at a time since the first border."""
        first, elapsed = self.borders[0].event, self._backend.elapsed
        waits = [of for of in self._transfers if of.kind is Kind.STALL]
        stalls = [(elapsed(first, of.ended), elapsed(of.begun, of.ended)) for of in waits]
        stalls = sorted((end, seconds) for end, seconds in stalls if seconds > self._backend.resolution and end > 0)
        ends, until = [end for end, _ in stalls], [0.0, *accumulate(seconds for _, seconds in stalls)]
        return lambda now: until[bisect_right(ends, now)]

    def copies(self, kind: Kind) -> list[Copy]:
        """Return the copies in one direction, in the order in which they ran."""
        elapsed, first = self._backend.elapsed, self.borders[0].event
        found = [of for of in self._transfers if of.kind is kind]
        return sorted(Copy(elapsed(first, of.begun), elapsed(first, of.ended), of.nbytes) for of in found)

    def moments(self) -> dict[tuple[Kind, int], list[tuple[int, float]]]:
        """Return when storages were saved in the forward, and first used in the backward, of each group.

        Each has its bytes, and the moment as a fraction of the group's compute time.
        """
        device, stalled = self.times().device, self._stalls()
        found: dict[tuple[Kind, int], list[tuple[int, float]]] = {}
        for of in self._transfers:
            kind = {Kind.D2H: Kind.FORWARD, Kind.STALL: Kind.BACKWARD}.get(of.kind)
            if kind is None or not of.nbytes or (kind, of.layer, True) not in device:
                continue
            start, end = device[kind, of.layer, False], device[kind, of.layer, True]
            now = self._backend.elapsed(self.borders[0].event, of.at)
            part = (now - stalled(now) - start) / (end - start) if end > start else 0.0
            found.setdefault((kind, of.layer), []).append((of.nbytes, min(max(part, 0.0), 1.0)))
        return found


def _on_device(owner: Pass) -> int:
    """Return the bytes of the saved activations of a pass that are on the device and can be offloaded."""
    residents = {resident for layer in owner.layers for ref in layer.residents if (resident := ref())}
    saved = sum(resident.nbytes for resident in residents)
    for layer in owner.layers:
        for storage in layer.living():
            if counts_in(storage, layer) and storage.residency is not Residency.HOST:
                saved += storage.nbytes
    return saved


def counts_in(storage: SavedStorage, layer: Layer) -> bool:
    """Return whether a storage counts in a layer: in the last one that saved it, unless more than `SHARERS` did.

    What many save, such as the angles of rotary embeddings, is on the device from the first of them to the first.
    """
    return max(storage.layers) == layer.index and len(storage.layers) <= SHARERS
