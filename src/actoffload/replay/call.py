"""One call of a module whose values are dropped at its end and made again in backward.

A call follows the program of an earlier one, or is traced and finds one, which is proven at its end.  A `Slot` holds a
saved tensor that may be dropped; all else goes to the engine.  A call that follows a program compares each saved tensor
with the traced one.  Where a larger part of the module has ended, and at the end of the call, the slots are emptied if
everything agreed.  If something differs, the engine gets what the slots hold, so nothing is lost.

`[Note: filled slots]`  Autograd alone refers to the slots, and they to the call: sources, and what was made again, live
as long as the graph.  The first read of a part of the program makes all of it, and each slot gets its tensor.  Autograd
frees a slot right after the node that it was saved for.  If backward keeps its graph, as that of the inputs of a
pipeline stage does, slots are emptied when it comes to another part or another call, and at its end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from .._torch.modules import opaque, registered
from .._torch.subclasses import plain_parts
from .._torch.tensors import (
    NO_BACKWARD,
    address,
    after_backward,
    backward_id,
    current_dispatch_mode,
    is_freed,
    keeps_graph,
    leaves,
    version_of,
)
from ..engine.hooks import Packer, unpack
from .policy import Policy, everything
from .program import WHOLE, Drop, ExpectedTensor, Program, Where, copy_of, on_value, run
from .proof import Alarm, below_everything, prove, rise, sample
from .trace import PLAIN, UNKNOWN, Node, RngPosition, Weight
from .tracer import Tracer


class Slot:
    """What autograd holds for a saved tensor: the tensor itself, what the engine holds, or the call that makes it."""

    __slots__ = ("__weakref__", "call", "number", "saved", "tensor", "version")

    def __init__(self, call: Call, number: int, tensor: Tensor) -> None:
        self.call, self.number, self.version = call, number, version_of(tensor)
        self.tensor: Tensor | None = tensor  # itself, not an alias: the call takes it out again before it ends
        self.saved: Any = None

    def keep_edited(self) -> bool:
        """Return whether the tensor was written to since it was saved; then it stays, for the error of autograd."""
        # [guard: values that are written in place after they were saved -> True]
        if self.tensor is None or version_of(self.tensor) == self.version:
            return False
        self.tensor = self.tensor.detach()  # itself it would close a cycle
        return True

    def unpack(self) -> Tensor:
        """Return the tensor, for autograd."""
        if self.tensor is not None:
            kept: Any = self.tensor, self.version, None
            return unpack(kept)
        return self.call.fetch(self) if self.saved is None else self.call.fetch_saved(self)


def _hold(tensor: Tensor) -> Any:
    """Return a tensor as the engine holds one that it keeps: `unpack` raises autograd's error if it is written to."""
    return tensor, version_of(tensor), None


_latest = threading.local()
"""The latest `backward` of a thread that keeps its graph, and a weak reference to the `call` that it came to last."""


