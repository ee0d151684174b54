"""One pass of a model that is timed, and what it is for."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..._torch.autograd import after_backward
from ..._torch.compiling import opaque
from ...device.base import Backend, StreamEvent, current_stream
from ...engine.passes import ModelPass
from ...schedule.execution_order import GroupKey
from ..operator_costs import OperatorTimes
from .metering import SHARERS, Meter, counts_in

__all__ = ["Peak", "Stage", "TimedPass"]


class Stage(enum.Enum):
    """What a pass is for."""

    FIRST = "everything is offloaded, to warm up"
    LEAN = "everything is offloaded, measured by group"
    MEMORY = "nothing is offloaded, memory measured by group"
    FIRST_AGAIN = "everything is recomputed and offloaded, operators timed"
    AGAIN = "everything is recomputed and offloaded, measured by group"
    WHOLE = "everything is recomputed without saving any output of an operator, measured by group"
    BARE_AGAIN = "everything is recomputed and nothing offloaded, timed by group"
    WARM = "nothing is offloaded, to warm up"
    BARE = "nothing is offloaded, timed by group"
    NONE = "nothing is offloaded, timed"
    PLAN = "the plan, timed"


class Peak(NamedTuple):
    """The peak of device memory in a pass, in bytes, with the elements of its inputs and the bytes allocated before."""

    nbytes: int = 0
    elements: int = 0
    allocated: int = 0

    def at(self, elements: int, allocated: int = 0) -> int:
        """Return the most that a pass takes with as many elements, and so much allocated before it.

        What comes on top grows with the inputs, as activations do.  It is not expected to shrink, and neither is the
        rest.
        """
        inside = self.nbytes - self.allocated
        if elements > self.elements > 0:  # [guard: inputs that are larger than those of a peak]
            inside = -(-inside * elements // self.elements)
        return max(self.allocated, allocated) + inside

    def of(self, elements: int) -> Peak:
        """Return the peak of a pass with as many elements, or with those of this one if they are more."""
        return Peak(self.at(elements), max(elements, self.elements), self.allocated)


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
    shared: int = 0  # bytes that many groups save
    waiting: int = 0  # earlier passes whose backward is still to come
    operators: OperatorTimes | None = None  # of the groups that are recomputed
    memory: bool = False  # its peak is read
    allocated: int = 0  # bytes of device memory before it, if its peak is read
    peak: int = 0  # bytes of device memory, from its begin to the end of its backward; 0 if not known

    @staticmethod
    def begin(stage: Stage, number: int, elements: int, backend: Backend, *, memory: bool = False) -> TimedPass:
        """Return a pass that begins now; `memory`: its peak is read, which takes longer."""
        allocated = (backend.allocated() or (0, 0))[0] if memory else 0
        begun = backend.record_timed(current_stream(backend))
        return TimedPass(stage, number, elements, begun, memory=memory, allocated=allocated)

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

    def pace(self, backend: Backend) -> float:
        """Return the seconds for each element of the inputs, whose number may differ from pass to pass."""
        return self.seconds(backend) / max(self.elements, 1)

    def larger(self, elements: int) -> float:
        """Return by how much activations are larger with as many elements of inputs, as far as that is known."""
        return elements / self.elements if elements and self.elements else 1.0

    def peak_at(self, elements: int, allocated: int) -> int:
        """Return its peak as it is with as many elements, and so much allocated before; 0 if it is not known."""
        return Peak(self.peak, self.elements, self.allocated).at(elements, allocated) if self.peak else 0

    def peak_without(self) -> Peak:
        """Return the peak of device memory in it if nothing were offloaded, from its first border on."""
        assert self.meter is not None
        peak = before = 0
        for border in self.meter.borders:
            level = border.other_bytes + border.activations(self.sizes)
            peak, before = max(peak, max(before, level) + border.temporary), level
        return Peak(peak, self.elements, self.meter.allocated_before)
