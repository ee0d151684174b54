"""Measure passes of a model and steps of a schedule: their time and peak, when groups begin and end, copies, memory.

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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module

from .._torch.modules import opaque
from .._torch.tensors import after_backward
from ..device.base import Backend, Stream, StreamEvent, current_stream
from ..engine.engine import Engine
from ..engine.layer import SHARERS, Layer
from ..engine.passes import ModelPass, Pass
from ..engine.statistics import Counters, Reason, TimelineRecorder
from ..engine.storage import Residency, SavedStorage
from ..schedule.costs import StageCost
from ..schedule.orders import Computation, Step
from ..schedule.timeline import Kind, Span

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


class Visit(NamedTuple):
    """What a group took in one direction of a step, from the border before it on."""

    gap: float = 0.0  # seconds of the device before it
    seconds: float = 0.0  # of the device in it
    host_gap: float = 0.0
    host: float = 0.0  # seconds for which the host queued it, also while it waited
    gap_temporary: int = 0
    temporary: int = 0
    other_bytes: tuple[int, int] = (0, 0)  # as in `Border`, where it begins and where it ends
    gradients: tuple[int, int] = (0, 0)


WHOLE = -1  # in place of a group: the computation of a step
PASS = "pass"  # what a model has in place of the steps of a pipeline

Place: TypeAlias = tuple[Hashable, Kind, int, bool]
"""Where a border is: its step, see `Meter.step_of`, forward or backward, the group, and whether that ends there."""


class Meter(TimelineRecorder):
    """Records borders of groups and copies; with `memory` what is allocated there, and the gradients of `modules`."""

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

    @property
    def first(self) -> StreamEvent:
        """The first border, from which times count."""
        return next(iter(self.borders.values())).event

    def wait(self) -> None:
        """Wait until the device has passed all borders and copies, so that they may be read."""
        events = [*(border.event for border in self.borders.values()), *(ended for *_, ended, _ in self._spans)]
        if not all(map(self._backend.passed, reversed(events))):
            self._backend.synchronize(self._backend.current_device())

    @cached_property
    def visits(self) -> dict[tuple[Any, Kind, int], Visit]:
        """Each visit by step, direction and group, as if no copy had been waited for."""
        first, elapsed = self.first, self._backend.elapsed
        waits = [(begun, ended) for kind, _, begun, ended, _ in self._spans if kind is Kind.STALL]
        stalls = [(elapsed(first, ended), elapsed(begun, ended)) for begun, ended in waits]
        stalls = sorted((end, seconds) for end, seconds in stalls if seconds > self._backend.resolution and end > 0)
        until, stalled = [end for end, _ in stalls], [0.0, *accumulate(seconds for _, seconds in stalls)]
        starts = dict[tuple[Hashable, Kind, int], tuple[float, float, float, Border]]()
        found, last, queued = dict[tuple[Any, Kind, int], Visit](), dict[Hashable, float](), dict[Hashable, float]()
        for (step, kind, group, ends), border in self.borders.items():
            now = elapsed(first, border.event)
            now -= stalled[bisect_right(until, now)]
            place = step, kind, group
            if not ends:
                gap, host_gap = now - last.get(step, now), border.host - queued.get((step, kind), border.host)
                starts[place] = now, max(gap, 0.0), host_gap, border
            elif place in starts:
                begun, gap, host_gap, before = starts[place]
                found[place] = Visit(
                    *(gap, max(now - begun, 0.0), host_gap, border.host - before.host),
                    *(before.temporary, border.temporary),
                    (before.other_bytes, border.other_bytes),
                    (before.gradients, border.gradients),
                )
            if ends or group == WHOLE:
                last[step] = max(now, last.get(step, 0.0))
                queued[step, kind] = max(border.host, queued.get((step, kind), 0.0))
        return found

    def copies(self, kind: Kind) -> list[Span]:
        """Return the copies in one direction, in the order in which they ran, in seconds since the first border."""
        first, elapsed = self.first, self._backend.elapsed
        found = (
            Span(kind, layer, elapsed(first, begun), elapsed(first, ended), nbytes)
            for copied, layer, begun, ended, nbytes in self._spans
            if copied is kind
        )
        return sorted(found, key=lambda span: (span.start, span.end))


def _on_device(owner: Pass) -> int:
    """Return the bytes of the saved activations of a pass that are on the device and can be offloaded."""
    return sum(
        storage.nbytes
        for layer in owner.layers
        for storage in layer.living()
        if _counts_in(storage, layer) and storage.residency is not Residency.HOST
    )


def saved_sizes(layers: Sequence[Layer]) -> list[tuple[int, ...]]:
    """Return for each layer the bytes of each storage that counts in it."""
    return [tuple(each.nbytes for each in layer.living() if _counts_in(each, layer)) for layer in layers]


def shared_bytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of the storages that more than `SHARERS` layers save, which stay on the device."""
    living = {storage for layer in layers for storage in layer.living()}
    return sum(storage.nbytes for storage in living if len(storage.layers) > SHARERS)