class Call:
    """One call of a module; when its forward has ended, it makes the values that were dropped.

    `modules` are the called one and all inside of it, in the order of ``modules()``; `inputs` its tensor arguments.
    """

    agrees = True  # with the program that it follows
    program: Program  # what is dropped, and how it is made again; found at the end of a call that is traced
    kind: Any = None  # for what begins it, until its forward ends
    _beginning: RngPosition | None = None  # if its program draws random numbers
    _packer: Any  # None behind its forward
    _tracer: Any = None  # while its forward is traced

    def __init__(
        self, modules: Sequence[Module], inputs: Sequence[Tensor], packer: Packer, alarm: Alarm, name: str
    ) -> None:
        self._modules, self._alarm, self._name = modules, alarm, name
        # In forward.
        self._inputs, self._packer = inputs, packer
        self._slots: list[Any] = []  # by entry; None for what is not dropped
        # In backward.
        self._held: dict[int, Any] = {}  # by source: what the engine holds, or a weight
        self._samples: dict[int, tuple[Where, Tensor]] = {}
        self._dropped: dict[int, weakref.ref[Slot]] = {}  # by entry
        self._values: dict[int, Any] = {}  # made for parts that are not filled
        self._filled: set[int] = set()
        self._frees = False  # a backward has freed a part of its graph
        self._lock = threading.RLock()

    # Forward

    def _end(self) -> None:
        """End the forward: autograd alone holds what is left."""
        if self._packer is not None:
            self._packer.end()
        self._inputs, self._slots, self._packer, self._tracer, self.kind = (), [], None, None, None

    def give_up(self) -> None:
        """Give what is not dropped to the engine: the call differs from the one that was traced, or has failed."""
        rise()
        if self._tracer is not None:
            self._tracer.end()
        for slot in self._slots:
            if slot is not None and slot.tensor is not None and not slot.keep_edited():
                slot.saved = slot.saved or self._packer.pack(slot.tensor)
                slot.tensor = None
        self._end()

    def _drop_slots(self, slots: Iterable[Slot | None]) -> None:
        for slot in slots:
            if slot is None or slot.keep_edited():
                continue
            if slot.saved is None:
                self._dropped[slot.number] = weakref.ref(slot)
            slot.tensor = None

    def _hold_sources(self) -> None:
        """Hold what the program reads and is not held, when the first part of what is made from it is dropped."""
        program, held = self.program, self._held
        for value, place in program.inputs.items():
            if value not in held:
                held[value] = self._packer.pack(self._inputs[place])
        for value, weight in program.weights.items():
            if value not in held:
                held[value] = _hold(self._weight(weight))

    def _weight(self, source: Weight) -> Tensor:
        """Return a parameter or buffer as it is now."""
        whole = registered(self._modules[source.module])[source.table].get(source.name)
        if type(whole) is Parameter:
            return whole
        parts = [] if whole is None else plain_parts(whole)
        if source.part >= len(parts):
            raise RuntimeError(
                f"A weight of {self._name} is not there while its values are computed again in backward: it was "
                "replaced, or its sharded module has not gathered it. Pass keep=[...] with the name of the module, or "
                "recompute=False."
            )
        return parts[source.part]

    # Backward

    def fetch_saved(self, slot: Slot) -> Tensor:
        """Return a kept tensor to a function whose backward may write to it."""
        tensor = unpack(slot.saved)
        entry = self.program.trace.entries[slot.number] if self._held else None
        # [guard: functions that write to what programs read]
        return copy_of(tensor) if entry and entry.by_function and entry.value in self._held else tensor

    def fetch(self, slot: Slot) -> Tensor:
        """Make the part of a dropped tensor again, and return the tensor."""
        try:
            with self._lock:
                if slot.tensor is None:
                    # Before the end of its forward, parts are made that are dropped.
                    whole = self.program.policy.holds and self._packer is None
                    self._fill(WHOLE if whole else self.program.trace.entries[slot.number].segment)
                tensor = slot.unpack()
                if backward_id() == NO_BACKWARD:
                    self._empty()
                return tensor
        except BaseException as error:
            rise()  # replay that fails
            if isinstance(error, Exception):
                error.add_note(f"This was raised in backward, while values of {self._name} were computed again.")
            raise

    opaque(fetch)

    def _fill(self, part: int) -> None:
        """Make a part, and give its slots their tensors; see [Note: filled slots]."""
        program, now = self.program, backward_id()
        frees = now != NO_BACKWARD and not keeps_graph()
        if not frees:
            before = _latest.call() if now == getattr(_latest, "backward", None) else None
            if before is not None and before is not self:
                before._empty()
            _latest.backward, _latest.call = now, weakref.ref(self)
            self._empty_slots()
            if now != NO_BACKWARD:
                after_backward(self._empty)
        values = {value: unpack(made) for value, made in self._values.items()}
        others = frozenset() if part == WHOLE else frozenset(program.parts.keys() - self._filled - {part})
        fill = program.fill(part, frozenset(values), others)
        with below_everything:
            for step in run(fill.lines, self._source, values, self._beginning):
                for _, value in step.made:
                    self._alarm.backend.made(values[value])
                    if value in self._samples:
                        self._alarm.compare(self._samples.pop(value), values[value], self._name, step.node)
            for number in program.reads if part == WHOLE else program.parts[part]:
                slot = ref() if (ref := self._dropped.get(number)) is not None else None
                if slot is None or slot.tensor is not None:
                    continue
                entry = program.trace.entries[number]
                tensor = on_value(values[entry.value], program.reads[number])
                if entry.by_function and (len(program.saves[entry.value]) > 1 or entry.value in fill.needed):
                    tensor = copy_of(tensor)  # functions that write to values
                slot.tensor, slot.version = tensor, version_of(tensor)
        self._filled.add(part)
        self._values = {value: _hold(values[value]) for value in fill.held}
        if frees:
            self._frees = True
            self._held = {value: saved for value, saved in self._held.items() if value in fill.needed}

    def _empty(self) -> None:
        """Empty the slots that were filled: what backward needs once more is made again."""
        self._filled = set()
        if not self._frees:  # otherwise sources may be gone
            self._values = {}
        self._empty_slots()

    def _empty_slots(self) -> None:
        for ref in self._dropped.values():
            slot = ref()
            if slot is not None:
                slot.tensor = None

    def _source(self, value: int) -> Tensor:
        saved, weight = self._held[value], self.program.weights.get(value)
        if weight is not None and is_freed(saved[0]):  # by FSDP2, which may gather it into another tensor
            saved = self._weight(weight), *saved[1:]
        return unpack(saved)


