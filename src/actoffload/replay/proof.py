"""Proof that values which are made again are the same, in all bits.

`[Note: samples]`  Behind a first call all values are made again and compared.  In later calls they leave a sample of
their bits: `ELEMENTS` at equal distances, of the values from which nothing else is made, and which therefore depend on
all others.  In one group a pass it is a sum over all bits of every value.  The device compares them when the values are
made again, without a synchronization, and an `Alarm` reads the result later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.tensors import (
    NO_BACKWARD,
    after_backward,
    backward_id,
    below_autograd,
    no_autocast,
    no_torch_dispatch,
)
from ..device.base import Backend, StreamEvent, current_stream
from .policy import rules_of
from .program import ELEMENTS, INTEGERS, Program, Step, Where, copy_of, on_value, run, run_step
from .trace import FunctionCall, Node, RngPosition, gpu_generator

ROWS = 1024  # comparisons whose results are read together
COMPARED = 1 << 26  # elements at a time
QUEUED = 1e-4  # seconds that the host takes at most for an operator and two events

_GUARDS = below_autograd, no_autocast, no_torch_dispatch


class _Below(threading.local):
    """Calls operators below autograd, autocast, dispatch modes and tensor subclasses, in any number of threads.

    The guards have to end in reverse order, or autograd stays off: freed with the frames of an interrupt, they would
    not.
    """

    def __init__(self) -> None:
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        for guard in _GUARDS:
            self._entered.append(guard())  # is in force from here on, and in no variable that a traceback keeps
            self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self.rise(len(self._entered) - len(_GUARDS))

    def rise(self, depth: int = 0) -> None:
        """End the guards of this thread until `depth` of them are left; may be repeated after an interrupt."""
        while len(self._entered) > depth:
            self._entered[-1].__exit__(None, None, None)
            self._entered.pop()


below_everything = _Below()
rise = below_everything.rise


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.itemsize])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same size and the same bits; waits for the device.

    A comparison needs a byte for each element, so large tensors are compared in parts.
    """
    if one.shape != other.shape:
        return False
    one, other = _bits(one), _bits(other)
    count = -(-one.numel() // COMPARED)
    if count <= 1:
        return torch.equal(one, other)
    longest = max(range(one.dim()), key=one.size)
    return all(map(torch.equal, one.chunk(count, longest), other.chunk(count, longest)))


# Proof behind a call

Times = list[tuple[StreamEvent, StreamEvent]]
"""Events around the operators of a program."""


def prove(
    program: Program,
    source: Callable[[int], Tensor],
    slots: Sequence[Any],
    droppable: Collection[int],
    beginning: RngPosition | None,
) -> set[int]:
    """Make all values again and compare them with the real ones, which are in the slots of the entries.

    Return those of the first operator that makes others.  Values that are `droppable` are dropped if they are equal.
    """
    values: dict[int, Tensor] = {}
    with below_everything:
        for step, sources, unneeded in program.lines(program.steps.values()):
            values.update((value, source(value)) for value in sources)
            ran = _run(step, values, beginning)
            differing = set[int]()
            for _, value in step.made:
                saved = [slots[number] for number in program.saves.get(value, ())]
                # [guard: values that differ when they are made again]
                if not ran or not _same(program, values[value], value, saved):
                    differing.add(value)
                elif value in droppable:
                    for slot in saved:
                        slot.tensor = None
            if differing:
                return differing
            for value in unneeded:
                del values[value]
    return set()


def measure(program: Program, source: Any, beginning: RngPosition | None, backend: Backend) -> Times:
    """Run a program whose operators were proven, and return the events around each."""
    times: Times = []
    backend.occupy(len(program.steps) * QUEUED)  # events around operators would measure the host
    with below_everything:
        begun = backend.record_timed(current_stream(backend))
        for _ in run(program.lines(program.steps.values()), source, {}, beginning):
            times.append((begun, backend.record_timed(current_stream(backend))))
            begun = backend.record_timed(current_stream(backend))
    return times


# PyTorch makes the tensor of a state while it holds the lock of the generator and the GIL.  If a collection of garbage
# starts there and runs Python code, another thread may get the GIL, and with it wait for that lock for ever.
_one_at_a_time = threading.Lock()


def read_states(generators: Iterable[torch.Generator]) -> list[Tensor]:
    """Return the states of generators."""
    with _one_at_a_time:
        return [generator.get_state() for generator in generators]


def _run(step: Step, values: dict[int, Tensor], beginning: RngPosition | None) -> bool:
    """Run a step; return False if it fails, draws random numbers or, as a function, writes to what it reads."""
    operator = step.node.operator
    is_function = isinstance(operator, FunctionCall)
    if not is_function and not rules_of(operator).foreign:
        run_step(step, values, beginning)
        return True
    copies = {value: copy_of(values[value]) if is_function else values[value] for value in step.node.reads}
    generators = [each for each in (torch.default_generator, gpu_generator()) if each is not None]
    states = read_states(generators)
    try:
        run_step(step, copies, beginning)
    except Exception:  # its forward needs more than an empty context has
        return False
    finally:
        drew = not all(map(torch.equal, read_states(generators), states))
        with _one_at_a_time:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
    values.update((value, copies[value]) for _, value in step.made)
    return not drew and all(same_bits(copies[value], values[value]) for value in step.node.reads)


def _same(program: Program, tensor: Tensor, value: int, saved: Iterable[Any]) -> bool:
    """Return whether a value that was made again lies as the traced one, and has the bits of what was saved on it."""
    view = program.trace.values[value].view
    assert view is not None
    if saved and (tensor.dtype is not view.dtype or tensor.stride() != view.stride):
        return False  # [guard: values that lie otherwise when they are made again]
    left = (slot for slot in saved if slot.tensor is not None)
    return all(same_bits(slot.tensor, on_value(tensor, program.reads[slot.number])) for slot in left)


# Samples in later calls


def bits_at(tensor: Tensor, where: Where) -> Tensor:
    """Return the bits of a value that are compared, given a tensor that lies on it: a view of it, or their sum."""
    bits = tensor.as_strided(*where.layout).view(where.bits)
    return bits.sum(dtype=torch.int64).reshape(1) if where.summed else bits


def sample(tensor: Tensor, where: Where) -> Tensor:
    """Return a copy of what is compared of a saved tensor, whose type the bits still have."""
    tensor = tensor.detach()
    return bits_at(tensor, where) if where.summed else torch.as_strided_copy(tensor, *where.layout)


class _Reading(NamedTuple):
    """Results of comparisons on one device that are on their way to the host."""

    result: Tensor  # whether any differed
    event: StreamEvent  # after which it is there
    flags: Tensor
    made_by: list[tuple[str, Node] | None]


class Alarm:
    """Compares samples on the device, and raises an error when one was different."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # By device: whether comparisons found a difference, a row for each.  No lock guards them, which an interrupt
        # could leave locked: backwards of several threads take different rows.
        self._flags: dict[torch.device, tuple[Tensor, Sequence[Tensor]]] = {}
        self._made_by: list[tuple[str, Node] | None] = [None] * ROWS
        self._numbers = count()
        self._unread = False  # something was compared whose result was not asked for
        self._reading: list[_Reading] = []
        self.samples = 0  # that were compared

    def compare(self, noted: tuple[Where, Tensor], tensor: Tensor, name: str, node: Node) -> None:
        """Compare a value that an operator of the module with a name has made again with bits of it before."""
        if not self._unread and backward_id() != NO_BACKWARD:
            after_backward(self._read)
        flags = self._flags.get(tensor.device)
        if flags is None:
            made = torch.zeros(ROWS, ELEMENTS, dtype=torch.bool, device=tensor.device)
            flags = self._flags.setdefault(tensor.device, (made, made.unbind()))
        number = next(self._numbers)
        self._made_by[number % ROWS] = name, node
        self._unread, self.samples = True, number + 1
        where, before = noted
        found, row = bits_at(tensor, where), flags[1][number % ROWS]
        torch.ne(found, before.view(where.bits), out=row if found.numel() == ELEMENTS else row[: found.numel()])

    def look(self) -> None:
        """Raise a `RuntimeError` if a comparison has failed whose result is there."""
        rise()  # replay that an interrupt stopped
        reading = self._reading
        if not (reading or self._unread) or self.backend.capturing():
            return
        if reading and all(self.backend.passed(each.event) for each in reading):
            self._reading = []
            for each in reading:
                with below_everything:
                    differ = bool(each.result)
                if differ:  # [guard: samples that differ]
                    made = each.made_by[each.flags.any(dim=1).nonzero().flatten().tolist()[0]]
                    assert made is not None
                    name, node = made
                    where = f"{name}{'.' + node.module if node.module else ''}: {node.name.partition('#')[0]}"
                    raise RuntimeError(
                        f"Values that were computed again in the last backward differ from those of the forward, first "
                        f"in {where}: it depends on something that has changed since the first call, such as a global "
                        "or a kernel that writes to memory unseen. The last gradients are wrong. Pass recompute=False, "
                        "or keep=[...] with the name of the module."
                    )
        self._read()

    def _read(self) -> None:
        """Begin to read the results since the last time, unless some are still to come."""
        if not self._unread or self._reading or self.backend.capturing():
            return
        self._unread = False
        reading = []
        for device, (flags, _) in list(self._flags.items()):
            with below_everything:
                copied = flags.clone()
                flags.zero_()
                result = copied.any()
                if device.type != "cpu":
                    host = torch.empty((), dtype=torch.bool, pin_memory=True)
                    result = host.copy_(result, non_blocking=True)
            stream = self.backend.current_stream(self.backend.place(flags))
            reading.append(_Reading(result, self.backend.record(stream), copied, self._made_by.copy()))
        self._reading = reading