def _counts_in(storage: SavedStorage, layer: Layer) -> bool:
    """Return whether a storage counts in a layer: in the last one that saved it, if it may be offloaded."""
    return max(storage.layers) == layer.index


# Pipelines


class StepMeter(Meter):
    """Records a step of a schedule; `stages` are costs with the memory that a plan counts by itself."""

    measures_model = False  # other ranks would wait, and other memory is counted in the whole step

    def __init__(self, backend: Backend, counters: Counters, stages: Mapping[int, StageCost]) -> None:
        super().__init__(backend, counters, memory=True)
        self._stages = stages
        self._weights = {stage: sum(group.gradient_bytes for group in cost.groups) for stage, cost in stages.items()}
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

    def note(self, step: Step, ends: bool) -> None:
        """Note the time and the memory where a computation begins or ends."""
        self._note_time((step, kind_of(step.computation), WHOLE, ends))
        self._computing[step.stage] = step
        if ends:
            del self._computing[step.stage]
        if step.computation is Computation.FORWARD and not ends:
            self._in_flight[step.stage] += 1
            self._forwards[step.stage] += 1
        weights = step.computation in (Computation.BACKWARD, Computation.BACKWARD_WEIGHT)
        if weights and ends:
            self._with_gradients.add(step.stage)
        self._settled = ends or not weights or step.stage in self._with_gradients
        self.level()
        if step.computation is Computation.BACKWARD_WEIGHT and self._halves[step.stage]:
            now = self._allocated - self._counters.resident_bytes
            if ends:
                less = self._before_weights - now - self._stages[step.stage].boundary_bytes
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
                self._in_flight[stage] * cost.boundary_bytes
                + self._forwards[stage] * cost.output_bytes
                + self._weights[stage] * (stage in self._with_gradients)
                for stage, cost in self._stages.items()
            )
            other = self._allocated - self._counters.resident_bytes - standing
            self.other_bytes = max(self.other_bytes, other)

    def step_of(self, owner: Pass) -> Hashable:
        """Return what the stage of a pass computes; None if that is not followed."""
        return self._computing.get(owner.model) if isinstance(owner, ModelPass) else None


def kind_of(computation: Computation) -> Kind:
    """Return whether a computation runs forward or backward."""
    return Kind.FORWARD if computation is Computation.FORWARD else Kind.BACKWARD


# A pass or a step


@dataclass(frozen=True)
class Shown:
    """What a pass or step showed in one rank."""

    seconds: float
    peak: int = 0  # bytes of device memory, with inputs of the size that the plan is for; 0 if not known
    elements: int = 0  # of the inputs
    ran: bool = True  # its groups were called
    refused: bool = False  # saved tensors stayed on the device for lack of host memory


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