class FollowingCall(Call):
    """A call that follows a program.

    If it `compares_all`, backward compares a sum over the bits of each dropped value, and not samples of some.
    """

    def __init__(self, program: Program, *common: Any, compares_all: bool = False) -> None:
        super().__init__(*common)
        self.program, self._compares_all = program, compares_all
        self._expected: Sequence[ExpectedTensor] = program.expected  # none once something differs
        if program.redraws:
            self._beginning = RngPosition.read()
        # The program may put other weights in their places, then or before backward.
        for value, weight in program.weights.items():
            tensor: Any = registered(self._modules[weight.module])[weight.table].get(weight.name)
            if type(tensor) in PLAIN:  # others are sharded, and gathered in the call
                self._held[value] = _hold(tensor)  # [guard: weights where the call begins]
        for value, place in program.inputs.items():
            self._held[value] = self._packer.pack(self._inputs[place])

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds for a tensor that it saves; the pack hook."""
        slots = self._slots
        number, slot = len(slots), None
        if number >= len(self._expected):
            self.agrees = False  # [guard: calls that save more]
            return self._packer.pack(tensor)
        dtype, size, stride, offset, value, first, is_source, place, drop = self._expected[number]
        if dtype is None:
            saved: Any = self._packer.pack(tensor)
        elif (  # [guard: saved tensors of another size]
            tensor.dtype is not dtype
            or tensor.size() != size
            or tensor.stride() != stride
            or (offset >= 0 and tensor.storage_offset() != offset)  # [guard: saved tensors that lie elsewhere]
            or (first >= 0 and address(slots[first].tensor.untyped_storage()) != address(tensor.untyped_storage()))
        ):
            return self._differ(tensor)
        elif offset >= 0:
            saved = slot = Slot(self, number, tensor)
        elif place >= 0 and tensor is self._inputs[place]:
            saved = self._held[value]
        else:
            saved = self._packer.pack(tensor)
            if is_source:
                self._held[value] = saved
                if self.program.trace.entries[number].by_function:
                    slot = Slot(self, number, tensor)
                    slot.saved, slot.tensor = saved, None
                    saved = slot
        slots.append(slot)
        if drop is not None and not self._drop(drop):
            self._expected, self.agrees = (), False
        return saved

    opaque(pack)

    def _differ(self, tensor: Tensor) -> Any:
        self._expected, self.agrees = (), False
        return self._packer.pack(tensor)

    def finish(self, outputs: Any) -> None:
        """End a call that has returned `outputs`: drop what can be made again, or give it to the engine."""
        complete = self.agrees and len(self._slots) == len(self._expected)  # calls that save less
        self.agrees = complete and self._drop(self.program.last_drop)
        if self.agrees:
            self._end()
        else:
            self.give_up()

    def _drop(self, drop: Drop) -> bool:
        """Empty slots, and leave samples of what they hold; return False if the call drew other random numbers."""
        beginning, slots = self._beginning, self._slots
        if self.program.redraws and (beginning is None or beginning.count_drawn() != drop.drawn):
            return False  # [guard: calls that draw more random numbers]
        self._hold_sources()
        compared = drop.sums if self._compares_all else drop.samples
        # Dispatch modes count what is made.
        with nullcontext() if current_dispatch_mode() is None else below_everything:
            for number, value, where in compared:
                slot = slots[number]
                if not (slot.keep_edited() or is_freed(slot.tensor)):
                    self._samples[value] = where, sample(slot.tensor, where)
        self._drop_slots([slots[number] for number in drop.entries])
        return True


class TracedCall(Call):
    """A call that is traced, and finds at its end what a policy drops; values of fewer than `min_bytes` stay.

    A `timer` is called with all that can be made again, a function that returns its sources, and the beginning.
    """

    proven_bytes = 0

    def __init__(self, tracer: Tracer, policy: Policy, min_bytes: int, timer: Any, *common: Any) -> None:
        super().__init__(*common)
        self._tracer, self._policy, self._min_bytes, self._timer = tracer, policy, min_bytes, timer

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds for a tensor that it saves; the pack hook."""
        tracer = self._tracer
        entry = tracer.save(tensor)
        slot = None if entry.value == UNKNOWN else Slot(self, len(self._slots), tensor)
        self._slots.append(slot)
        if slot is not None and (entry.by_function or isinstance(tracer.values[entry.value].origin, Node)):
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
        self._tracer.end()
        trace, self._beginning = self._tracer.result(leaves(outputs)), self._tracer.beginning
        banned = set[int]()
        while True:
            whole = self.program = Program(trace, everything, self._min_bytes, banned)
            if self._policy != everything:
                self.program = Program(trace, self._policy, self._min_bytes, banned)
            self._keep_rest(self.program)
            source = partial(self._source_of, whole)
            differing = prove(whole, source, self._slots, self.program.dropped, self._beginning)
            if not differing:
                break
            banned |= differing  # these values are kept, and read from where they were saved
        self.proven_bytes = whole.dropped_bytes
        if self._timer is not None:
            self._timer(whole, source, self._beginning)
            self._timer = None
        self._drop_slots(self._slots)
        self._end()

    def _keep_rest(self, program: Program) -> None:
        """Keep what a program does not drop, and hold what it reads."""
        for slot in self._slots:
            waits = slot is not None and slot.tensor is not None and slot.saved is None
            if waits and program.trace.entries[slot.number].value not in program.dropped:
                slot.saved = self._packer.pack(slot.tensor)
        self._hold_sources()
        self._held |= {value: self._slots[number].saved for value, number in program.kept.items()}

    def _source_of(self, program: Program, value: int) -> Tensor:
        """Return a source of a program before the slots are emptied."""
        if value in program.inputs:
            return self._inputs[program.inputs[value]]
        if value in program.weights:
            return self._weight(program.weights[value])
        tensor: Tensor = self._slots[program.kept[value]].tensor
        return tensor
