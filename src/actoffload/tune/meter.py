"""Measure the passes of a model or the steps of a schedule: when groups begin and end, how fast copies are, and memory.

`[Note: memory of a step]`  A peak that is compared with the saved tensors at their own peak counts twice what a plan
counts by itself.  So memory is read where groups and computations begin and end.  What is allocated inside of a group
alone is temporary.  From what is allocated at such a border go the saved tensors, the boundaries
of the microbatches in flight, and the gradients of stages that had a backward; the rest is there in the whole step.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import NamedTuple, TypeAlias

import torch
from torch.nn import Module

from ..device.base import Backend, Stream, StreamEvent, current_stream
from ..engine.hooks import SHARERS
from ..engine.layer import Layer
from ..engine.passes import ModelPass, Pass
from ..engine.statistics import Counters, TimelineRecorder
from ..engine.storage import Residency, SavedStorage
from ..schedule.pipeline import Computation, Step
from ..schedule.timeline import Kind

LONGEST = 0.1
"""Seconds for which the device is kept busy at most before a group."""


@dataclass(frozen=True, slots=True)
class Border:
    """The start or the end of a group's forward or backward, as the host came to it."""

    event: StreamEvent
    host: float  # seconds, without those that measuring took
    allocated: int = 0  # bytes of device memory; 0 if not known
    temporary: int = 0  # bytes allocated for a time since the border before, on top of what is allocated at both
    other_bytes: int = 0  # the part of `allocated` that is no activation which can be offloaded
    gradients: int = 0  # bytes of the groups' gradients that were not there before the pass


class Copy(NamedTuple):
    """When a copy ran, in seconds since the first border of the step, and its bytes."""

    begun: float
    ended: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun


PASS = "pass"  # what a model has in place of the steps of a pipeline

Place: TypeAlias = tuple[Hashable, Kind, int, bool]
"""Where a border is: its step, see `Meter.step_of`, forward or backward, the group, and whether that ends there."""
Times: TypeAlias = dict[tuple[Kind, int, bool], float]
"""Seconds until each border of a step."""


