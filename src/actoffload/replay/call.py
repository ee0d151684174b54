"""One call of a module whose values are dropped at its end and made again in backward.

`[Note: a call]`  The pack hook compares each tensor that autograd saves with the entry of an earlier call.  A `Slot`
holds what will be dropped; all else goes to the engine, which keeps or offloads it.  Where a larger part of the module
has ended, and at the end of the call, the slots are emptied if everything agreed.  If something differs, the engine
gets what the slots hold, so nothing is lost.  The slots refer to a `Remake` that makes their tensors again, and
autograd alone refers to the slots: sources, and what was made again, live as long as the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from .._torch.modules import opaque
from .._torch.tensors import address, is_freed, leaves, version_of
from ..engine.hooks import Packer
from ..engine.statistics import Reason
from .policy import Policy, everything
from .program import ExpectedTensor, Program
from .proof import Alarm, Sample, Times, below_modes, prove, rise
from .remake import Remake, Slot
from .trace import UNKNOWN, RngPosition
from .tracer import Tracer


class Call:
    """One call of a module, in which a program is followed or found.

    Parameters
    ----------
    found : Program or Tracer
        What is dropped, and how it is made again; or what records the call, so that it is found out at its end.
    modules : sequence of torch.nn.Module
        The module that is called and all inside of it, in the order of ``modules()``.
    inputs : sequence of torch.Tensor
        The tensors among the arguments.
    packer : Packer
        Of the engine.
    alarm : Alarm
        Compares values with those that are made again.
    name : str
        Of the module, for errors.
    proves : bool
        Whether all values are made again and compared at the end of the call.
    compares_all : bool
        Whether all dropped values are compared in backward, by a sum over their bits, and not samples of some.
    timed : callable, optional
        Times the operators of a program that is proven, given what returns its sources and the beginning of the call.
    """

    def __init__(
        self,
        found: Program | Tracer,
        modules: Sequence[Module],
        inputs: Sequence[Tensor],
        packer: Packer,
        alarm: Alarm,
        name: str,
        *,
        proves: bool = False,
        compares_all: bool = False,
        timed: Callable[[Program, Callable[[int], Tensor], RngPosition | None], Times] | None = None,
    ) -> None:
        self.agrees = True
        self.times: tuple[Program, Times] | None = None  # of all operators that can run again
        self.proven_bytes = 0
        self._remake, self._packer, self._timed = Remake(modules, alarm, name), packer, timed
        self._compares_all = compares_all
        self._slots: list[Slot | None] = []
        self._expected: Sequence[ExpectedTensor | None] = ()  # what is saved in a call that follows a program
        self._first: dict[int, int] = {}  # by dropped value: the address of its first saved tensor
        self.tracer = found if isinstance(found, Tracer) else None
        self._proves = proves or self.tracer is not None
        self._inputs = inputs
        self._drops_at: Mapping[int, Sequence[int]] = {}  # a proof drops what it has compared
        if isinstance(found, Program):
            self._remake.program, self._expected = found, found.expected
            self._remake.beginning = RngPosition.read() if found.trace.drawn else None
            self._drops_at = {} if proves else found.drops_at
            self._remake.find_weights()
            for value, place in found.inputs:
                self._remake.held[value] = packer.pack(inputs[place])

    @property
    def program(self) -> Program:
        """What is dropped, and how it is made again; found at the end of a call that is traced."""
        return self._remake.program

    # Forward

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds for a tensor that it saves; the pack hook."""
        slots, every = self._slots, self._expected
        number = len(slots)
        if number >= len(every):
            if self.tracer is not None:
                return self._pack_traced(tensor, self.tracer)
            self._expected, self.agrees = (), False  # [guard: calls that save more]
            return self._packer.pack(tensor)
        expected, slot = every[number], None
        if expected is None:
            saved: Any = self._packer.pack(tensor)
        else:
            dtype, size, stride, offset, value, is_dropped, is_shared, source = expected
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
            elif source >= 0 and tensor is self._inputs[source]:
                saved = self._remake.held[value]
            else:
                saved, slot = self._pack_kept(tensor, number, value)
        slots.append(slot)
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

    def _pack_kept(self, tensor: Tensor, number: int, value: int) -> tuple[Any, Slot | None]:
        """Return what autograd holds for a tensor that is not dropped, and the slot of its entry if it has one."""
        program, packer = self.program, self._packer
        if number in program.stays:
            saved: Any = packer.keep(tensor, Reason.PARAMETER)
        else:
            saved = packer.pack(tensor)
            if packer.reason is Reason.PARAMETER:
                program.stays.add(number)
        by_function = False
        if program.kept_at.get(value) == number:
            self._remake.held[value] = saved
            by_function = program.trace.entries[number].by_function
        if not (self._proves or by_function):
            return saved, None
        slot = Slot(self._remake, number, tensor)
        slot.saved = saved
        slot.tensor = tensor if self._proves else None
        return slot if by_function else saved, slot

    def _pack_traced(self, tensor: Tensor, tracer: Tracer) -> Any:
        entry = tracer.save(tensor)
        tracer.paused = True
        try:
            if entry.value == UNKNOWN:
                self._slots.append(None)
                return self._packer.pack(tensor)
            slot = Slot(self._remake, len(self._slots), tensor)
            self._slots.append(slot)
            if tracer.values[entry.value].maker != UNKNOWN or entry.by_function:
                return slot
            saved = slot.saved = self._packer.pack(tensor)
            return saved
        finally:
            tracer.paused = False

    def finish(self, outputs: Any, policy: Policy, min_bytes: int) -> None:
        """End a call that has returned `outputs`: drop what can be made again, or give it to the engine.

        A traced call finds its program for a policy, in which values of fewer than `min_bytes` stay.
        """
        slots = self._slots
        written = {
            k
            for k, slot in enumerate(slots)
            if slot is not None
            and slot.tensor is not None
            and (version_of(slot.tensor) != slot.version or (self._proves and is_freed(slot.tensor)))
        }
        if self.tracer is not None:
            tracer, self.tracer = self.tracer, None
            tracer.end()
            trace, self._remake.beginning = tracer.result(leaves(outputs)), tracer.drawing.beginning
            # [guard: values that are written in place after they were saved]
            banned = {trace.entries[k].value for k in written}
            self._adopt(Program(trace, policy, min_bytes, banned))
            self._run_proof(whole=True)
        elif (
            not self.agrees
            or written
            or len(slots) != len(self._expected)
            or not self._drew_as_traced(self.program.trace.drawn)
        ):
            self.agrees = False  # calls that save less
            self.give_up()
            return
        else:
            self._remake.note_versions()
            if self._proves:
                self._run_proof(whole=False)
        self._drop(range(len(slots)))
        self._remake.whole = self.program.policy.holds
        self._packer.end()

    def _adopt(self, program: Program) -> None:
        """Follow a program that was found when the call had saved its tensors: hold sources, and keep what stays."""
        self._remake.program = program
        for number, slot in enumerate(self._slots):
            stays = program.trace.entries[number].value not in program.dropped
            if stays and slot is not None and slot.tensor is not None and slot.saved is None:
                slot.saved = self._packer.pack(slot.tensor)
        for value, source in program.sources.items():
            if value not in self._remake.held and type(source) is int:
                self._remake.held[value] = self._packer.pack(self._inputs[source])
            elif value not in self._remake.held and source is None:
                slot = self._slots[program.kept_at[value]]
                assert slot is not None
                self._remake.held[value] = slot.saved
        self._remake.note_versions()

    def _run_proof(self, *, whole: bool) -> None:
        """Make values again and compare them: of the program, or of all operators that can run again if `whole`."""
        program, slots = self.program, self._slots
        if whole or self._timed is not None:
            program = Program(program.trace, everything, program.min_bytes, program.banned)
        entries = program.trace.entries
        inputs = self._inputs

        def saved_values(program: Program) -> dict[int, Tensor | None]:
            """Return the values that a program keeps; of no other one, because they are dropped one by one."""
            kept = program.kept_at
            found = {entries[k].value: slot.tensor for k, slot in enumerate(slots) if slot and entries[k].value in kept}
            return found | {value: slot.tensor for value, k in kept.items() if (slot := slots[k]) is not None}

        real = saved_values(program)

        def source(value: int) -> Tensor:
            found = program.sources[value]
            tensor = real[value] if found is None else inputs[found] if type(found) is int else None
            return self._remake.weight(found) if tensor is None else tensor  # type: ignore[arg-type]

        saved = {k: slot for k, slot in enumerate(slots) if slot is not None and k in program.reads}
        droppable = {k for k in saved if entries[k].value in self.program.dropped}
        beginning = self._remake.beginning
        banned = prove(program, source, saved, droppable, beginning, pure=not whole)
        self.proven_bytes = program.dropped_bytes
        if banned:
            policy, banned = self.program.policy, {*program.banned, *banned}
            self._adopt(Program(program.trace, policy, program.min_bytes, banned))
        if self._timed is not None:
            if banned:  # these values are kept, and read from where they were saved
                program = Program(program.trace, everything, program.min_bytes, banned)
                real |= saved_values(program)
            self.times = program, self._timed(program, source, beginning)

    def _drop(self, numbers: Sequence[int]) -> None:
        """Empty the slots of some entries, and leave samples of what was not proven."""
        program, slots, whole = self.program, self._slots, self._compares_all
        entries, by_segment = program.trace.entries, self._remake.slots
        sampled = program.firsts if whole else program.samples
        samples: dict[int, Tensor] = {}
        for number in numbers:
            slot = slots[number]
            if slot is None:
                continue
            if slot.tensor is not None and number in sampled:
                samples[sampled[number]] = slot.tensor
            if slot.saved is None and (slot.tensor is not None or self._proves):  # a proof has emptied slots before
                by_segment.setdefault(entries[number].segment, []).append(weakref.ref(slot))
            slot.tensor = None
        if not samples:
            return
        with below_modes:
            for value, tensor in samples.items():
                sample = Sample.take(program.trace.values[value], tensor.detach(), whole=whole)
                if sample is not None:
                    self._remake.samples[value] = sample

    def give_up(self) -> None:
        """Give what is not dropped to the engine: the call differs from the one that was traced, or has failed."""
        rise()
        if self.tracer is not None:
            self.tracer.end()
            self.tracer = None
        for slot in self._slots:
            if slot is None or slot.tensor is None:
                continue
            if version_of(slot.tensor) != slot.version:
                slot.tensor = slot.tensor.detach()  # for the error; itself it would close a cycle
            else:
                slot.saved = slot.saved or self._packer.pack(slot.tensor)
                slot.tensor = None
        self._packer.end()
