"""One call of a function whose activations are recomputed in backward, except outputs of operators that are saved.

`[Note: two modes]`  The function runs under one dispatch mode in forward and under another one when it is recomputed.
The first hands the outputs that a policy chooses to `pack`, which keeps or offloads them; the second returns them
where the same operator comes again, instead of running it, unless they were written to.  A view of one may count edits
apart (`policy.APART`), so the counters of such views are noted too.  Both see what autograd runs, below autograd
itself, so the graph of the recomputation is that of the forward.  What was saved stays as long as the graph is
retained, because it may be used several times.  Otherwise, and where a split backward keeps what is recomputed, an
output is dropped when it has been returned; should a region be recomputed once more, its operator runs again.

Autograd holds the region through its `Checkpoint`, and the region what `pack` returned.  So all of it is
freed with the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch.autograd import keeps_graph
from .._torch.tensors import (
    DispatchMode,
    current_dispatch_mode,
    free_storage_weakref,
    storage_address,
    storage_expired,
    storage_weakref,
    tree_leaves,
    versions_shared,
)
from .arguments import Arguments
from .checkpoint import OTHERS, Checkpoint, recomputing
from .policy import APART, Call, addresses_written, concern_of, never, saveable, writes
from .region import Key, Region
from .trace import counted, note_apart, shapes, without_memory
from .watch import Mode

__all__ = ["recomputed"]

DRAWN = (
    "A module that is recomputed in backward draws random numbers from a generator of the program, and would draw "
    "others. Pass recompute=False."
)
EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an output inside "
    "of a module that is recomputed in backward was written to after the forward of the module. Pass recompute=False."
)

NO_KEY: Key = (None, 0)

T = TypeVar("T")


class Held:
    """Stands for a tensor among the outputs of an operator; not a container that `tree_map` would enter."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class _Mode(Mode):
    """Knows which call of an operator it sees.

    While the operators that run are those of the trace, most of them need no more than a look at their place.
    """

    def __init__(self, region: Region, *, traced: bool) -> None:
        super().__init__()
        self.region, self._sequence = region, region.trace.sequence
        self.traced = traced  # all operators so far are those of the trace
        self._place = -1  # among the operators that are counted
        self._calls = dict[Any, int]()  # of operators that need their number, once there is no trace to tell it

    def key(self, operator: Any) -> Key:
        """Return the key of a call of an operator that the trace does not tell."""
        number = self._calls.get(operator, 0)
        self._calls[operator] = number + 1
        return operator, number

    def leave_trace(self) -> None:
        """Count on from the last operator that was that of the trace."""
        self.traced = False
        self._calls = dict(Counter(operator for operator, _ in self.region.trace.keys[: self._place]))