class Meter(TimelineRecorder):
    """Records borders of groups and copies, at a cost of some microseconds each.

    With `memory` it also reads how much device memory is allocated at each border, which takes longer.  There it counts
    the gradients of `modules`.
    """

    measures_model = True  # the device is kept busy, where events would measure the host

    def __init__(self, backend: Backend, counters: Counters, *, memory: bool, modules: Iterable[Module] = ()) -> None:
        super().__init__(backend, counters)
        self._memory = memory
        # Weights that are referred to weakly could not be swapped.
        self._modules = [weakref.ref(module) for module in modules if module._parameters]
        self._gradients = self._gradient_bytes()  # before the pass
        self._between = True  # no group runs
        self._temporary = 0
        self._allocated = self.allocated_before = self._sample()[0]
        self.borders: dict[Place, Border] = {}  # in the order in which the host came to them
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

    def level(self, *, outside: bool = False) -> None:
        """Note the memory that an action finds and leaves: what it frees or allocates is nothing temporary.

        What is saved `outside` of groups is memory of what runs there, such as the loss.
        """
        if self._between and not outside:
            self._take_memory()

    @contextmanager
    def span(self, kind: Kind, layer: int, stream: Stream, nbytes: int) -> Iterator[None]:
        """Record a copy or a stall as one span."""
        backend = self._backend
        now = backend.host_time()
        begun = backend.record_timed(stream)
        self._spent += backend.host_time() - now
        yield
        now = backend.host_time()
        self._spans.append((kind, layer, begun, backend.record_timed(stream), nbytes))
        self._spent += backend.host_time() - now

    def step_of(self, owner: Pass) -> Hashable:
        """Return the step that a pass is in, None if it is not measured: the first pass of this thread is."""
        if self._owner is None and threading.get_ident() == self._thread:  # of the threads that run the model
            self._owner = weakref.ref(owner)
        return PASS if self._owner is not None and owner is self._owner() else None

    def _note(self, owner: object, kind: Kind, layer: int, *, ends: bool) -> None:
        if not isinstance(owner, Pass):
            return
        step = self.step_of(owner)
        place = step, kind, layer, ends
        if step is None or place in self.borders:
            return
        if ends and (step, kind, layer, False) not in self.borders:  # [guard: end without a start]
            return
        if not ends and self.measures_model:
            self._let_host_ahead(layer)
        event = self._backend.record_timed(current_stream(self._backend))
        now = self._backend.host_time()
        host = now - self._spent
        self._take_memory()
        allocated, temporary = self._allocated, self._temporary
        self._between, self._temporary = ends, 0
        # Forwards make none, and it takes long.
        gradients = max(self._gradient_bytes() - self._gradients, 0) if kind is Kind.BACKWARD else 0
        other = max(allocated - _on_device(owner), 0) if allocated and self.measures_model else 0
        self.borders[place] = Border(event, host, allocated, temporary, other, gradients)
        self._spent += self._backend.host_time() - now

    def _let_host_ahead(self, layer: int) -> None:
        """Keep the device busy before a group while the host queues it, unless it is behind by a group already."""
        backend, now = self._backend, self._backend.host_time()
        stream = current_stream(backend)
        begun = ended = backend.record_timed(stream)
        if self._start is not None and backend.passed(self._start[0]):
            backend.occupy(min(2 * (now - self._start[1]), LONGEST))
            ended = backend.record_timed(stream)
            self._spans.append((Kind.STALL, layer, begun, ended, 0))
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

    def around(self, layer: int) -> list[Border | None]:
        """Return where the forward and the backward of a group of a model begin and end; None where they do not."""
        kinds = Kind.FORWARD, Kind.BACKWARD
        return [self.borders.get((PASS, kind, layer, ends)) for kind in kinds for ends in (False, True)]

    @property
    def first(self) -> StreamEvent:
        """The first border, from which times count."""
        return next(iter(self.borders.values())).event

    def wait(self) -> None:
        """Wait until the device has passed all borders and copies, so that they may be read."""
        events = [*(border.event for border in self.borders.values()), *(ended for *_, ended, _ in self._spans)]
        if not all(map(self._backend.passed, reversed(events))):
            self._backend.synchronize(self._backend.current_device())

    def times(self) -> dict[Hashable, Times]:
        """Return by step the seconds of the device until each border, as if no copy had been waited for."""
        stalled, found = self._stalls(), dict[Hashable, Times]()
        for (step, kind, layer, ends), border in self.borders.items():
            at = self._backend.elapsed(self.first, border.event)
            found.setdefault(step, {})[kind, layer, ends] = at - stalled(at)
        return found

    def host_spans(self, kind: Kind, groups: Iterable[int]) -> dict[int, Span]:
        """Return for how long the host queued each group of a model, also while it waited, and what lies before it."""
        at = {place[2:]: border.host for place, border in self.borders.items() if place[:2] == (PASS, kind)}
        ran = [k for k in groups if (k, True) in at]
        return spans({(kind, *place): host for place, host in at.items()}, kind, ran, at[ran[0], False]) if ran else {}

    def _stalls(self) -> Callable[[float], float]:
        """Return a function: for how many seconds compute had stalled at a time since the first border."""
        first, elapsed = self.first, self._backend.elapsed
        waits = [(begun, ended) for kind, _, begun, ended, _ in self._spans if kind is Kind.STALL]
        stalls = [(elapsed(first, ended), elapsed(begun, ended)) for begun, ended in waits]
        stalls = sorted((end, seconds) for end, seconds in stalls if seconds > self._backend.resolution and end > 0)
        ends, until = [end for end, _ in stalls], [0.0, *accumulate(seconds for _, seconds in stalls)]
        return lambda now: until[bisect_right(ends, now)]

    def copies(self, kind: Kind) -> list[Copy]:
        """Return the copies in one direction, in the order in which they ran."""
        first, elapsed = self.first, self._backend.elapsed
        return sorted(
            Copy(elapsed(first, begun), elapsed(first, ended), nbytes)
            for copied, _, begun, ended, nbytes in self._spans
            if copied is kind
        )


