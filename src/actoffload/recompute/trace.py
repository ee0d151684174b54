"""Which operators of a region need not run again, because nothing of the recomputed graph reads their outputs.

`[Note: operators left out]`  If the rotated queries of an attention are saved, the projection and the rotation need
not run again: only they read each other.  So one forward of a region is traced.  An operator is needed if autograd
saves its output, if something refers to that when the region has returned, or if one reads it that is needed and whose
own output is not saved.  In place of what the others return, recomputation gets tensors of the same shapes without
memory, which nothing may read.

So a trace is used only where the dispatch mode sees all that is read: all nodes of the graph are PyTorch's own, each
operator runs with gradients enabled, none writes to a tensor or reads the value of one for the host, and none returns
memory that something else could fill.  It holds for calls that run the same operators, with the same hooks, the same
flags among their arguments, and with gradients for the same inputs and parameters.  Casts always run, as autocast may
keep them, and so do operators that draw random numbers, and on the CPU those whose outputs NumPy may read.

`[Note: casts of weights]`  Autocast keeps the casts of weights until it ends, which is after the forward of the model:
half of the bytes of the weights.  Recomputation makes them again anyway.  So autocast keeps none in a region if each
weight is cast once and that cast is read once; the gradients are the same then.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import Parameter

from .._torch.autograd import saved_tensor_hooks
from .._torch.tensors import address, free_storage_weakref, storage_at, storage_expired, storage_weakref, tree_leaves
from .policy import APART, Concern, draws, writes

__all__ = [
    "Learner",
    "Shape",
    "Trace",
    "counted",
    "no_casts_kept",
    "nodes_between",
    "note_apart",
    "shapes",
    "without_memory",
]

Key: TypeAlias = tuple[Any, int]  # an operator, and how often the region has called it before

_aten = torch.ops.aten
CAST, DETACH = _aten._to_copy.default, _aten.detach.default
"""Operators that may run in forward or in recomputation only: autocast keeps casts, and recomputation detaches."""
_Operator = type(CAST)  # not a higher-order operator
_OWN = re.compile(r"([A-Za-z]+Backward\d+|torch::autograd::AccumulateGrad)$")
"""Names of nodes whose formulas PyTorch generates; a class ``F`` of a program has the node ``FBackward``."""
_FILLED = re.compile(r"aten::(new_)?(empty|zeros|ones|full)")
"""Names of operators whose outputs something else fills."""


def note_apart(operator: Any, args: Any, place: int, apart: list[tuple[Any, int]]) -> None:
    """Note an operator that is not counted behind a place; casts of weights may be kept by autocast, and do not count.

    A hook of the program may cast or detach, now and then, what recomputation would leave out.
    """
    if not (operator is CAST and type(args[0]) is Parameter):
        apart.append((operator, place))


def counted(operator: Any) -> bool:
    """Return whether an operator has a place in the sequence of a region."""
    return operator is not CAST and operator is not DETACH


class Shape(NamedTuple):
    """What is known of a tensor without its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def shapes(outputs: Any) -> tuple[Shape, ...] | Shape | None:
    """Return the shapes of what an operator returned, a tensor or a sequence; None if it is anything else."""
    if isinstance(outputs, Tensor):
        return Shape(outputs.size(), outputs.stride(), outputs.dtype, outputs.device)
    if isinstance(outputs, tuple | list) and all(isinstance(of, Tensor) for of in outputs):
        return tuple(Shape(of.size(), of.stride(), of.dtype, of.device) for of in outputs)
    return None


_made: dict[Shape, Tensor] = {}


def without_memory(of: tuple[Shape, ...] | Shape) -> Any:
    """Return tensors of given shapes without memory."""
    if not isinstance(of, Shape):
        return tuple(map(without_memory, of))
    found = _made.get(of)
    if found is None:
        assert storage_at is not None
        last = sum((size - 1) * stride for size, stride in zip(of.size, of.stride, strict=True))
        nowhere = storage_at(0, of.device, (last + 1) * of.dtype.itemsize if 0 not in of.size else 0)
        found = torch.empty(0, dtype=of.dtype, device=of.device).set_(nowhere, 0, of.size, of.stride)
        if len(_made) >= 256:  # of programs whose shapes never repeat
            _made.clear()
        _made[of] = found
    return found.detach()


