"""One call of a module whose values are dropped at its end and made again in backward.

`[Note: a call]`  A call follows the program that an earlier one has left, or is traced and finds one, which is proven
at its end.  A `Slot` holds a saved tensor that may be dropped; all else goes to the engine, which keeps or offloads it.
A call that follows a program compares each saved tensor with the traced one.  Where a larger part of the module has
ended, and at the end of the call, the slots are emptied if everything agreed.  If something differs, the engine gets
what the slots hold, so nothing is lost.  The slots refer to a `Remake` that makes their tensors again, and autograd
alone refers to the slots: sources, and what was made again, live as long as the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Module

from .._torch.modules import opaque
from .._torch.tensors import address, is_freed, leaves
from ..engine.hooks import Packer
from .policy import Policy, everything
from .program import ExpectedTensor, Program, Saved
from .proof import Alarm, Sample, Times, below_modes, prove, rise
from .remake import Remake, Slot
from .trace import UNKNOWN, RngPosition, Weight
from .tracer import Tracer

Timer: TypeAlias = Callable[[Program, Callable[[int], Tensor], RngPosition | None], Times]
"""Times the operators of a program, given what returns its sources and the beginning of its call."""


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

    def _empty(self, slot: Slot) -> None:
        """Drop the tensor of a slot, which is made again with its part."""
        segment = self.program.trace.entries[slot.number].segment
        self._remake.slots.setdefault(segment, []).append(weakref.ref(slot))
        slot.tensor = None

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
        self._remake.program = program
        self._remake.beginning = RngPosition.read() if program.trace.drawn else None
        self._remake.find_weights()
        for value, place in program.inputs:
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
        drops = self.program.drops_at.get(number)
        if drops is not None:
            if not self._drew_as_traced(self.program.trace.entries[number].drawn):
                self._expected, self.agrees = (), False
                return saved
            self._remake.note_versions()  # [guard: calls that differ, or read again, when a part of them is dropped]
            self._drop(drops)
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
        slots = self._slots
        edited = any(slot is not None and slot.is_edited for slot in slots)
        complete = len(slots) == len(self._expected)  # calls that save less
        if not self.agrees or edited or not complete or not self._drew_as_traced(self.program.trace.drawn):
            self.agrees = False
            self.give_up()
            return
        self._remake.note_versions()
        self._drop(range(len(slots)))
        self._end()

    def _drop(self, numbers: Iterable[int]) -> None:
        """Empty the slots of some entries, and leave samples of what they hold."""
        program, whole = self.program, self._compares_all
        sampled = program.firsts if whole else program.samples
        with below_modes:
            for number in numbers:
                slot = self._slots[number]
                if slot is None or slot.tensor is None:
                    continue
                value = sampled.get(number)
                if value is not None:
                    sample = Sample.take(program.trace.values[value], slot.tensor.detach(), whole=whole)
                    if sample is not None:
                        self._remake.samples[value] = sample
                self._empty(slot)


class TracedCall(Call):
    """A call that is traced, and finds at its end what a policy drops; values of fewer than `min_bytes` stay."""

    times: tuple[Program, Times] | None = None  # of all operators that can run again
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
        trace, self._remake.beginning = tracer.result(leaves(outputs)), tracer.drawing.beginning
        changed = [slot for slot in slots if slot.tensor is not None and (slot.is_edited or is_freed(slot.tensor))]
        # [guard: values that are written in place after they were saved]
        banned = {trace.entries[slot.number].value for slot in changed}
        self._adopt(Program(trace, self._policy, self._min_bytes, banned))
        whole = Program(trace, everything, self._min_bytes, banned)
        saved = {slot.number: slot for slot in slots if slot.number in whole.reads}
        beginning = self._remake.beginning
        differing = prove(whole, partial(self._source, whole), saved, self.program.dropped, beginning)
        self.proven_bytes = whole.dropped_bytes
        if differing:  # these values are kept, and read from where they were saved
            banned |= differing
            self._adopt(Program(trace, self._policy, self._min_bytes, banned))
            whole = Program(trace, everything, self._min_bytes, banned)
        if self._timer is not None:
            self.times = whole, self._timer(whole, partial(self._source, whole), beginning)
        for slot in slots:
            if slot.saved is None:
                self._empty(slot)
            slot.tensor = None
        self._end()

    def _adopt(self, program: Program) -> None:
        """Follow a program that was found when the call had saved its tensors: hold sources, and keep what stays."""
        self._remake.program = program
        for number, slot in enumerate(self._slots):
            stays = program.trace.entries[number].value not in program.dropped
            if stays and slot is not None and slot.tensor is not None and slot.saved is None:
                slot.saved = self._packer.pack(slot.tensor)
        for value, source in program.sources.items():
            if value not in self._remake.held and isinstance(source, int):
                self._remake.held[value] = self._packer.pack(self._inputs[source])
            elif value not in self._remake.held and isinstance(source, Saved):
                slot = self._slots[source.entry]
                assert slot is not None
                self._remake.held[value] = slot.saved
        self._remake.note_versions()

    def _source(self, program: Program, value: int) -> Tensor:
        """Return the tensor of a source of a program while the call holds what it saved."""
        source = program.sources[value]
        if isinstance(source, int):
            return self._inputs[source]
        if isinstance(source, Weight):
            return self._remake.weight(source)
        slot = self._slots[source.entry]
        assert slot is not None
        assert slot.tensor is not None
        return slot.tensor

    def give_up(self) -> None:
        """Give what is not dropped to the engine: the call has failed."""
        rise()
        self._tracer.end()
        super().give_up()
