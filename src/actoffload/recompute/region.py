"""What one call of a recomputed function saves, and what is known of the calls before it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._torch.tensors import counter_of, version_of, versions_shared
from .policy import Policy, never
from .reuse import Reuse
from .state import State
from .trace import Learner, Trace, no_casts_kept

__all__ = ["Key", "Reads", "Region"]

Key = tuple[Any, int]  # an operator, and how often the region has called it before
Timed: TypeAlias = Callable[[Any, int, partial[Any]], Any]


def _keep(tensor: Tensor) -> Any:
    return tensor, version_of(tensor)


def _kept(held: Any) -> Tensor | None:
    alias, version = held
    return alias if version_of(alias) == version else None  # [guard: kept output that was edited -> True]


class Reads:
    """Which of the saved outputs the recomputations of a function have read; the others need not be saved.

    Recomputation ends early, and an operator whose output is not saved is run again: this only saves memory and time.
    """

    def __init__(self) -> None:
        self._read: set[Key] = set()
        self._unread: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key not in self._unread

    def learn(self, saved: Iterable[Key], read: Iterable[Key]) -> None:
        """Take what one recomputation read of what was saved."""
        self._read.update(read)
        self._unread.update(saved)
        self._unread -= self._read  # [guard: outputs that are read now and then]


class Region:
    """What one call saved.

    Parameters
    ----------
    policy : Policy
        Which outputs are saved.
    pack, unpack : callable
        As for `torch.autograd.graph.saved_tensors_hooks`: what is held for a tensor, which is an alias without a graph,
        and the tensor again; or None if it was written to in the meantime.  Without them the tensors are kept.
    reads : Reads, optional
        What recomputations of earlier calls read; the others are not saved.
    trace : Trace, optional
        What earlier calls showed of the operators; the first call is traced.
    state : State, optional
        Parameters and buffers that recomputation reads, before the call.
    timed : callable, optional
        Runs each operator of the forward, and times it: from an operator, how often it was called before, and a
        function that runs it, to what that returns.
    alone : bool
        Whether nothing else in a forward of the model reads the parameters.
    stream : callable, optional
        Returns the stream on which the calling thread computes.  A recomputation on another one than the forward's
        drops nothing early: memory is freed in the order of the stream on which it was allocated.
    draws : bool
        Whether it may draw random numbers, so that the state of the generators is kept for recomputation.
    reuse : Reuse, optional
        What earlier calls kept between both halves of a split backward; see `[Note: split backward]` of `reuse.py`.
        Without it each backward recomputes the region.
    name : str
        What errors of a recomputation say of it; nothing if it is empty.
    """

    def __init__(
        self,
        policy: Policy = never,
        pack: Callable[[Tensor], Any] = _keep,
        unpack: Callable[[Any], Tensor | None] = _kept,
        reads: Reads | None = None,
        trace: Trace | None = None,
        state: State | None = None,
        timed: Timed | None = None,
        alone: bool = False,
        stream: Callable[[], Any] = lambda: None,
        draws: bool = True,
        reuse: Reuse | None = None,
        name: str = "",
    ) -> None:
        self.name = name
        self.policy, self.pack, self.unpack, self.state, self.timed = policy, pack, unpack, state, timed
        self.alone, self.draws, self.reuse = alone, draws, reuse
        self.stream, self.at = stream, stream()
        self.reads = Reads() if reads is None else reads
        self.trace = Trace() if trace is None else trace
        self.learner: Learner | None = None
        self.flags: Hashable = None
        self.traced = False  # the forward ran the operators of the trace
        self.chosen: set[Key] = set()  # by the policy
        self.saved: dict[Key, Any] = {}  # the outputs of an operator, with `Held` in place of tensors
        self.ran: dict[Key, tuple[int, list[int]]] = {}  # of saved outputs: their place, and addresses of arguments
        self.used: set[Key] = set()
        self._apart: dict[Key, list[tuple[Tensor, int]]] = {}  # by saved output: counters of views that have their own
        self.left_out: Mapping[int, Any] = {}  # by place: the shapes of outputs that recomputation need not make
        self.complete: frozenset[Key] = frozenset()  # the saved outputs for which that holds

    def begin(self, tensors: Sequence[Tensor], others: Hashable = ()) -> None:
        """Begin a forward with given inputs; of other arguments the flags and types count."""
        kind = tensors[0].device.type if tensors else "cpu"
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        flags = () if self.state is None else self.state.flags()
        # [guard: flags among arguments]
        self.flags = autocast, flags, tuple([of.requires_grad for of in tensors]), others
        if not self.trace.known:
            self.learner = Learner(self.trace, self.flags)

    def note_apart(self, key: Key, view: Tensor) -> None:
        """Note a view of a saved output, which has a version counter of its own."""
        with versions_shared():
            counter = counter_of(view)
        self._apart.setdefault(key, []).append((counter, version_of(counter)))

    def edited_apart(self, key: Key) -> bool:
        """Return whether a saved output was written to through a view that was noted."""
        return any(version_of(counter) != version for counter, version in self._apart.get(key, ()))

    def around(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""
        if self.learner is not None:
            return self.learner.seeing()
        return no_casts_kept() if self.alone and self.trace.casts_once else nullcontext()

    def finish(self, result: Any, tensors: Sequence[Tensor]) -> None:
        """End a forward with its result."""
        if self.learner is not None:
            self.learner.finish(result, tensors)
            self.learner = None
            self.trace.left_out(self.chosen)