@contextmanager
def no_casts_kept() -> Iterator[None]:
    """Let autocast keep no casts of weights in this block."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@dataclass(frozen=True)
class _Call:
    operator: Any
    number: int
    reads: frozenset[int]  # addresses of storages
    makes: frozenset[int]
    stays: bool  # it runs in any case, unless its outputs are saved

    @property
    def key(self) -> Key:
        return self.operator, self.number

    @property
    def view(self) -> bool:
        return not self.makes


@dataclass
class Trace:
    """What one forward of a region showed.

    Attributes
    ----------
    known : bool
        Whether a forward was traced.
    sequence : sequence
        All operators that are counted, in order, and None behind the last; empty if nothing may be left out.
    keys : sequence of tuple
        Their keys.
    apart : sequence of tuple
        Operators that are not counted, with the place of the counted one before each; see `note_apart`.
    place_of : dict of tuple to int
        By key, its place.
    flags : hashable
        Which inputs and parameters had gradients in that forward.
    reads : sequence of tuple of int
        For each operator, also those not counted, the positions of those whose outputs it reads; empty if nothing may
        be left out.
    needed : sequence of bool
        For each operator whether the recomputed graph reads its outputs.
    expected : frozenset of int
        Places of the operators that the recomputation of the next call may leave out.
    useless : frozenset
        Those of them whose outputs the policy saves; they need not be saved.
    results : dict of tuple to int
        Operators whose outputs the region returns, so that the program may write to them; they may always run again.
        With the bytes of these storages.
    unsaveable : frozenset
        Operators whose outputs have views with version counters of their own, so that edits of these do not show, and
        which the program may write to when the region has returned.
    """

    known: bool = False
    sequence: Sequence[Any] = ()
    keys: Sequence[Key] = ()
    apart: Sequence[tuple[Any, int]] = ()
    place_of: dict[Key, int] = field(default_factory=dict)
    flags: Hashable = None
    reads: list[tuple[int, ...]] = field(default_factory=list)
    needed: list[bool] = field(default_factory=list)
    expected: frozenset[int] = frozenset()
    useless: frozenset[Key] = frozenset()
    results: dict[Key, int] = field(default_factory=dict)
    unsaveable: frozenset[Key] = frozenset()
    casts_once: bool = False  # see [Note: casts of weights]
    calls: Sequence[_Call] = ()  # until autograd saves no more: there recomputation ends
    _asked: tuple[Any, frozenset[int]] = ((None, None), frozenset())
    _known: dict[frozenset[Key], tuple[frozenset[int], frozenset[Key]]] = field(default_factory=dict)

    def places(self, concerns: Concern | None) -> frozenset[int]:
        """Return the places of operators that a forward has to look at; `concerns` is that of a policy.

        Those are the operators whose outputs the policy may save, or that recomputation may leave out.
        """
        asked = concerns, self.expected
        if asked != self._asked[0]:
            chosen = {place for place, key in enumerate(self.keys) if concerns is None or concerns(*key)}
            self._asked = asked, self.expected | chosen
        return self._asked[1]

    def left_out(self, saved: Iterable[Key]) -> tuple[frozenset[int], frozenset[Key]]:
        """Return, and expect, what need not run again if the outputs of some operators are saved.

        First the places of these operators, which are positions among those that are counted; then those of them whose
        outputs are saved for nothing.
        """
        key = frozenset(saved)
        if key not in self._known:
            self._known[key] = self._left_out(key)
        self.expected, self.useless = self._known[key]
        return self._known[key]

    def _left_out(self, saved: frozenset[Key]) -> tuple[frozenset[int], frozenset[Key]]:
        needed, found, names = list(self.needed), set[int](), set[Key]()
        places = list(accumulate((counted(call.operator) for call in self.calls), initial=-1))[1:]
        for k in reversed(range(len(self.calls))):
            call = self.calls[k]
            returned = call.key in saved and call.key not in self.results
            if needed[k] and not returned:
                for other in self.reads[k]:
                    needed[other] = True
            elif not needed[k] and not call.view:
                found.add(places[k])
                names.add(call.key)
        return frozenset(found), saved & names


class Learner:
    """Sees one forward of a region, and makes its `Trace`."""

    def __init__(self, trace: Trace, flags: Hashable) -> None:
        self._trace, self._flags = trace, flags
        self._calls: list[_Call] = []
        self._makers: dict[int, Key] = {}  # by storage, the operator that made it
        self._refs: dict[int, Any] = {}  # weak references to storages, whose addresses they keep
        self._saved: set[int] = set()
        self._apart: set[int] = set()  # storages that have several version counters
        self._casts = defaultdict[int, list[int]](list)  # of parameters: by their storages, those of the casts
        self._until = 0  # calls before autograd saved the last tensor
        self._place, self._others = -1, list[tuple[Any, int]]()
        self._certain = storage_at is not None
        trace.known = True

    def __del__(self) -> None:
        for ref in self._refs.values():
            free_storage_weakref(ref)

    def ran(self, key: Key, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Note a call of an operator."""
        operator, number = key
        if counted(operator):
            self._place += 1
        else:
            note_apart(operator, args, self._place, self._others)
        read, made = tree_leaves((args, kwargs)), tree_leaves(outputs)
        tensors = [of for of in (*read, *made) if isinstance(of, Tensor)]
        plain = all(type(of) in (Tensor, Parameter) and of.layout is torch.strided for of in tensors)
        if storage_at is None or not plain:
            self._certain = False
            return
        reads, makes = map(frozenset, (self._storages(read), self._storages(made)))
        made_here = makes - reads  # others are views
        self._makers.update(dict.fromkeys(made_here, key))
        if not (self._certain and isinstance(operator, _Operator) and torch.is_grad_enabled()):
            self._certain = False
            return
        filled = _FILLED.match(operator._schema.name)
        # [guard: operators that something else fills, or that the host waits for]
        if filled or writes(operator) or not any(isinstance(of, Tensor) for of in made):
            self._certain = False
            return
        # [guard: what NumPy may read]
        self._saved.update(self._storages(of for of in made if isinstance(of, Tensor) and _for_numpy(operator, of)))
        if operator in APART:
            self._apart |= reads
        if operator is CAST and type(args[0]) is Parameter:
            self._casts[next(iter(reads))] += made_here
        stays = operator is CAST or draws(operator, args, kwargs) or shapes(outputs) is None
        self._calls.append(_Call(operator, number, reads, made_here, stays))

    def _storages(self, leaves: Iterable[Any]) -> Iterator[int]:
        for of in leaves:
            if isinstance(of, Tensor) and of.layout is not torch.strided:  # [guard: sparse tensor that is saved]
                self._certain = False
            elif isinstance(of, Tensor):
                memory = of.untyped_storage()
                key = address(memory)
                if key not in self._refs:
                    self._refs[key] = storage_weakref(memory)
                yield key

    def seeing(self) -> AbstractContextManager[Any]:
        """Return a context that notes what autograd saves, and passes it to the hooks that are installed."""
        hooks = saved_tensor_hooks()
        if hooks is None:
            self._certain = False
            return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        pack, unpack = hooks

        def packing(tensor: Tensor) -> Any:
            if self._certain:
                self._saved.update(self._storages([tensor]))
                self._until = len(self._calls)
            return pack(tensor)

        return saved_tensors_hooks(packing, unpack)

    def finish(self, result: Any, inputs: Iterable[Tensor]) -> None:
        """Take what the region returns: what is alive by now may be read later."""
        plain = [of for of in tree_leaves(result) if type(of) is Tensor and of.layout is torch.strided]
        results = {address(memory): memory.nbytes() for memory in map(Tensor.untyped_storage, plain)}
        for made in results.keys() & self._makers.keys():
            key = self._makers[made]
            self._trace.results[key] = self._trace.results.get(key, 0) + results[made]
        if not self._certain or not all(_OWN.match(node.name()) for node in nodes_between(result, inputs)):
            return
        alive = {key for key, ref in self._refs.items() if not storage_expired(ref)}
        needed = self._saved | alive
        trace, makers = self._trace, dict[int, int]()
        trace.keys = [call.key for call in self._calls if counted(call.operator)]
        trace.place_of = {key: place for place, key in enumerate(trace.keys)}
        trace.sequence = [*(operator for operator, _ in trace.keys), None]
        trace.apart = self._others
        trace.calls, trace.flags = self._calls[: self._until], self._flags
        trace.reads, trace.needed = [], []
        for k, call in enumerate(self._calls):
            runs = k < self._until
            trace.reads.append(tuple({makers[key] for key in call.reads if key in makers}) if runs else ())
            trace.needed.append(runs and (call.stays or not call.makes.isdisjoint(needed)))
            makers.update(dict.fromkeys(call.makes, k))
        readers = Counter(key for call in self._calls if not call.view for key in call.reads)
        trace.casts_once = all(sum(readers[key] for key in made) <= 1 for made in self._casts.values())
        apart = alive & self._apart
        trace.unsaveable = frozenset(call.key for call in self._calls if not call.makes.isdisjoint(apart))


def _for_numpy(operator: Any, output: Tensor) -> bool:
    """Return whether a tensor is one that ``numpy`` and ``tolist`` read past a mode: on the host, without a graph."""
    return output.device.type == "cpu" and (operator is DETACH or not output.is_floating_point())


def nodes_between(result: Any, inputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield the nodes of the graph between inputs and a result."""
    met = {of.grad_fn for of in inputs}
    waiting = [of.grad_fn for of in tree_leaves(result) if isinstance(of, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions if following is not None]