class _Saving(_Mode):
    def __init__(self, region: Region) -> None:
        trace = region.trace
        super().__init__(region, traced=bool(trace.sequence))
        timed = region.timed is not None
        self._concerns = None if timed or region.learner is not None else concern_of(region.policy)
        self._expected, self._useless = trace.expected, trace.useless
        self._places, self._shapes = trace.places(self._concerns), dict[int, Any]()
        self._apart, self._alive = list[tuple[Any, int]](), list[Any]()  # weak references to what is left out
        self._keys = dict[int, Key]()  # of what is saved, by the addresses of storages
        self._passes = not timed and region.learner is None  # over what the policy does not concern
        self._recomputing = recomputing()

    def __exit__(self, *error: object) -> Any:
        left = super().__exit__(*error)
        region, trace = self.region, self.region.trace
        # [guard: operators as in the trace -> True]
        if self.traced and self._place + 1 == len(trace.keys) and region.flags == trace.flags:
            region.traced = True
            (places, useless), known = trace.left_out(region.chosen), self._shapes
            saved = region.chosen - useless <= region.saved.keys()
            # [guard: shapes of what is left out -> True]
            if saved and self._is_unread() and all(known.get(place) for place in places):
                region.left_out = {place: known[place] for place in places}
                region.complete = frozenset(region.saved)
        return left

    def _is_unread(self) -> bool:
        """Return whether what is left out is gone, and was read by the operators of the trace alone."""
        return (
            self._apart == self.region.trace.apart  # [guard: operators that read now and then what is left out]
            and all(map(storage_expired, self._alive))  # [guard: outputs that a program keeps now and then]
        )

    def __del__(self) -> None:
        for ref in self._alive:
            free_storage_weakref(ref)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if recomputing() != self._recomputing:  # [guard: gradient that is computed inside of a group]
            return operator(*args, **kwargs)
        if self.traced and not counted(operator):
            note_apart(operator, args, self._place, self._apart)
        elif self.traced:  # nearly always, and the host has little time
            place = self._place = self._place + 1
            if self._sequence[place] is operator:
                if place not in self._places:
                    return operator(*args, **kwargs)
                outputs = self._concerned(self.region.trace.keys[place], args, kwargs)
                if place in self._expected:
                    self._shapes[place] = shapes(outputs)
                    made = outputs if isinstance(outputs, tuple | list) else (outputs,)
                    self._alive += [storage_weakref(of.untyped_storage()) for of in made if isinstance(of, Tensor)]
                return outputs
            self.leave_trace()
        elif counted(operator):
            self._place += 1
        if self._keys and operator in APART:  # [guard: views with a version counter of their own]
            return self._noted(operator, args, kwargs)
        if self._keys and writes(operator):  # [guard: edits that no version counter shows]
            for address in addresses_written(operator, args, kwargs):
                self.region.saved.pop(self._keys.get(address, NO_KEY), None)
        if self._passes and (self.traced or not (self._concerns is None or self._concerns(operator))):
            return operator(*args, **kwargs)
        return self._concerned(self.key(operator), args, kwargs)

    def _noted(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return views that have version counters of their own; saved memory may be written to through them."""
        views = operator(*args, **kwargs)
        key = self._keys.get(storage_address(args[0]))
        if key is not None:
            for view in tree_leaves(views):
                self.region.note_apart(key, view)
        return views

    def _concerned(self, key: Key, args: Any, kwargs: Any) -> Any:
        """Return the outputs of an operator, which may be saved."""
        region, operator = self.region, key[0]
        run = partial(operator, *args, **kwargs)
        outputs = run() if region.timed is None else region.timed(*key, run)
        if region.learner is not None:
            region.learner.ran(key, args, kwargs, outputs)
        # [guard: outputs that a policy saves]
        if (
            (region.trace.sequence or key in region.reads)
            and key not in region.trace.unsaveable  # [guard: results with a version counter of their own]
            and not torch.is_inference_mode_enabled()  # [guard: outputs in inference mode]
            and saveable(operator, args, kwargs)
            and region.policy(Call(*key, args, kwargs, outputs))
        ):
            region.chosen.add(key)
            # A traced call saves nothing: what is alive behind it, something else refers to.
            if region.learner is not None or key in self._useless:
                return outputs
            with versions_shared():  # an alias, as the tensor itself refers to the graph, and the graph to the region
                region.saved[key] = _mapped(Tensor, lambda of: Held(region.pack(of.detach())), outputs)
            region.ran[key] = self._place, _addresses(args)
            for of in outputs if isinstance(outputs, tuple | list) else (outputs,):
                self._keys[storage_address(of)] = key
        return outputs


class _Returning(_Mode):
    def __init__(self, region: Region) -> None:
        super().__init__(region, traced=region.traced)
        self._operators = {operator for operator, _ in region.saved}
        self._last = (
            (region.reuse is not None or not keeps_graph())  # [guard: graph that is retained]
            and region.stream() == region.at  # [guard: recomputation on another stream]
        )
        # Not if some were dropped, and not under another mode, which may read what every operator returns.
        complete = current_dispatch_mode() is None and region.complete == frozenset(region.saved)
        self._left_out = region.left_out if complete else {}
        if region.traced:
            place_of = region.trace.place_of
            self._places = {place_of[key] for key in region.saved if key in place_of}.union(self._left_out)
        if region.state is not None:
            region.state.copy_before()

    def __exit__(self, *error: object) -> Any:
        left = super().__exit__(*error)
        if not self.region.trace.sequence:  # which says more
            self.region.reads.learn(self.region.saved, self.region.used)
        return left

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs and kwargs.get("generator") is not None:  # [guard: generator that the first call does not show]
            raise RuntimeError(DRAWN)
        if not self.traced:
            self._place += counted(operator)
        elif counted(operator):  # as in the forward
            place = self._place = self._place + 1
            if self._sequence[place] is operator:
                if place not in self._places:
                    return operator(*args, **kwargs)
                if place in self._left_out:
                    return without_memory(self._left_out[place])
                return self._saved(self.region.trace.keys[place], args, kwargs)
            if self._left_out:
                raise RuntimeError(OTHERS)
            self.leave_trace()
        if self.traced or operator not in self._operators:
            return operator(*args, **kwargs)
        return self._saved(self.key(operator), args, kwargs)

    def _is_same(self, key: Key, args: Any) -> bool:
        """Return whether a call stands where that of the forward did, and reads the same weights.

        A program may keep what it has computed in the forward, and then other calls have the same numbers.
        """
        place, before = self.region.ran[key]
        weights = set() if self.region.state is None else self.region.state.addresses()
        now = _addresses(args)
        # [guard: other operators before it than in the forward]
        if place != self._place or len(now) != len(before):
            return False
        # [guard: other weights than in the forward]
        return all(was == of for was, of in zip(before, now, strict=True) if was in weights or of in weights)

    def _saved(self, key: Key, args: Any, kwargs: Any) -> Any:
        """Return the saved outputs of an operator, or run it again."""
        region, operator = self.region, key[0]
        outputs = region.saved.get(key)
        if outputs is not None and (self.traced or self._is_same(key, args)):
            complete = not region.edited_apart(key)

            def unpacked(of: Held) -> Tensor | None:
                nonlocal complete
                tensor = region.unpack(of.held)
                complete = complete and tensor is not None
                # An alias: autograd makes what is returned part of a graph, which would then refer to itself.
                return None if tensor is None else tensor.detach()

            tensors = _mapped(Held, unpacked, outputs)
            if complete:  # [guard: output that was edited -> True]
                region.used.add(key)
                if self._last:  # what the recomputed graph needs of it, that holds from here on
                    del region.saved[key]
                return tensors
            if self._left_out and key not in region.trace.results:  # what it reads may be left out
                raise RuntimeError(EDITED)
        return operator(*args, **kwargs)


def _addresses(args: Any) -> list[int]:
    """Return the addresses of the tensors among the arguments of an operator."""
    return [storage_address(of) for of in args if isinstance(of, Tensor)]


def _mapped(kind: type, function: Callable[[Any], Any], outputs: Any) -> Any:
    """Return what an operator returned, a value or a flat sequence, with other values in place of those of a type."""
    if isinstance(outputs, tuple | list):
        return type(outputs)([function(of) if isinstance(of, kind) else of for of in outputs])
    return function(outputs) if isinstance(outputs, kind) else outputs


_BACKENDS: list[tuple[SDPBackend, Callable[[], bool]]] = [
    (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
    (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
]
"""What says whether a backend of attention is enabled."""


def _enabled_backends() -> list[SDPBackend]:
    return [backend for backend, enabled in _BACKENDS if enabled()]


def recomputed(function: Callable[..., T], region: Region, *args: Any, **kwargs: Any) -> T:
    """Call a function, and recompute in backward what autograd saves in it, except what the region saves.

    Autograd saves all tensors in `args` and `kwargs`, so that an in-place edit of one is caught.
    """
    arguments, tensors = Arguments.of(args, kwargs)
    first: list[Any] = [(args, kwargs)]
    backends = _enabled_backends()
    without_modes = region.policy is never or DispatchMode is None

    def call(*tensors: Tensor) -> T:
        if first:  # [guard: containers of the program -> False]
            args, kwargs = first.pop()
            with region.around(), nullcontext() if region.reuse is None else region.reuse.hooks():
                return function(*args, **kwargs)
        args, kwargs = arguments.again(tensors)
        run = partial(function, *args, **kwargs)
        if region.state is not None:
            region.state.check()  # [guard: weight that is changed before recomputation]
            if without_modes:
                region.state.copy_before()
            run = partial(region.state.again, run)
        if not backends or backends == _enabled_backends():  # [guard: attention as in the forward -> True]
            return run()
        with sdpa_kernel(backends):
            return run()

    again = nullcontext if without_modes else lambda: _Returning(region)
    kept = Checkpoint(call, tensors, draws=region.draws, again=again, name=region.name)
    if without_modes:
        with kept.hooks():
            return call(*tensors)
    region.begin(tensors, arguments.flags)
    with kept.hooks(), _Saving(region):
        result = call(*tensors)
    region.finish(result, tensors)
    return result
