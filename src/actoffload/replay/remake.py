"""What a call of a module leaves for backward: it makes the values again that the call has dropped.

`[Note: values that are held]`  By a policy that `holds`, the first read of a backward that frees its graph makes
everything, and each slot gets its tensor: autograd frees a slot right after the node that it was saved for.  Any other
backward makes values as far as they are read, and counts the reads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from .._torch.autograd import NO_BACKWARD, after_backward, backward_id, keeps_graph
from .._torch.modules import opaque, registered
from .._torch.subclasses import changed, plain_parts
from .._torch.tensors import version_of
from ..engine.hooks import unpack
from .program import Program, copy_of, on_value
from .proof import Alarm, Sample, below_everything, rise
from .trace import Weight

__all__ = ["Remake", "Slot"]

GATHERED = (
    "A weight of {module} is not there while its values are computed again in backward: it was replaced, or its "
    "sharded module has not gathered it. Pass keep=[...] with the name of the module, or recompute=False."
)


class Slot:
    """What autograd holds for a saved tensor: the tensor itself, what the engine holds, or the call that makes it."""

    __slots__ = ("__weakref__", "number", "read", "remake", "saved", "tensor", "version")

    def __init__(self, remake: Remake, number: int, tensor: Tensor) -> None:
        self.remake, self.number = remake, number
        self.tensor: Tensor | None = tensor  # itself, not an alias: the call takes it out again before it ends
        self.version = version_of(tensor)
        self.saved: Any = None
        self.read = False

    @property
    def edited(self) -> bool:
        """Whether the tensor was written to since it was saved."""
        return self.tensor is not None and version_of(self.tensor) != self.version

    def unpack(self) -> Tensor:
        """Return the tensor, for autograd."""
        tensor = self.tensor
        if tensor is not None:
            if version_of(tensor) != self.version:  # in-place edit of what a call saves
                raise changed(tensor, tensor.size(), self.version, self)
            return tensor
        if self.saved is not None:
            return self.remake.fetch_saved(self)
        return self.remake.fetch(self)


class Remake:
    """Makes the dropped values of one call again, from its sources.

    Parameters
    ----------
    modules : sequence of torch.nn.Module
        The module that was called and all inside of it, in the order of ``modules()``.
    alarm : Alarm
        Compares values with those that are made again.
    name : str
        Of the module, for errors.
    """

    program: Program  # of the call, as soon as it is known

    def __init__(self, modules: Sequence[Module], alarm: Alarm, name: str) -> None:
        self.modules, self._alarm, self.name = modules, alarm, name
        self.held: dict[int, Any] = {}  # by source: what the engine holds
        self.versions: dict[int, int] = {}  # of weights
        self.samples: dict[int, Sample] = {}
        self.slots: list[weakref.ref[Slot]] = []  # of what is dropped, if it is made again at once
        self._lock = threading.RLock()
        self._values: dict[int, Tensor] = {}  # that were made again
        self._counts: dict[int, int] = {}
        self._pending: dict[int, int] = {}  # empty before the first backward
        self._backward = NO_BACKWARD

    def fetch_saved(self, slot: Slot) -> Tensor:
        """Return a kept tensor to a function whose backward may write to it."""
        tensor = unpack(slot.saved)
        with self._lock:
            value = self.program.trace.entries[slot.number].value
            counts = self._counts or self.program.counts
            needed = (
                self.program.trace.entries[slot.number].by_function and value in self.held and counts.get(value, 0) > 0
            )
        # [guard: functions that write to what programs read]
        return copy_of(tensor) if needed else tensor

    def fetch(self, slot: Slot) -> Tensor:
        """Make a dropped tensor again, as far as it is not there, and free what backward needs no longer."""
        try:
            return self._fetch(slot)
        except BaseException:
            rise()  # replay that fails
            raise

    opaque(fetch)

    def _fetch(self, slot: Slot) -> Tensor:
        program = self.program
        entry = program.trace.entries[slot.number]
        value = entry.value
        with self._lock:
            if self.slots and slot.tensor is None and backward_id() != NO_BACKWARD and not keeps_graph():
                self._fill_slots()
            if slot.tensor is not None:
                return slot.unpack()
            counts = self._begin()
            values = self._values
            if value not in values:
                self._make(value, entry.segment, counts=counts)
            tensor = values[value]
            # values that a backward has written to
            if version_of(tensor) != self._made_versions[value]:
                raise changed(tensor, tensor.size(), self._made_versions[value])
            if counts and not slot.read:
                slot.read = True
                self._pending[value] -= 1
                if not self._pending[value]:
                    self._count_read(value)
            read = program.reads[slot.number]
            tensor = on_value(tensor, read)
            if entry.by_function and value in values:
                tensor = copy_of(tensor)  # functions that write to values
            if self._backward == NO_BACKWARD:
                values.clear()
            return tensor

    def _fill_slots(self) -> None:
        """Make everything; see [Note: values that are held]."""
        program, entries, values = self.program, self.program.trace.entries, dict[int, Tensor]()
        try:
            with below_everything():
                for step, sources, unneeded in program.every_run():
                    for value in sources:
                        values[value] = self._source(value)
                    program.run(step, values)
                    for _, value in step.made:
                        if value in self.samples:
                            self._alarm.compare(self.samples.pop(value), values[value], self.name, step.node)
                    for value in unneeded:
                        del values[value]
                for ref in self.slots:
                    slot = ref()
                    if slot is None:
                        continue
                    value = entries[slot.number].value
                    tensor = on_value(values[value], program.reads[slot.number])
                    if entries[slot.number].by_function and program.pending[value] > 1:
                        tensor = copy_of(tensor)  # functions that write to values
                    slot.tensor, slot.version = tensor, version_of(tensor)
        except Exception as error:
            error.add_note(f"This was raised in backward, while values of {self.name} were computed again.")
            raise
        self.slots = []
        self.held.clear()

    def _begin(self) -> bool:
        """Note which backward reads; return whether it frees what it has read, so that uses can be counted."""
        if not self._pending:
            program = self.program
            self._made_versions: dict[int, int] = {}
            self._made: set[int] = set()  # held values whose sources were counted
            self._stays_for: dict[int, int] = {}  # by cheap value that is not freed: the segment that needs it
            self._counts, self._pending, self._near = dict(program.counts), dict(program.pending), dict(program.near)
        now = backward_id()
        retained = now == NO_BACKWARD or keeps_graph()
        if now != self._backward:
            self._backward = now
            if retained:
                self._values.clear()
                if now != NO_BACKWARD:
                    after_backward(self._values.clear)  # they are made again for the next backward
        return not retained

    def _count_read(self, value: int) -> None:
        """Count that backward has read all that was saved of a value, and free what nothing else needs."""
        program = self.program
        if value in program.held:
            self._release(value)
        else:
            for source in program.basis[value]:
                self._release(source)
        for key in program.near_of[value]:
            self._near[key] -= 1
            if not self._near[key] and self._stays_for.get(key[1]) == key[0]:
                del self._stays_for[key[1]]
                if not self._is_partly_read(key[1]):
                    self._values.pop(key[1], None)
        if value not in program.held and value not in self._stays_for:
            self._values.pop(value, None)

    def _release(self, value: int) -> None:
        """Count that one use of a held value or of a source is over, and free it if it was the last."""
        counts = self._counts
        counts[value] -= 1
        if not counts[value]:
            self._values.pop(value, None)
            self.held.pop(value, None)

    def _is_partly_read(self, value: int) -> bool:
        return value in self._pending and 0 < self._pending[value] < self.program.pending[value]

    def _make(self, target: int, segment: int, *, counts: bool) -> None:
        """Run the operators that make a value, and free what is not needed soon; see [Note: what is held]."""
        program, values, held, samples = self.program, self._values, self.program.held, self.samples
        fetched: list[int] = []
        try:
            with below_everything():
                for step, unneeded in program.to_run(target, values):
                    for value in step.sources:
                        if value not in values:
                            values[value] = self._source(value)
                            fetched.append(value)
                    program.run(step, values)
                    for _, value in step.made:
                        tensor = values[value]
                        self._made_versions[value] = version_of(tensor)
                        if value in samples:
                            self._alarm.compare(samples.pop(value), tensor, self.name, step.node)
                        if value in held and counts and value not in self._made:
                            self._made.add(value)
                            for each in program.basis[value]:
                                self._release(each)
                    for value in unneeded:
                        self._free(value, segment)
        except Exception as error:
            error.add_note(f"This was raised in backward, while values of {self.name} were computed again.")
            raise
        finally:
            for value in fetched:
                values.pop(value, None)

    def _free(self, value: int, segment: int) -> None:
        """Free a value that nothing reads now, unless it is worth having it later."""
        if value in self.program.held:
            if self._counts.get(value):
                return
        elif self._near.get((segment, value)):
            self._stays_for.setdefault(value, segment)
            return
        elif value in self._stays_for or self._is_partly_read(value):
            return
        self._values.pop(value, None)

    def _source(self, value: int) -> Tensor:
        source = self.program.sources[value]
        if type(source) is not Weight:
            return unpack(self.held[value])
        tensor = self.weight(source)
        if version_of(tensor) != self.versions[value]:  # [guard: weights that were edited]
            raise changed(tensor, tensor.size(), self.versions[value])
        return tensor

    def note_versions(self) -> None:
        """Note the versions of weights as they are when the first part of what is made from them is dropped."""
        versions, modules = self.versions, self.modules
        if len(versions) == len(self.program.weights):
            return
        for value, weight in self.program.weights:
            if value not in versions:
                tensor = registered(modules[weight.module])[weight.table].get(weight.name)
                versions[value] = version_of(tensor if type(tensor) is Parameter else self.weight(weight))

    def weight(self, source: Weight) -> Tensor:
        """Return a parameter or buffer as it is now."""
        whole = registered(self.modules[source.module])[source.table].get(source.name)
        if type(whole) is Parameter:
            return whole
        parts = [] if whole is None else plain_parts(whole)
        if source.part >= len(parts):
            raise RuntimeError(GATHERED.format(module=self.name))
        return parts[source.part]
