"""Random numbers: where generators are, and how a GPU's are drawn once more.

`[Note: random numbers]`  The generator of a GPU is a seed and an offset, the count of what was drawn.  An operator that
begins at the same offset draws the same numbers, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011).  So a trace notes how far behind the beginning of its call each operator drew, and a later call where it begins.
What it drew is dropped only if it has drawn as many numbers as the traced call by then.  In backward the generator is
set to that place, and back.  So a dropout mask is made again; on a CPU, whose generator is a state of 5 KiB that cannot
be set forward, it stays.  It stays as well where something else in the call draws, or sets the generator, unseen.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from .._torch.tensors import is_capturing

__all__ = ["Beginning", "Drawing", "default_generators", "generator_states", "states_of_python"]


def states_of_python(modules: Iterable[Module]) -> tuple[Any, ...]:
    """Return the states of the generators of Python and NumPy: the global ones, and those that are in modules."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random,)
    states: list[Any] = [random.getstate()]
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
        name, keys, *rest = numpy.random.get_state()
        states += [name, keys.tobytes(), *rest]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, kinds)]
    # What has no state draws from the system.
    return *states, *(object() if isinstance(each, random.SystemRandom) else pickle.dumps(each) for each in found)


def gpu_generator() -> Any:
    """Return PyTorch's default generator of the current GPU; None without one, and while a graph is captured."""
    if not torch.cuda.is_initialized() or is_capturing():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


def default_generators() -> list[torch.Generator]:
    """Return PyTorch's default generators of the CPU and of the current GPU."""
    found: list[torch.Generator] = [torch.default_generator]
    if torch.cuda.is_initialized() and not is_capturing():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def generator_states() -> tuple[Any, ...]:
    """Return the states of PyTorch's default generators."""
    states = [generator.get_state() for generator in default_generators()]
    # Read as memory: an operator would be seen by the tracer.
    return tuple(ctypes.string_at(state.data_ptr(), state.nbytes) for state in states)


class Beginning(NamedTuple):
    """Where the generator of a GPU was when a call began; see [Note: random numbers]."""

    generator: Any
    seed: int
    offset: int

    @staticmethod
    def now() -> Beginning | None:
        """Return where the generator of the current GPU is; None if there is none, or its place cannot be read."""
        generator = gpu_generator()
        return None if generator is None else Beginning(generator, generator.initial_seed(), generator.get_offset())

    def drawn(self) -> int:
        """Return how far the generator is behind the beginning; -1 if it was set to another seed."""
        same = not is_capturing() and self.generator.initial_seed() == self.seed
        return self.generator.get_offset() - self.offset if same else -1

    @contextmanager
    def at(self, drawn: int) -> Iterator[None]:
        """Set the generator to a place behind the beginning, and back."""
        generator = self.generator
        seed, offset = generator.initial_seed(), generator.get_offset()
        try:
            if seed != self.seed:
                generator.manual_seed(self.seed)
            generator.set_offset(self.offset + drawn)
            yield
        finally:
            if seed != self.seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)


class Drawing:
    """What the operators of a call draw from the generator of the GPU, while it is traced."""

    def __init__(self) -> None:
        self.beginning: Beginning | None = None
        self.drawn = 0  # so far
        self._all_seen = False

    def begin(self) -> None:
        """Note that the call begins."""
        self.beginning = Beginning.now()
        self._all_seen = self.beginning is not None

    def before(self) -> int:
        """Return how many numbers were drawn before an operator that draws."""
        self._all_seen = self.beginning is not None and self.beginning.drawn() == self.drawn and self._all_seen
        return self.drawn

    def after(self, outputs: Any) -> bool:
        """Note what an operator has drawn that returned `outputs`; return whether it can draw the same once more."""
        if self.beginning is None:
            return False
        before, self.drawn = self.drawn, self.beginning.drawn()
        first = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else outputs
        here = isinstance(first, torch.Tensor) and first.device == self.beginning.generator.device
        return here and before < self.drawn

    def is_known(self) -> bool:
        """Return whether operators that were seen have drawn all numbers until now."""
        return self.before() >= 0 and self._all_seen
