"""One call of a module whose values are dropped at its end and made again in backward.

`[Note: a call]`  The pack hook compares each tensor that autograd saves with the entry of an earlier call.  A `Slot`
holds what will be dropped; all else goes to the engine, which keeps or offloads it.  Where a larger part of the module
has ended, and at the end of the call, the slots are emptied if everything agreed.  If something differs, the engine
gets what the slots hold, so nothing is lost.  The slots refer to the call, and autograd alone refers to the slots:
sources, and what was made again, live as long as the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from .._torch.autograd import NO_BACKWARD, after_backward, backward_id, keeps_graph
from .._torch.modules import opaque, registered
from .._torch.subclasses import changed, plain_parts
from .._torch.tensors import address, is_freed, version_of
from ..engine.hooks import Packer, unpack
from ..engine.statistics import Reason
from .policy import Policy, everything
from .program import Expected, Program, copy_of, on_value
from .proof import Alarm, Sample, Times, below_everything, prove, rise
from .trace import UNKNOWN, Weight, leaves
from .tracer import Tracer

__all__ = ["Call", "Slot"]

GATHERED = (
    "A weight of {module} is not there while its values are computed again in backward: it was replaced, or its "
    "sharded module has not gathered it. Pass keep=[...] with the name of the module, or recompute=False."
)


class Slot:
    """What autograd holds for a saved tensor: the tensor itself, what the engine holds, or the call that makes it."""

    __slots__ = ("__weakref__", "call", "number", "read", "saved", "tensor", "version")

    def __init__(self, call: Call, number: int, tensor: Tensor) -> None:
        self.call, self.number = call, number
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
            return self.call.fetch_saved(self)
        return self.call.fetch(self)


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
        Times the operators of a program that is proven, given what returns its sources.
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
        timed: Callable[[Program, Callable[[int], Tensor]], Times] | None = None,
    ) -> None:
        self.name = name
        self.agrees = True
        self.times: tuple[Program, Times] | None = None  # of all operators that can run again
        self.proven_bytes = 0
        self._modules, self._packer, self._alarm, self._timed = modules, packer, alarm, timed
        self._compares_all = compares_all
        self._slots: list[Slot | None] = []
        self._expected: Sequence[Expected | None] = ()  # what is saved in a call that follows a program
        self._lock = threading.RLock()
        self._held: dict[int, Any] = {}  # by source: what the engine holds
        self._versions: dict[int, int] = {}  # of weights
        self._first: dict[int, int] = {}  # by dropped value: the address of its first saved tensor
        self._samples: dict[int, Sample] = {}
        self._values: dict[int, Tensor] = {}  # that were made again
        self._counts: dict[int, int] = {}
        self._pending: dict[int, int] = {}  # empty before the first backward
        self._backward = NO_BACKWARD
        self.tracer = found if isinstance(found, Tracer) else None
        self._proves = proves or self.tracer is not None
        self._inputs = inputs
        if isinstance(found, Program):
            self.program, self._expected = found, found.expected
            for value, place in found.inputs:
                self._held[value] = packer.pack(inputs[place])

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
                saved = slot = Slot(self, number, tensor)
            elif source >= 0 and tensor is self._inputs[source]:
                saved = self._held[value]
            else:
                stays = self.program.stays
                if number in stays:
                    saved = self._packer.keep(tensor, Reason.PARAMETER)
                else:
                    saved = self._packer.pack(tensor)
                    if self._packer.reason is Reason.PARAMETER:
                        stays.add(number)
                by_function = False
                if self.program.kept_at.get(value) == number:
                    self._held[value] = saved
                    by_function = self.program.trace.entries[number].by_function
                if self._proves or by_function:
                    slot = Slot(self, number, tensor)
                    slot.saved = saved
                    slot.tensor = tensor if self._proves else None
                    saved = slot if by_function else saved
        slots.append(slot)
        if number in self.program.drops_at and not self._proves:
            self._note_versions()  # [guard: calls that differ, or read again, when a part of them is dropped]
            self._drop(self.program.drops_at[number])
        return saved

    opaque(pack)

    def _shares(self, value: int, tensor: Tensor) -> bool:
        """Return whether a tensor lies on the storage on which the first one of a dropped value lies."""
        place = address(tensor.untyped_storage())
        return self._first.setdefault(value, place) == place

    def _pack_traced(self, tensor: Tensor, tracer: Tracer) -> Any:
        entry = tracer.save(tensor)
        tracer.paused = True
        try:
            if entry.value == UNKNOWN:
                self._slots.append(None)
                return self._packer.pack(tensor)
            slot = Slot(self, len(self._slots), tensor)
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
            trace = tracer.result(leaves(outputs))
            # [guard: values that are written in place after they were saved]
            banned = {trace.entries[k].value for k in written}
            self._adopt(Program(trace, policy, min_bytes, banned))
            self._run_proof(whole=True)
        elif not self.agrees or written or len(slots) != len(self._expected):
            self.agrees = False  # calls that save less
            self.give_up()
            return
        else:
            self._note_versions()
            if self._proves:
                self._run_proof(whole=False)
        self._drop(range(len(slots)))
        self._leave()

    def _leave(self) -> None:
        """Drop what only the forward needs: slots refer to the call, and the pack hook to the pass."""
        self._slots, self._inputs = [], ()  # [guard: cycle of slots and their call]
        self._packer.end()

    def _note_versions(self) -> None:
        """Note the versions of weights as they are when the first part of what is made from them is dropped."""
        versions, modules = self._versions, self._modules
        if len(versions) == len(self.program.weights):
            return
        for value, weight in self.program.weights:
            if value not in versions:
                tensor = registered(modules[weight.module])[weight.table].get(weight.name)
                versions[value] = version_of(tensor if type(tensor) is Parameter else self._weight(weight))

    def _adopt(self, program: Program) -> None:
        """Follow a program that was found when the call had saved its tensors: hold sources, and keep what stays."""
        self.program = program
        for number, slot in enumerate(self._slots):
            stays = program.trace.entries[number].value not in program.dropped
            if stays and slot is not None and slot.tensor is not None and slot.saved is None:
                slot.saved = self._packer.pack(slot.tensor)
        for value, source in program.sources.items():
            if value not in self._held and type(source) is int:
                self._held[value] = self._packer.pack(self._inputs[source])
            elif value not in self._held and source is None:
                slot = self._slots[program.kept_at[value]]
                assert slot is not None
                self._held[value] = slot.saved
        self._note_versions()

    def _run_proof(self, *, whole: bool) -> None:
        """Make values again and compare them: of the program, or of all operators that can run again if `whole`."""
        program, slots = self.program, self._slots
        if whole or self._timed is not None:
            program = Program(program.trace, everything, program.min_bytes, program.banned)
        entries = program.trace.entries
        inputs = self._inputs

        def saved_values(program: Program) -> dict[int, Tensor | None]:
            """Return the values that a program keeps; of no other one, because they are dropped one by one."""
            kept = {value for value, found in program.sources.items() if found is None}
            found = {entries[k].value: slot.tensor for k, slot in enumerate(slots) if slot and entries[k].value in kept}
            return found | {
                value: slot.tensor for value, k in program.kept_at.items() if (slot := slots[k]) is not None
            }

        real = saved_values(program)

        def source(value: int) -> Tensor:
            found = program.sources[value]
            tensor = real[value] if found is None else inputs[found] if type(found) is int else None
            return self._weight(found) if tensor is None else tensor  # type: ignore[arg-type]

        saved = {k: slot for k, slot in enumerate(slots) if slot is not None and k in program.reads}
        droppable = {k for k in saved if entries[k].value in self.program.dropped}
        banned = prove(program, source, saved, droppable, pure=not whole)
        self.proven_bytes = program.dropped_bytes
        if banned:
            policy, banned = self.program.policy, {*program.banned, *banned}
            self._adopt(Program(program.trace, policy, program.min_bytes, banned))
        if self._timed is not None:
            if banned:  # these values are kept, and read from where they were saved
                program = Program(program.trace, everything, program.min_bytes, banned)
                real |= saved_values(program)
            self.times = program, self._timed(program, source)

    def _drop(self, numbers: Sequence[int]) -> None:
        """Empty the slots of some entries, and leave samples of what was not proven."""
        program, slots, whole = self.program, self._slots, self._compares_all
        sampled = program.firsts if whole else program.samples
        samples: dict[int, Tensor] = {}
        for number in numbers:
            slot = slots[number]
            if slot is not None and slot.tensor is not None:
                if number in sampled:
                    samples[sampled[number]] = slot.tensor
                slot.tensor = None
        if samples:
            with below_everything():
                for value, tensor in samples.items():
                    sample = Sample.take(value, program.trace.values[value], tensor, whole=whole)
                    if sample is not None:
                        self._samples[value] = sample

    def give_up(self) -> None:
        """Give what is not dropped to the engine: the call differs from the one that was traced, or has failed."""
        rise()
        if self.tracer is not None:
            self.tracer.end()
            self.tracer = None
        for slot in self._slots:
            if slot is not None and slot.tensor is not None and slot.edited:
                slot.tensor = slot.tensor.detach()  # for the error; itself it would close a cycle
            elif slot is not None and slot.tensor is not None:
                slot.saved = slot.saved or self._packer.pack(slot.tensor)
                slot.tensor = None
        self._leave()

    # Backward

    def fetch_saved(self, slot: Slot) -> Tensor:
        """Return a kept tensor to a function whose backward may write to it."""
        tensor = unpack(slot.saved)
        with self._lock:
            value = self.program.trace.entries[slot.number].value
            counts = self._counts or self.program.counts
            needed = (
                self.program.trace.entries[slot.number].by_function and value in self._held and counts.get(value, 0) > 0
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
            self._held.pop(value, None)

    def _is_partly_read(self, value: int) -> bool:
        return value in self._pending and 0 < self._pending[value] < self.program.pending[value]

    def _make(self, target: int, segment: int, *, counts: bool) -> None:
        """Run the operators that make a value, and free what is not needed soon; see [Note: what is held]."""
        program, values, held, samples = self.program, self._values, self.program.held, self._samples
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
            return unpack(self._held[value])
        tensor = self._weight(source)
        if version_of(tensor) != self._versions[value]:  # [guard: weights that were edited]
            raise changed(tensor, tensor.size(), self._versions[value])
        return tensor

    def _weight(self, source: Weight) -> Tensor:
        whole = registered(self._modules[source.module])[source.table].get(source.name)
        if type(whole) is Parameter:
            return whole
        parts = [] if whole is None else plain_parts(whole)
        if source.part >= len(parts):
            raise RuntimeError(GATHERED.format(module=self.name))
        return parts[source.part]
