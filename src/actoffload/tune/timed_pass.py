"""One pass of a model, or one step of a schedule on a rank: how long it takes, its peak, and what groups save."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._torch.modules import opaque
from .._torch.tensors import after_backward
from ..device.base import StreamEvent, current_stream
from ..engine.engine import Engine
from ..engine.passes import ModelPass
from ..engine.statistics import Reason
from .meter import Meter, saved_in, shared_bytes


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
    """One pass or step, which begins now.

    With a `meter` it is measured by group.  With `memory` the host waits for it, and its time and peak are read.
    """

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

    def saw(self, done: ModelPass[int], sequence: Sequence[int]) -> None:
        """Take what the groups saved in the forward."""
        if self.sequence:
            return
        self.sequence, self.adopted = tuple(sequence), done.adopted
        self.graphless = frozenset(k for k, layer in zip(sequence, done.layers, strict=False) if layer.no_graph)
        self.sizes = [tuple(nbytes for _, nbytes in group) for group in saved_in(done.layers)]
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
