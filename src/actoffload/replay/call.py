"""One call of a module whose values are dropped at its end and made again in backward.

`[Note: a call]`  A call follows the program that an earlier one has left, or is traced and finds one, which is proven
at its end.  A `Slot` holds a saved tensor that may be dropped; all else goes to the engine, which keeps or offloads it.
A call that follows a program compares each saved tensor with the traced one.  Where a larger part of the module has
ended, and at the end of the call, the slots are emptied if everything agreed.  If something differs, the engine gets
what the slots hold, so nothing is lost.

`[Note: filled slots]`  The slots refer to a `Remake` that makes their tensors again, and autograd alone refers to the
slots: sources, and what was made again, live as long as the graph.  The first read of a part of the program makes all
of it, and each slot gets its tensor.  Autograd frees a slot right after the node that it was saved for.  If backward
keeps its graph, as that of the inputs of a pipeline stage does, slots are emptied when it comes to another part or
another call, and at its end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Module, Parameter

from .._torch.modules import opaque, registered
from .._torch.subclasses import changed, plain_parts
from .._torch.tensors import (
    NO_BACKWARD,
    address,
    after_backward,
    backward_id,
    is_freed,
    keeps_graph,
    leaves,
    version_of,
)
from ..engine.hooks import Packer, unpack
from .policy import Policy, everything
from .program import WHOLE, Drop, ExpectedTensor, Program, Where, copy_of, on_value
from .proof import Alarm, below_everything, bits_at, prove, rise
from .trace import UNKNOWN, RngPosition, Trace, Weight
from .tracer import Tracer

PLAIN = frozenset((Tensor, Parameter))

Timer: TypeAlias = Callable[[Program, Callable[[int], Tensor], RngPosition | None], object]
"""Times the operators of a program, given what returns its sources and the beginning of its call."""


# Forward


class Call:
    """What a call that is traced and one that follows a program have in common.

    `modules` are the module that is called and all inside of it, in the order of ``modules()``; `inputs` are the
    tensors among its arguments; `name` is that of the module, for errors.
    """

    agrees = True  # with the program that it follows

    def __init__(
        self, modules: Sequence[Module], inputs: Sequence[Tensor], packer: Packer, alarm: Alarm, name: str
    ) -> None:
        self._remake, self._inputs, self._packer = Remake(modules, alarm, name), inputs, packer
        self._slots: list[Slot | None] = []

    @property
    def program(self) -> Program:
        """What is dropped, and how it is made again; found at the end of a call that is traced."""
        return self._remake.program

    def _end(self) -> None:
        self._remake.whole = self.program.policy.holds
        self._packer.end()

    def give_up(self) -> None:
        """Give what is not dropped to the engine: the call differs from the one that was traced, or has failed."""
        rise()
        for slot in self._slots:
            if slot is None or slot.tensor is None:
                continue
            if slot.is_edited:
                slot.tensor = slot.tensor.detach()  # for the error; itself it would close a cycle
            else:
                slot.saved = slot.saved or self._packer.pack(slot.tensor)
                slot.tensor = None
        self._packer.end()


class FollowingCall(Call):
    """A call that follows a program.

    If it `compares_all`, backward compares a sum over the bits of each dropped value, and not samples of some.
    """

    def __init__(self, program: Program, *common: Any, compares_all: bool = False) -> None:
        super().__init__(*common)
        self._compares_all = compares_all
        self._expected: Sequence[ExpectedTensor | None] = program.expected  # none once something differs
        self._first: dict[int, int] = {}  # by dropped value: the address of its first saved tensor
        self._drops_at = program.drops_at
        self._remake.program = program
        self._remake.beginning = RngPosition.read() if program.redraws else None
        self._remake.find_weights()
        for value, place in program.inputs.items():
            self._remake.held[value] = self._packer.pack(self._inputs[place])

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds for a tensor that it saves; the pack hook."""
        number, every = len(self._slots), self._expected
        if number >= len(every):
            self.agrees = False  # [guard: calls that save more]
            return self._packer.pack(tensor)
        expected, slot = every[number], None
        if expected is None:
            saved: Any = self._packer.pack(tensor)
        else:
            dtype, size, stride, offset, value, is_dropped, is_shared, is_source, place = expected
            if (  # [guard: saved tensors of another size]
                tensor.dtype is not dtype
                or tensor.size() != size
                or tensor.stride() != stride
                or (is_dropped and tensor.storage_offset() != offset)  # [guard: saved tensors that lie elsewhere]
                or (is_shared and not self._shares(value, tensor))
            ):
                self._expected, self.agrees = (), False
                return self._packer.pack(tensor)
            if is_dropped:
                saved = slot = Slot(self._remake, number, tensor)
            elif place >= 0 and tensor is self._inputs[place]:
                saved = self._remake.held[value]
            else:
                saved = self._packer.pack(tensor)
                if is_source:
                    self._remake.held[value] = saved
                    if self.program.trace.entries[number].by_function:
                        slot = Slot(self._remake, number, tensor)
                        slot.saved, slot.tensor = saved, None
                        saved = slot
        self._slots.append(slot)
        if number in self._drops_at:
            if not self._drew_as_traced(self.program.trace.entries[number].drawn):
                self._expected, self.agrees = (), False
                return saved
            self._remake.note_versions()  # [guard: calls that differ, or read again, when a part of them is dropped]
            self._drop(self._drops_at[number])
        return saved

    opaque(pack)

    def _drew_as_traced(self, count: int) -> bool:
        """Return whether the call has drawn `count` random numbers, as the traced one; True if none is drawn again."""
        beginning = self._remake.beginning
        # [guard: calls that draw more random numbers -> True]
        return not self.program.redraws or (beginning is not None and beginning.count_drawn() == count)

    def _shares(self, value: int, tensor: Tensor) -> bool:
        """Return whether a tensor lies on the storage on which the first one of a dropped value lies."""
        place = address(tensor.untyped_storage())
        return self._first.setdefault(value, place) == place

    def finish(self, outputs: Any) -> None:
        """End a call that has returned `outputs`: drop what can be made again, or give it to the engine."""
        slots, drop = self._slots, self.program.last_drop
        complete = self.agrees and len(slots) == len(self._expected)  # calls that save less
        if (
            not complete
            or any(slot.is_edited for _, numbers in drop.parts for number in numbers if (slot := slots[number]))
            or not self._drew_as_traced(self.program.trace.drawn)
        ):
            self.agrees = False
            self.give_up()
            return
        self._remake.note_versions()
        self._drop(drop)
        self._end()

    def _drop(self, drop: Drop) -> None:
        """Empty slots, and leave samples of what they hold."""
        remake, slots = self._remake, self._slots
        with below_everything:  # dispatch modes count what is made
            for number, value, where in drop.sums if self._compares_all else drop.samples:
                slot = slots[number]
                if slot is not None and slot.tensor is not None and not is_freed(slot.tensor):
                    bits = bits_at(slot.tensor, where)
                    remake.samples[value] = where, bits if where.whole else bits.clone()
        for segment, numbers in drop.parts:
            dropped = [slot for number in numbers if (slot := slots[number]) is not None]
            remake.slots.setdefault(segment, []).extend(map(weakref.ref, dropped))
            for slot in dropped:
                slot.tensor = None