class Span(NamedTuple):
    """Seconds of the gap before a group, and of the group."""

    gap: float = 0.0
    seconds: float = 0.0


def spans(times: Times, kind: Kind, groups: Iterable[int], now: float) -> dict[int, Span]:
    """Return the time of each group in a forward or a backward that began at some moment, in the order of the groups.

    One that backward never comes to, because nothing in it needs a gradient, has none.
    """
    found = {}
    for k in groups:
        ended = times.get((kind, k, True))
        if ended is None:
            found[k] = Span()
            continue
        begun = times[kind, k, False]
        found[k] = Span(max(begun - now, 0.0), max(ended - begun, 0.0))
        now = max(ended, now)
    return found


def _on_device(owner: Pass) -> int:
    """Return the bytes of the saved activations of a pass that are on the device and can be offloaded."""
    return sum(
        storage.nbytes
        for layer in owner.layers
        for storage in layer.living()
        if _counts_in(storage, layer) and storage.residency is not Residency.HOST
    )


def saved_in(layers: Sequence[Layer]) -> list[tuple[tuple[int, int], ...]]:
    """Return for each layer the place and the bytes of each storage that counts in it."""
    return [
        tuple(
            (place, storage.nbytes)
            for place, ref in enumerate(layer.storages)
            if (storage := ref()) is not None and _counts_in(storage, layer)
        )
        for layer in layers
    ]


def shared_bytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of the storages that more than `SHARERS` layers save, which stay on the device."""
    living = {storage for layer in layers for storage in layer.living()}
    return sum(storage.nbytes for storage in living if len(storage.layers) > SHARERS)


def _counts_in(storage: SavedStorage, layer: Layer) -> bool:
    """Return whether a storage counts in a layer: in the last one that saved it, if it may be offloaded."""
    return max(storage.layers) == layer.index


# Pipelines

WHOLE = -1  # in place of a group: the computation


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage that a plan counts by itself."""

    boundary: int  # of each microbatch, from its forward to its last backward
    output: int  # of each microbatch, from its forward on
    gradients: int  # of weights of its groups, from its first backward on


