"""The passes of a model that are measured: what each is for, how long it takes, and what it saves."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..._torch.autograd import after_backward
from ..._torch.modules import opaque
from ...device.base import StreamEvent, current_stream
from ...engine.passes import ModelPass
from ...engine.statistics import Reason
from ...schedule.execution_order import OUTSIDE
from ...tune.meter import Meter, saved_in
from ..follow import ModelState
from ..replays import OperatorTimes

BUSY = 0.02
"""Seconds for which the device is kept busy before a measured pass."""


class Stage(enum.Enum):
    """What a pass of a model, or a step of a pipeline, is for."""

    FIRST = "everything is replayed and offloaded: groups are traced and proven, and their operators timed"
    LEAN = "everything is replayed and offloaded, measured by group"
    PLAN = "the plan, timed"


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
    """One pass of the model, which begins now: in `Stage.LEAN` measured by group, and with `memory` also its peak."""

    def __init__(self, stage: Stage, inputs: Sequence[torch.Tensor], state: ModelState, *, memory: bool) -> None:
        self.stage, self._memory = stage, memory
        self._backend, self._counters = backend, counters = state.engine.backend, state.engine.counters
        self.thread = threading.get_ident()  # that runs its forward
        self.elements, self.tokens = sum(tensor.numel() for tensor in inputs), count_tokens(inputs)
        self.ended: StreamEvent | None = None
        self.sequence: tuple[int, ...] = ()
        self.sizes: list[tuple[int, ...]] = []  # by group: bytes of the storages that it saves
        self.adopted = 0  # bytes saved between the groups and offloaded with one
        self.shared = 0  # bytes that many groups save
        self.waiting = 0  # earlier passes whose backward is still to come
        self.graphless = frozenset[int]()  # groups that ran and saved nothing, as they are frozen
        self.refused = 0  # saved tensors for which there was no host memory
        self._refused_before = counters.kept(Reason.HOST_FULL)
        self.peak = 0  # bytes of device memory, from its begin to the end of its backward; 0 if not known
        if stage is Stage.LEAN:
            backend.occupy(BUSY)
        self.allocated = (backend.allocated() or (0, 0))[0] if memory else 0  # bytes of device memory before it
        self._begun = backend.record_timed(current_stream(backend))
        self.meter: Meter | None = None
        if stage is Stage.LEAN:
            modules = [module for group in state.groups if (module := group.ref()) is not None]
            parts = dict.fromkeys(part for group in modules for part in group.modules())
            self.meter = Meter(backend, counters, memory=True, modules=parts)
            state.engine.record(self.meter)
        self.operators = OperatorTimes(backend) if stage is Stage.FIRST else None  # of the groups that are recomputed

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Note the end of the first backward that comes to one of the outputs."""
        backend = self._backend

        def ended() -> None:
            if self.ended is None and not backend.capturing():
                self.ended = backend.record_timed(current_stream(backend))
                if self._memory:
                    self.peak = (backend.allocated() or (0, 0))[1]

        def reached(_: Any) -> None:
            after_backward(ended)

        opaque(reached)
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(reached)

    def saw(self, done: ModelPass[int], sequence: Sequence[int]) -> None:
        """Take what the groups saved in the forward."""
        self.refused = self._counters.kept(Reason.HOST_FULL) - self._refused_before
        if self.sequence:
            return
        self.sequence, self.adopted = tuple(sequence), done.adopted
        self.graphless = frozenset(k for k, layer in zip(sequence, done.layers, strict=False) if layer.no_graph)
        self.sizes = [tuple(nbytes for _, nbytes in group) for group in saved_in(done.layers)]
        living = {storage for layer in done.layers for storage in layer.living()}
        self.shared = sum(storage.nbytes for storage in living if OUTSIDE in storage.layers)

    def wait(self) -> None:
        """Wait until the device has run it, with its copies."""
        backend = self._backend
        if self.ended is None:
            return
        if not backend.passed(self.ended):
            backend.synchronize(backend.current_device())
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
        assert self.ended is not None
        self.wait()
        return self._backend.elapsed(self._begun, self.ended)

    def outside(self) -> float:
        """Return the seconds of it before its first group and behind the last one."""
        assert self.meter is not None
        assert self.ended is not None
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