class TimedPass:
    """One pass or step, which begins now: by group with a `meter`; with `memory` the host waits for it."""

    def __init__(
        self, engine: Engine, inputs: Sequence[torch.Tensor] = (), meter: Meter | None = None, *, memory: bool = True
    ) -> None:
        self._memory, self.meter = memory, meter
        self._backend, self._counters = backend, counters = engine.backend, engine.counters
        self.thread = threading.get_ident()  # that runs its forward
        self.elements, self.tokens = sum(tensor.numel() for tensor in inputs), count_tokens(inputs)
        self.ended: StreamEvent | None = None
        self.operators: Any = None  # times of the operators of recomputed groups, if they are measured
        self.sequence: tuple[int, ...] = ()
        self.sizes: list[tuple[int, ...]] = []  # by group: bytes of the storages that it saves
        self.adopted = 0  # bytes saved between the groups and offloaded with one
        self.shared = 0  # bytes that many groups save
        self.waiting = 0  # earlier passes whose backward is still to come
        self.graphless = frozenset[int]()  # groups that ran and saved nothing, as they are frozen
        self._refused_before = counters.tensors_kept[Reason.HOST_FULL]
        self.peak = 0  # bytes of device memory, from its begin to its end; 0 if not known
        self.allocated = (backend.allocated() or (0, 0))[0] if memory else 0  # bytes of device memory before it
        self._begun = backend.record_timed(current_stream(backend))
        if meter is not None:
            engine.record(meter)

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """End with the first backward that comes to one of the outputs."""

        def ended() -> None:
            if self.ended is None and not self._backend.capturing():
                self.end()

        def reached(_: Any) -> None:
            after_backward(ended)

        opaque(reached)
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(reached)

    def end(self) -> None:
        """End here."""
        self.ended = self._backend.record_timed(current_stream(self._backend))
        if self._memory:
            self.peak = (self._backend.allocated() or (0, 0))[1]

    def saw(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Take what the groups saved in the forward."""
        if self.sequence:
            return
        self.sequence, self.adopted = tuple(sequence), done.adopted
        self.graphless = frozenset(k for k, layer in zip(sequence, done.layers, strict=False) if layer.no_graph)
        self.sizes = saved_sizes(done.layers)
        self.shared = shared_bytes(done.layers)

    def shown(self, peak: int, *, ran: bool = True) -> Shown:
        """Return what it showed; the peak is that for the inputs of the plan.  `ran`: its groups were called."""
        refused = self._counters.tensors_kept[Reason.HOST_FULL] > self._refused_before
        return Shown(self.seconds() if self._memory else 0.0, peak, self.elements, ran=ran, refused=refused)

    def wait(self) -> None:
        """Wait until the device has run it, with its copies."""
        assert self.ended is not None
        if not self._backend.passed(self.ended):
            self._backend.synchronize(self._backend.current_device())
        if self.meter is not None:
            self.meter.wait()

    @property
    def largest(self) -> int:
        """At most how many bytes the largest tensor of a pass has that was measured by group."""
        assert self.meter is not None
        saved = max((nbytes for sizes in self.sizes for nbytes in sizes), default=0)
        return max((saved, *(border.temporary for border in self.meter.borders.values())))

    def seconds(self) -> float:
        """Wait until it has ended, and return how long it took."""
        self.wait()
        return self._backend.elapsed(self._begun, self.ended)

    def outside(self) -> float:
        """Return the seconds of it before its first group and behind the last one."""
        assert self.meter is not None
        elapsed = self._backend.elapsed
        last = [*self.meter.borders.values()][-1].event
        return elapsed(self._begun, self.meter.first) + elapsed(last, self.ended)

    def highest(self) -> Peak:
        """Return the peak of device memory in a pass that was measured by group, from its first border on."""
        assert self.meter is not None
        peak = before = 0
        for border in self.meter.borders.values():
            peak, before = max(peak, max(before, border.allocated) + border.temporary), border.allocated
        return Peak(peak, self.elements, self.meter.allocated_before)


def count_tokens(inputs: Sequence[torch.Tensor]) -> int:
    """Return the elements of the largest input of whole numbers, such as `input_ids`; of any, if there is none."""
    whole = [tensor for tensor in inputs if not tensor.is_floating_point() and tensor.dtype is not torch.bool]
    return max((tensor.numel() for tensor in whole or inputs), default=0)
