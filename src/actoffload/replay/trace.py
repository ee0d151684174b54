"""What one call of a module computes: operators, the values that they make, and what autograd saves of them.

`[Note: values]`  A *value* is the content of one storage.  Tensors on it are *places*.  An operator that writes to a
storage begins a new value, so a value never changes.  Where it writes all of a value that nothing has saved, as
``relu_`` does behind a convolution, its counterpart that returns a new tensor makes the new value.

The *origin* of a value is the operator that returned its storage, an argument of the call or a weight of the module.
What has none is only known where autograd saves it: random numbers of a CPU, results of factories such as ``empty``,
which a kernel that dispatch does not see may fill, and tensors from outside of the call.

`[Note: functions]`  A `torch.autograd.Function` is one operator, because its forward may launch kernels of its own.
Running it again means to call its ``forward`` with an empty context; what it saves counts as its outputs.  One that
returns an input may change it, as Liger's rotary embedding does: that is a new value, and made again from a copy.

`[Note: twins]`  Autocast casts the input of three projections three times.  An operator that is called again with the
same arguments makes the same value, so the program takes the first one in its place.

`[Note: random numbers]`  The generator of a GPU is a seed and an offset, which a trace notes for each operator that
draws, from the beginning of its call.  The generator of a CPU cannot be set forward, so its numbers stay.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Module, Parameter

from .._torch.tensors import is_capturing
from ..engine.layout import View

UNKNOWN = -1
PLAIN = frozenset((Tensor, Parameter))


class Place(NamedTuple):
    """Where a tensor lies: a value, and the view of it."""

    value: int
    view: View


class Weight(NamedTuple):
    """A parameter or buffer, by the place of its module among the modules of the call and by its name there."""

    module: int
    table: int  # 0 for parameters, 1 for buffers
    name: str
    part: int  # of a tensor subclass


@dataclass(slots=True, eq=False)
class Node:
    """One call of an operator that can be run again, with `Place` instead of tensors."""

    operator: Any
    name: str  # ``aten.mm.default#2``: the third call of the operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, int]]  # places among its outputs, and the values there
    reads: tuple[int, ...]  # values
    module: str  # the name of the module in which it ran
    segment: int  # as in `Entry`
    drawn: int | None = None  # random numbers of the call before its own, if it draws; see [Note: random numbers]


@dataclass(slots=True)
class Value:
    """The content of one storage."""

    nbytes: int
    # What makes it again: an operator; an argument of the call, by its place among the tensors; or a weight.
    origin: Node | int | Weight | None = None
    view: View | None = None  # how the tensor lies that the operator returns or the argument is


class Entry(NamedTuple):
    """One tensor that autograd saves in the call, in the order of saving."""

    value: int  # `UNKNOWN` for weights and what is no plain tensor
    view: View | None
    segment: int  # which of the modules directly inside of the group was running
    by_function: bool  # a `torch.autograd.Function` saves it, whose backward may write to it
    drawn: int  # random numbers of the call before it was saved


@dataclass(slots=True, eq=False)
class Trace:
    """What one call of a module computes."""

    nodes: list[Node]
    values: list[Value]
    entries: list[Entry]
    returned: frozenset[int]  # values that the module returns
    steady: bool  # the host read no values and drew no random numbers, so another call may do the same
    drawn: int = 0  # random numbers of the whole call


class FunctionCall:
    """Calls the forward of a `torch.autograd.Function`; see [Note: functions]."""

    def __init__(self, function: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self.function, self._needs_input_grad = function, needs_input_grad
        self.scratch: tuple[int, ...] = ()  # places of the arguments that it may write to, and returns

    def __repr__(self) -> str:
        return f"{self.function.__module__.partition('.')[0]}.{self.function.__qualname__}"

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Return the outputs, and behind them what it saves for backward."""
        context: Any = FunctionCtx()
        context.needs_input_grad = self._needs_input_grad
        function = self.function
        with torch.no_grad():
            if getattr(function, "setup_context", None) is not _plain_setup:
                outputs = function.forward(*args)
                function.setup_context(context, args, outputs)
            else:
                outputs = function.forward(context, *args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, *(saved for saved in getattr(context, "to_save", ()) if saved is not None)


_plain_setup = getattr(torch.autograd.Function, "setup_context", None)


def same(tensor: Tensor) -> Tensor:
    """Return a tensor itself: the operator of a twin."""
    return tensor


def key_of(given: Any) -> Any:
    """Return arguments so that only the same ones are equal: 1 is not True, and 0.0 is not -0.0."""
    if isinstance(given, (list, tuple)) and not isinstance(given, Place):
        return type(given), *map(key_of, given)
    return type(given), repr(given) if isinstance(given, (float, complex)) else given


# Random numbers


def states_of_python(modules: Iterable[Module]) -> list[Any]:
    """Return the states of the generators of Python and NumPy: the global ones, and those that are in modules."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.Generator, numpy.RandomState)
    states = [random.getstate(), None if numpy is None else numpy.get_state()]
    states += [each for module in modules for each in vars(module).values() if type(each) in kinds]
    return list(map(pickle.dumps, states))


def gpu_generator() -> Any:
    """Return PyTorch's default generator of the current GPU; None without one, and while a graph is captured."""
    if not torch.cuda.is_initialized() or is_capturing():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


class RngPosition(NamedTuple):
    """Where the generator of a GPU was when a call began; see [Note: random numbers]."""

    generator: Any
    seed: int
    offset: int

    @staticmethod
    def read() -> RngPosition | None:
        """Return where the generator of the current GPU is; None if there is none, or its place cannot be read."""
        generator = gpu_generator()
        return None if generator is None else RngPosition(generator, generator.initial_seed(), generator.get_offset())

    def count_drawn(self) -> int:
        """Return how many numbers were drawn since; -1 if the generator was set to another seed."""
        same = not is_capturing() and self.generator.initial_seed() == self.seed
        return self.generator.get_offset() - self.offset if same else -1

    @contextmanager
    def draw_from(self, count: int) -> Iterator[None]:
        """Set the generator so that the next number is the one behind `count` others of the call, and back."""
        generator = self.generator
        seed, offset = generator.initial_seed(), generator.get_offset()
        try:
            if seed != self.seed:
                generator.manual_seed(self.seed)
            generator.set_offset(self.offset + count)
            yield
        finally:
            if seed != self.seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)
