"""Time passes of a model, one at a time, and measure one by group."""

from __future__ import annotations

import enum
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ..._torch.autograd import after_backward
from ..._torch.modules import opaque
from ...device.base import Backend, Stream, StreamEvent, current_stream
from ...engine.engine import Engine
from ...engine.layer import Layer
from ...engine.passes import ModelPass, Pass
from ...engine.statistics import Counters, Reason, TimelineRecorder
from ...engine.storage import Residency, SavedStorage
from ...schedule.execution_order import GroupKey
from ...schedule.timeline import Kind
from ..follow import FollowedModule
from ..replays import OperatorTimes

__all__ = [
    "LEAN",
    "SHARERS",
    "Border",
    "Copy",
    "Meter",
    "PassTimer",
    "Peak",
    "Stage",
    "TimedPass",
    "count_elements",
    "counts_in",
]


FIRST, LONGEST = 0.02, 0.1
"""Seconds for which the device is kept busy before a measured pass, and at most before one of its other groups."""
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
    keeps_busy = True  # the device, where events would measure the host

    def __init__(self, backend: Backend, counters: Counters, *, memory: bool, modules: Iterable[Module] = ()) -> None:
        super().__init__(backend, counters)
        self._memory = memory
        # Weights that are referred to weakly could not be swapped.
        self._modules = [weakref.ref(module) for module in modules if module._parameters]
        self._gradients = self._gradient_bytes()  # before the pass
        self._between = True  # no group runs
        self._temporary = 0
        self._allocated = self.allocated_before = self._sample()[0]
        self.borders: list[Border] = []
        self._transfers: list[_Transfer] = []
        self._noted: set[tuple[Kind, int, bool]] = set()
        self._owner: weakref.ref[Pass] | None = None  # which refers to this meter
        self._thread = threading.get_ident()  # that runs the forward
        self._spent = 0.0  # seconds of the host in here
        self._start: tuple[StreamEvent, float] | None = None  # of the latest group, on the device and on the host

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
        if not ends and self.keeps_busy:
            self._let_host_ahead(layer)
        event = self._backend.record_timed(current_stream(self._backend))
        now = self._backend.host_time()
        host = now - self._spent
        self._take_memory()
        allocated, temporary = self._allocated, self._temporary
        self._between, self._temporary = ends, 0
        other = max(allocated - _on_device(owner), 0) if allocated else 0
        # Forwards make none, and it takes long.
        gradients = max(self._gradient_bytes() - self._gradients, 0) if kind is Kind.BACKWARD else 0
        self.borders.append(Border(kind, layer, ends, event, host, allocated, temporary, other, gradients))
        self._spent += self._backend.host_time() - now

    def _let_host_ahead(self, layer: int) -> None:
        """Keep the device busy before a group while the host queues it, unless it is behind by a group already."""
        backend, now = self._backend, self._backend.host_time()
        stream = current_stream(backend)
        begun = ended = backend.record_timed(stream)
        if self._start is not None and backend.passed(self._start[0]):
            backend.occupy(min(2 * (now - self._start[1]), LONGEST))
            ended = backend.record_timed(stream)
            self._transfers.append(_Transfer(Kind.STALL, layer, begun, begun, ended, 0))
        self._start = ended, now

    def _sample(self) -> tuple[int, int]:
        """Return the bytes of device memory that are allocated, and the most since this was called before."""
        return (self._backend.allocated() if self._memory else None) or (0, 0)

    def _take_memory(self) -> None:
        now, peak = self._sample()
        self._temporary = max(self._temporary, peak - max(self._allocated, now))
        self._allocated = now

    def _gradient_bytes(self) -> int:
        modules = [module for ref in self._modules if (module := ref()) is not None]
        # A weight that `functional_call` puts there is no leaf, and asking for its gradient would warn.
        weights = {weight for module in modules for weight in module._parameters.values() if weight is not None}
        weights = {weight for weight in weights if weight.is_leaf}
        gradients = [getattr(weight.grad, "_local_tensor", weight.grad) for weight in weights]  # of a DTensor its own
        return sum(each.nbytes for each in gradients if each is not None and each.layout is torch.strided)

    def passed(self) -> bool:
        """Return whether the device has passed all borders and copies, so that they may be read."""
        events = [*(border.event for border in self.borders), *(transfer.ended for transfer in self._transfers)]
        return all(map(self._backend.passed, reversed(events)))

    def times(self) -> dict[tuple[Kind, int, bool], float]:
        """Return the seconds of the device until each border, as if no copy had been waited for."""
        stalled, first = self._stalls(), self.borders[0].event
        at = {(each.kind, each.layer, each.ends): self._backend.elapsed(first, each.event) for each in self.borders}
        return {border: seconds - stalled(seconds) for border, seconds in at.items()}

    def host_seconds(self) -> dict[tuple[Kind, int], float]:
        """Return for how long the host queued the forward and the backward of each group, also while it waited."""
        at = {(border.kind, border.layer, border.ends): border.host for border in self.borders}
        return {(k, n): host - at[k, n, False] for (k, n, ends), host in at.items() if ends and (k, n, False) in at}

    def _stalls(self) -> Callable[[float], float]:
        """Return a function: for how many seconds compute had stalled at a time since the first border."""
        first, elapsed = self.borders[0].event, self._backend.elapsed
        waits = [transfer for transfer in self._transfers if transfer.kind is Kind.STALL]
        stalls = [(elapsed(first, transfer.ended), elapsed(transfer.begun, transfer.ended)) for transfer in waits]
        stalls = sorted((end, seconds) for end, seconds in stalls if seconds > self._backend.resolution and end > 0)
        ends, until = [end for end, _ in stalls], [0.0, *accumulate(seconds for _, seconds in stalls)]
        return lambda now: until[bisect_right(ends, now)]

    def copies(self, kind: Kind) -> list[Copy]:
        """Return the copies in one direction, in the order in which they ran."""
        elapsed, first = self._backend.elapsed, self.borders[0].event
        found = [transfer for transfer in self._transfers if transfer.kind is kind]
        return sorted(
            Copy(elapsed(first, transfer.begun), elapsed(first, transfer.ended), transfer.nbytes) for transfer in found
        )

    def moments(self) -> dict[tuple[Kind, int], list[tuple[int, float]]]:
        """Return when storages were saved in the forward, and first used in the backward, of each group.

        Each has its bytes, and the moment as a fraction of the group's compute time.
        """
        device, stalled = self.times(), self._stalls()
        found: dict[tuple[Kind, int], list[tuple[int, float]]] = {}
        for transfer in self._transfers:
            kind = {Kind.D2H: Kind.FORWARD, Kind.STALL: Kind.BACKWARD}.get(transfer.kind)
            if kind is None or not transfer.nbytes or (kind, transfer.layer, True) not in device:
                continue
            start, end = device[kind, transfer.layer, False], device[kind, transfer.layer, True]
            now = self._backend.elapsed(self.borders[0].event, transfer.at)
            part = (now - stalled(now) - start) / (end - start) if end > start else 0.0
            found.setdefault((kind, transfer.layer), []).append((transfer.nbytes, min(max(part, 0.0), 1.0)))
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