class TracedCall(Call):
    """A call that is traced, and finds at its end what a policy drops; values of fewer than `min_bytes` stay."""

    proven_bytes = 0

    def __init__(self, tracer: Tracer, policy: Policy, min_bytes: int, *common: Any, timer: Timer | None) -> None:
        super().__init__(*common)
        self._tracer, self._policy, self._min_bytes, self._timer = tracer, policy, min_bytes, timer

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds for a tensor that it saves; the pack hook."""
        tracer = self._tracer
        entry = tracer.save(tensor)
        slot = None if entry.value == UNKNOWN else Slot(self._remake, len(self._slots), tensor)
        self._slots.append(slot)
        if slot is not None and (tracer.values[entry.value].maker != UNKNOWN or entry.by_function):
            return slot
        tracer.paused = True
        try:
            saved = self._packer.pack(tensor)
        finally:
            tracer.paused = False
        if slot is not None:
            slot.saved = saved
        return saved

    opaque(pack)

    def finish(self, outputs: Any) -> None:
        """End a call that has returned `outputs`: drop what is the same when it is made again."""
        tracer, slots = self._tracer, [slot for slot in self._slots if slot is not None]
        tracer.end()
        trace, self._remake.beginning = tracer.result(leaves(outputs)), tracer.beginning
        changed = [slot for slot in slots if slot.tensor is not None and (slot.is_edited or is_freed(slot.tensor))]
        # [guard: values that are written in place after they were saved]
        banned = {trace.entries[slot.number].value for slot in changed}
        whole = self._adopt(trace, banned)
        saved = {slot.number: slot for slot in slots if slot.number in whole.reads}
        beginning = self._remake.beginning
        differing = prove(whole, partial(self._source, whole), saved, self.program.dropped, beginning)
        self.proven_bytes = whole.dropped_bytes
        if differing:  # these values are kept, and read from where they were saved
            whole = self._adopt(trace, banned | differing)
        if self._timer is not None:
            self._timer(whole, partial(self._source, whole), beginning)
        for slot in slots:
            if slot.saved is None:
                self._remake.slots.setdefault(trace.entries[slot.number].segment, []).append(weakref.ref(slot))
            slot.tensor = None
        self._end()

    def _adopt(self, trace: Trace, banned: set[int]) -> Program:
        """Follow the program of the policy: hold its sources, and keep what stays; return that which replays all."""
        whole = Program(trace, everything, self._min_bytes, banned)
        same = self._policy == everything
        program = self._remake.program = whole if same else Program(trace, self._policy, self._min_bytes, banned)
        for number, slot in enumerate(self._slots):
            stays = program.trace.entries[number].value not in program.dropped
            if stays and slot is not None and slot.tensor is not None and slot.saved is None:
                slot.saved = self._packer.pack(slot.tensor)
        held = self._remake.held
        for value, place in program.inputs.items():
            held[value] = held.get(value) or self._packer.pack(self._inputs[place])
        for value, number in program.kept.items():
            slot = self._slots[number]
            assert slot is not None
            held[value] = slot.saved
        self._remake.note_versions()
        return whole

    def _source(self, program: Program, value: int) -> Tensor:
        """Return the tensor of a source of a program while the call holds what it saved."""
        if value in program.inputs:
            return self._inputs[program.inputs[value]]
        if value in program.weights:
            return self._remake.weight(program.weights[value])
        slot = self._slots[program.kept[value]]
        assert slot is not None
        assert slot.tensor is not None
        return slot.tensor

    def give_up(self) -> None:
        """Give what is not dropped to the engine: the call has failed."""
        rise()
        self._tracer.end()
        super().give_up()


# Backward


class _Latest(threading.local):
    """The call of which a part was filled last, in a backward that keeps its graph."""

    backward = NO_BACKWARD
    remake: Callable[[], Remake | None] = staticmethod(lambda: None)


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
    """Makes the dropped values of one call again, from its sources; the arguments are those of a `Call`."""

    program: Program  # of the call, as soon as it is known
    beginning: RngPosition | None = None  # of the call, if its program draws random numbers

    def __init__(self, modules: Sequence[Module], alarm: Alarm, name: str) -> None:
        self.modules, self._alarm, self.name = modules, alarm, name
        self.held: dict[int, Any] = {}  # by source: what the engine holds
        self.weights: dict[int, Tensor] = {}  # by source: parameters and buffers of the call
        self.versions: dict[int, int] = {}  # of these
        self.samples: dict[int, tuple[Where, Tensor]] = {}
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
                if entry.by_function and (len(program.saves[entry.value]) > 1 or entry.value in fill.needed):
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
        weight = self.program.weights.get(value)
        if weight is None:
            return unpack(self.held[value])
        tensor = self.weights[value]
        if is_freed(tensor):  # by FSDP2, which may gather it into another tensor
            tensor = self.weight(weight)
        if version_of(tensor) != self.versions[value]:  # [guard: weights that were edited]
            raise changed(tensor, tensor.size(), self.versions[value])
        return tensor

    def find_weights(self) -> None:
        """Find the weights where a call begins: the program may put others in their places, then or before backward."""
        modules = self.modules
        for value, weight in self.program.weights.items():
            tensor: Any = registered(modules[weight.module])[weight.table].get(weight.name)
            if type(tensor) in PLAIN:  # others are sharded, and gathered in the call
                self.weights[value] = tensor  # [guard: weights where the call begins]

    def note_versions(self) -> None:
        """Note the versions of weights as they are when the first part of what is made from them is dropped."""
        if len(self.versions) == len(self.program.weights):
            return
        for value, weight in self.program.weights.items():
            if value not in self.versions:
                if value not in self.weights:
                    self.weights[value] = self.weight(weight)
                self.versions[value] = version_of(self.weights[value])

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