class StepMeter(Meter):
    """Records the copies of a step of a schedule, its computations and their groups, and the memory at them.

    It is installed as the recorder of the engine; the conductor calls `note` where a computation begins and ends.
    By stage, `standing` is the memory that a plan counts by itself.
    """

    measures_model = False  # other ranks would wait, and other memory is counted in the whole step

    def __init__(self, backend: Backend, counters: Counters, standing: Mapping[int, StageMemory]) -> None:
        super().__init__(backend, counters, memory=True)
        self._standing = standing
        self._in_flight, self._forwards, self._with_gradients = Counter[int](), Counter[int](), set[int]()
        self.other_bytes = self._before_weights = 0
        self._halves = Counter[int]()  # by stage: microbatches between the backwards of their inputs and weights
        self.between_bytes: dict[int, int] = {}  # as in `StageCost`
        self._settled = True  # no gradients are being allocated
        self._computing: dict[Hashable, Step] = {}  # by stage: what it computes now
        self._note_time((None, Kind.FORWARD, WHOLE, False))

    def _note_time(self, place: Place) -> None:
        event = self._backend.record_timed(current_stream(self._backend))
        self.borders[place] = Border(event, self._backend.host_time())

    def temporaries(self, stage: int) -> dict[tuple[Kind, int, bool], int]:
        """Return the most bytes that a stage allocated for a time before each border."""
        found: dict[tuple[Kind, int, bool], int] = {}
        for (step, kind, layer, ends), border in self.borders.items():
            if isinstance(step, Step) and step.stage == stage:
                found[kind, layer, ends] = max(found.get((kind, layer, ends), 0), border.temporary)
        return found

    def note(self, step: Step, ends: bool) -> None:
        """Note the time and the memory where a computation begins or ends."""
        self._note_time((step, _kind(step.computation), WHOLE, ends))
        self._computing[step.stage] = step
        if ends:
            del self._computing[step.stage]
        begins = step.computation is Computation.FORWARD and not ends
        self._in_flight[step.stage] += begins
        self._forwards[step.stage] += begins
        weights = step.computation in (Computation.BACKWARD, Computation.BACKWARD_WEIGHT)
        if weights and ends:
            self._with_gradients.add(step.stage)
        self._settled = ends or not weights or step.stage in self._with_gradients
        self.level()
        if step.computation is Computation.BACKWARD_WEIGHT and self._halves[step.stage]:
            now = self._allocated - self._counters.resident_bytes
            if ends:
                less = self._before_weights - now - self._standing[step.stage].boundary
                self.between_bytes[step.stage] = max(self.between_bytes.get(step.stage, 0), less)
            self._before_weights = now
        self._halves[step.stage] += ends * (step.computation is Computation.BACKWARD_INPUT)
        self._halves[step.stage] -= ends * (step.computation is Computation.BACKWARD_WEIGHT)
        self._in_flight[step.stage] -= weights and ends

    def level(self, *, outside: bool = False) -> None:
        """Note the memory between groups, and what of it is there in the whole step."""
        super().level(outside=outside)
        if self._between and not outside and self._settled and not any(self._halves.values()):
            standing = sum(
                self._in_flight[stage] * each.boundary
                + self._forwards[stage] * each.output
                + each.gradients * (stage in self._with_gradients)
                for stage, each in self._standing.items()
            )
            other = self._allocated - self._counters.resident_bytes - standing
            self.other_bytes = max(self.other_bytes, other)

    def step_of(self, owner: Pass) -> Hashable:
        """Return what the stage of a pass computes; None if that is not followed."""
        return self._computing.get(owner.model) if isinstance(owner, ModelPass) else None

    def computations(self, stage: int, computation: Computation) -> float | None:
        """Return the median seconds of a computation of a stage, without stalls; None if the step had none."""
        found = [ended - begun for begun, ended, _ in self._ran(stage, computation)]
        return median(found) if found else None

    def groups(self, stage: int, computation: Computation, count: int) -> list[Span] | None:
        """Return the median times of each group in a computation of a stage; None if the step had none of it.

        Where no group was seen, each has the same part of the computation.
        """
        ran = self._ran(stage, computation)
        if not ran:
            return None
        kind = _kind(computation)
        order = range(count) if kind is Kind.FORWARD else range(count - 1, -1, -1)
        found = [spans(times, kind, order, begun) for begun, _, times in ran if len(times) > 2]
        if not found:
            return [Span(0.0, median(ended - begun for begun, ended, _ in ran) / count)] * count
        return [
            Span(median(each[k].gap for each in found), median(each[k].seconds for each in found)) for k in range(count)
        ]

    def _ran(self, stage: int, computation: Computation) -> list[tuple[float, float, Times]]:
        """Return begin and end of a computation of a stage for each microbatch, with the borders of its groups."""
        kind = _kind(computation)
        return [
            (times[kind, WHOLE, False], times[kind, WHOLE, True], times)
            for step, times in self._times.items()
            if isinstance(step, Step) and (step.stage, step.computation) == (stage, computation)
            if (kind, WHOLE, True) in times
        ]

    @cached_property
    def _times(self) -> dict[Hashable, Times]:
        return self.times()


def _kind(computation: Computation) -> Kind:
    return Kind.FORWARD if computation is Computation.FORWARD else Kind.BACKWARD