class Stage(enum.Enum):
    """What a pass is for."""

    FIRST = "everything is replayed and offloaded: groups are traced and proven, and their operators timed"
    PLAIN = "the same, for groups that were not traced; one compiled group of each kind is not run again"
    LEAN = "everything is replayed and offloaded, measured by group"
    BARE = "everything is kept, to know the peak"
    PLAN = "the plan, timed"


LEAN = (Stage.FIRST, Stage.PLAIN, Stage.LEAN)  # everything is replayed and offloaded
MEASURED = (Stage.PLAIN, Stage.LEAN)  # by group
TRACED = (Stage.FIRST, Stage.PLAIN)


class Peak(NamedTuple):
    """The peak of device memory in a pass, in bytes, with the elements of its inputs and the bytes allocated before."""

    nbytes: int = 0
    elements: int = 0
    allocated: int = 0

    def at(self, elements: int, allocated: int = 0) -> int:
        """Return the most that a pass takes with as many elements, and so much allocated before it.

        Memory above `allocated` grows with the inputs, as activations do.  It is not scaled down for smaller ones.
        """
        inside = self.nbytes - self.allocated
        if elements > self.elements > 0:  # [guard: inputs that are larger than those of a peak]
            inside = -(-inside * elements // self.elements)
        return max(self.allocated, allocated) + inside

    def scaled_to(self, elements: int) -> Peak:
        """Return the peak of a pass with as many elements, or with those of this one if they are more."""
        return Peak(self.at(elements), max(elements, self.elements), self.allocated)


@dataclass(eq=False)
class TimedPass:
    """One pass of the model: what it was for, when it began and ended, and what it saved."""

    stage: Stage
    number: int  # of the pass, from 1
    elements: int  # of the inputs
    begun: StreamEvent
    tokens: int = 0  # elements of the largest of the inputs
    ended: StreamEvent | None = None
    meter: Meter | None = None
    sequence: tuple[GroupKey, ...] = ()
    sizes: list[tuple[int, ...]] = field(default_factory=list)  # by group: bytes of the storages that it saves
    adopted: int = 0  # bytes saved between the groups and offloaded with one
    shared: int = 0  # bytes that many groups save
    refused: int = 0  # saved tensors for which there was no host memory
    waiting: int = 0  # earlier passes whose backward is still to come
    operators: OperatorTimes | None = None  # of the groups that are recomputed
    memory: bool = False  # its peak is read
    allocated: int = 0  # bytes of device memory before it, if its peak is read
    peak: int = 0  # bytes of device memory, from its begin to the end of its backward; 0 if not known

    @staticmethod
    def begin(
        stage: Stage, number: int, inputs: Sequence[torch.Tensor], backend: Backend, *, memory: bool = False
    ) -> TimedPass:
        """Return a pass that begins now; `memory`: its peak is read, which takes longer."""
        allocated = (backend.allocated() or (0, 0))[0] if memory else 0
        begun, elements = backend.record_timed(current_stream(backend)), count_elements(inputs)
        return TimedPass(stage, number, elements, begun, count_tokens(inputs), memory=memory, allocated=allocated)

    def watch(self, backend: Backend, outputs: Iterable[torch.Tensor]) -> None:
        """Note the end of the first backward that comes to one of the outputs."""

        def ended() -> None:
            if self.ended is None and not backend.capturing():
                self.ended = backend.record_timed(current_stream(backend))
                if self.memory:
                    self.peak = (backend.allocated() or (0, 0))[1]

        def reached(_: Any) -> None:
            after_backward(ended)

        opaque(reached)
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(reached)

    def saw(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take what the groups saved in the forward."""
        if self.sequence:
            return
        self.sequence, self.adopted = tuple(sequence), done.adopted
        counted, shared = set[object](), dict[object, int]()
        for layer in done.layers:
            residents = {resident: None for ref in layer.residents if (resident := ref()) and resident not in counted}
            counted.update(residents)
            living = list(layer.living())
            own = [storage.nbytes for storage in living if counts_in(storage, layer)]
            self.sizes.append((*own, *(resident.nbytes for resident in residents)))
            shared |= {storage: storage.nbytes for storage in living if len(storage.layers) > SHARERS}
        self.shared = sum(shared.values())

    def wait(self, backend: Backend) -> None:
        """Wait until the device has run it, with its copies."""
        if self.ended is None:
            return
        if not backend.passed(self.ended) or (self.meter is not None and not self.meter.passed()):
            backend.synchronize(backend.current_device())

    def seconds(self, backend: Backend) -> float:
        """Return how long the device took from the start of its forward to the end of its backward."""
        assert self.ended is not None
        return backend.elapsed(self.begun, self.ended)

    def outside(self, backend: Backend) -> float:
        """Return the seconds of it before its first group and behind the last one."""
        assert self.meter is not None
        assert self.ended is not None
        borders = self.meter.borders
        return backend.elapsed(self.begun, borders[0].event) + backend.elapsed(borders[-1].event, self.ended)

    def larger(self, elements: int) -> float:
        """Return by how much activations are larger with as many elements of inputs, as far as that is known."""
        return elements / self.elements if elements and self.elements else 1.0

    def peak_at(self, elements: int, allocated: int) -> int:
        """Return its peak as it is with as many elements, and so much allocated before; 0 if it is not known."""
        return Peak(self.peak, self.elements, self.allocated).at(elements, allocated) if self.peak else 0

    def highest(self) -> Peak:
        """Return the peak of device memory in a pass that was measured by group, from its first border on."""
        assert self.meter is not None
        peak = before = 0
        for border in self.meter.borders:
            peak, before = max(peak, max(before, border.allocated) + border.temporary), border.allocated
        return Peak(peak, self.elements, self.meter.allocated_before)


def count_elements(inputs: Iterable[torch.Tensor]) -> int:
    """Return the elements of all inputs."""
    return sum(tensor.numel() for tensor in inputs)


def count_tokens(inputs: Sequence[torch.Tensor]) -> int:
    """Return the elements of the largest input of whole numbers, such as `input_ids`; of any, if there is none."""
    whole = [tensor for tensor in inputs if not tensor.is_floating_point() and tensor.dtype is not torch.bool]
    return max((tensor.numel() for tensor in whole or inputs), default=0)


class PassTimer:
    """Times the passes of a model, and has the one in progress, or the latest.

    Parameters
    ----------
    engine, groups
        Of the model.
    """

    def __init__(self, engine: Engine, groups: Sequence[FollowedModule] = ()) -> None:
        self._engine, self._groups = engine, groups
        self._current: TimedPass | None = None
        self._thread = 0  # that runs its forward
        self._refused = 0  # saved tensors for which there was no host memory, before it

    def begin(self, stage: Stage, number: int, inputs: Sequence[torch.Tensor], *, memory: bool = False) -> TimedPass:
        """Begin a pass, which is measured by group in the first stages; `memory`: its peak is read."""
        backend = self._engine.backend
        self._thread = threading.get_ident()
        if stage in MEASURED:
            backend.occupy(FIRST)
        timed = self._current = TimedPass.begin(stage, number, inputs, backend, memory=memory)
        self._refused = self._engine.counters.kept(Reason.HOST_FULL)
        if stage in MEASURED:
            groups = [module for group in self._groups if (module := group.ref()) is not None]
            parts = dict.fromkeys(part for group in groups for part in group.modules())
            timed.meter = Meter(backend, self._engine.counters, memory=True, modules=parts)
            self._engine.record(timed.meter)
        if stage in TRACED:
            timed.operators = OperatorTimes(backend)
        return timed

    def of_thread(self) -> TimedPass | None:
        """Return the pass whose forward the calling thread runs; None if it is not timed."""
        return self._current if self._thread == threading.get_ident() else None

    def count_refused(self, timed: TimedPass) -> None:
        """Count the tensors that the forward of a pass kept for lack of host memory."""
        timed.refused = self._engine.counters.kept(Reason.HOST_FULL) - self._refused

    def take(self) -> TimedPass | None:
        """Return the pass, which is over, and forget it; None if a step was recorded in the middle of it."""
        timed, recorder = self._current, self._engine.recorder
        self.drop()
        return None if timed is not None and timed.meter is not None and timed.meter is not recorder else timed

    def drop(self) -> None:
        """Forget the pass, and read none of its events."""
        if isinstance(self._engine.recorder, Meter):
            self._engine.record(None)
        self._current = None
