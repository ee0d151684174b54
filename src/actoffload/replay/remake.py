"""What a call of a module leaves for backward: it makes the values again that the call has dropped.

`[Note: filled slots]`  The first read of a part of the program makes all of it, and each slot gets its tensor.
Autograd frees a slot right after the node that it was saved for.  If backward keeps its graph, as that of the inputs
of a pipeline stage does, slots are emptied when it comes to another part or another call, and at its end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from .._torch.autograd import NO_BACKWARD, after_backward, backward_id, keeps_graph
from .._torch.modules import opaque, registered
from .._torch.subclasses import changed, plain_parts
from .._torch.tensors import is_freed, version_of
from ..engine.hooks import unpack
from .program import WHOLE, Program, copy_of, on_value
from .proof import Alarm, Sample, below_everything, rise
from .trace import RngPosition, Weight

PLAIN = frozenset((Tensor, Parameter))


class _Latest(threading.local):
    """The call of which a part was filled last, in a backward that keeps its graph."""

    def __init__(self) -> None:
        self.backward = NO_BACKWARD
        self.remake: Callable[[], Remake | None] = lambda: None


_latest = _Latest()


class Slot:
    """What autograd holds for a saved tensor: the tensor itself, what the engine holds, or the call that makes it."""

    __slots__ = ("__weakref__", "number", "remake", "saved", "tensor", "version")

    def __init__(self, remake: Remake, number: int, tensor: Tensor) -> None:
        self.remake, self.number = remake, number
        self.tensor: Tensor | None = tensor  # itself, not an alias: the call takes it out again before it ends
        self.version = version_of(tensor)
        self.saved: Any = None

    @property
    def is_edited(self) -> bool:
        """Whether the tensor was written to since it was saved."""
        return self.tensor is not None and version_of(self.tensor) != self.version

    def unpack(self) -> Tensor:
        """Return the tensor, for autograd."""
        tensor = self.tensor
        if tensor is not None:
            if self.is_edited:  # in-place edit of what a call saves
                raise changed(tensor, tensor.size(), self.version)
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
    beginning: RngPosition | None = None  # of the call, if its program draws random numbers

    def __init__(self, modules: Sequence[Module], alarm: Alarm, name: str) -> None:
        self.modules, self._alarm, self.name = modules, alarm, name
        self.held: dict[int, Any] = {}  # by source: what the engine holds
        self.weights: dict[int, Tensor] = {}  # by source: parameters and buffers of the call
        self.versions: dict[int, int] = {}  # of these
        self.samples: dict[int, Sample] = {}
        self.slots: dict[int, list[weakref.ref[Slot]]] = {}  # of what is dropped, by segment
        self.whole = False  # all is made at once
        self._lock = threading.RLock()
        self._values: dict[int, Tensor] = {}  # that were made again, and that parts need which are not filled
        self._made_versions: dict[int, int] = {}  # of these
        self._filled: set[int] = set()
        self._frees = False  # a backward has freed a part of its graph
        self._backward = NO_BACKWARD  # the latest in which something was made

    def fetch_saved(self, slot: Slot) -> Tensor:
        """Return a kept tensor to a function whose backward may write to it."""
        tensor = unpack(slot.saved)
        entry = self.program.trace.entries[slot.number]
        # [guard: functions that write to what programs read]
        return copy_of(tensor) if entry.by_function and entry.value in self.held else tensor

    def fetch(self, slot: Slot) -> Tensor:
        """Make the part of a dropped tensor again, and return the tensor."""
        try:
            with self._lock:
                if slot.tensor is None:
                    self._fill(WHOLE if self.whole else self.program.trace.entries[slot.number].segment, slot)
                tensor = slot.unpack()
                if backward_id() == NO_BACKWARD:
                    self._empty()
                return tensor
        except BaseException as error:
            rise()  # replay that fails
            if isinstance(error, Exception):
                error.add_note(f"This was raised in backward, while values of {self.name} were computed again.")
            raise

    opaque(fetch)

    def _fill(self, part: int, asked: Slot) -> None:
        """Make a part, and give its slots their tensors, also the one that was read; see [Note: filled slots]."""
        program, values, now = self.program, self._values.copy(), backward_id()
        frees = now != NO_BACKWARD and not keeps_graph()
        if not frees:
            before = _latest.remake() if now == _latest.backward else None
            if before is not None and before is not self:
                before._empty()
            _latest.backward, _latest.remake = now, weakref.ref(self)
            self._empty_slots()
        if now != self._backward:
            self._backward = now
            if not frees and now != NO_BACKWARD:
                after_backward(self._empty)
        others = frozenset() if part == WHOLE else frozenset(program.parts.keys() - self._filled - {part})
        fill = program.fill(part, frozenset(values), others)
        for value, tensor in values.items():  # values that a backward has written to
            if version_of(tensor) != self._made_versions[value]:
                raise changed(tensor, tensor.size(), self._made_versions[value])
        count = self._alarm.backend.made
        with below_everything:
            for step, sources, unneeded in fill.run:
                for value in sources:
                    values[value] = self._source(value)
                program.run(step, values, self.beginning)
                for _, value in step.made:
                    count(values[value])
                    if value in self.samples:
                        self._alarm.compare(self.samples.pop(value), values[value], self.name, step.node)
                for value in unneeded:
                    del values[value]
            refs = chain(*self.slots.values()) if part == WHOLE else self.slots.get(part, ())
            for slot in (asked, *(ref() for ref in refs)):
                if slot is None or slot.tensor is not None:
                    continue
                entry = program.trace.entries[slot.number]
                tensor = on_value(values[entry.value], program.reads[slot.number])
                if entry.by_function and (program.uses[entry.value] > 1 or entry.value in fill.needed):
                    tensor = copy_of(tensor)  # functions that write to values
                slot.tensor, slot.version = tensor, version_of(tensor)
        self._filled.add(part)
        self._values = {value: tensor for value, tensor in values.items() if value in fill.held}
        self._made_versions = {value: version_of(tensor) for value, tensor in self._values.items()}
        if frees:
            self._frees = True
            self.held = {value: saved for value, saved in self.held.items() if value in fill.needed}

    def _empty(self) -> None:
        """Empty the slots that were filled: what backward needs once more is made again."""
        self._filled = set()
        if not self._frees:  # otherwise sources may be gone
            self._values = {}
        self._empty_slots()

    def _empty_slots(self) -> None:
        for ref in chain(*self.slots.values()):
            slot = ref()
            if slot is not None:
                slot.tensor = None

    def _source(self, value: int) -> Tensor:
        source = self.program.sources[value]
        if type(source) is not Weight:
            return unpack(self.held[value])
        tensor = self.weights[value]
        if is_freed(tensor):  # by FSDP2, which may gather it into another tensor
            tensor = self.weight(source)
        if version_of(tensor) != self.versions[value]:  # [guard: weights that were edited]
            raise changed(tensor, tensor.size(), self.versions[value])
        return tensor

    def find_weights(self) -> None:
        """Find the weights where a call begins: the program may put others in their places, then or before backward."""
        modules = self.modules
        for value, weight in self.program.weights:
            tensor: Any = registered(modules[weight.module])[weight.table].get(weight.name)
            if type(tensor) in PLAIN:  # others are sharded, and gathered in the call
                self.weights[value] = tensor  # [guard: weights where the call begins]

    def note_versions(self) -> None:
        """Note the versions of weights as they are when the first part of what is made from them is dropped."""
        versions = self.versions
        if len(versions) == len(self.program.weights):
            return
        for value, weight in self.program.weights:
            if value not in versions:
                if value not in self.weights:
                    self.weights[value] = self.weight(weight)
                versions[value] = version_of(self.weights[value])

    def weight(self, source: Weight) -> Tensor:
        """Return a parameter or buffer as it is now."""
        whole = registered(self.modules[source.module])[source.table].get(source.name)
        if type(whole) is Parameter:
            return whole
        parts = [] if whole is None else plain_parts(whole)
        if source.part >= len(parts):
            raise RuntimeError(
                f"A weight of {self.name} is not there while its values are computed again in backward: it was "
                "replaced, or its sharded module has not gathered it. Pass keep=[...] with the name of the module, or "
                "recompute=False."
            )
        return parts[source.part]
