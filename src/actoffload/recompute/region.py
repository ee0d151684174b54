"""One call of a function whose activations are recomputed in backward, except outputs of operators that are saved.

`[Note: two modes]`  `torch.utils.checkpoint` runs the function under one dispatch mode in forward and under another one
when it is recomputed.  The first hands the outputs that a policy chooses to `pack`, which keeps or offloads them; the
second returns them where the same operator comes again, instead of running it, unless they were written to.  Both see
what autograd runs, below autograd itself, so the graph of the recomputation is that of the forward.  What was saved
stays as long as the graph is retained, because it may be used several times, and a split backward may come back to a
region.  Otherwise an output is dropped when it has been returned; should a region be recomputed once more, its operator
runs again.

Autograd holds the region through the frame of the checkpoint, and the region what `pack` returned.  So all of it is
freed with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from .._torch import (
    DispatchMode,
    current_dispatch_mode,
    keeps_graph,
    tree_flatten,
    tree_unflatten,
    version_of,
    versions_shared,
)
from .modes import Mode
from .policy import Call, Policy, concern_of, never, saveable
from .trace import Learner, Trace, counted, hollow, no_casts_kept, shapes
from .watch import State

__all__ = ["Reads", "Region", "recomputed"]

OTHERS = (
    "A module that is recomputed ran other operators than in its forward: what it does depends on something that has "
    "changed since. Pass recompute=False."
)
EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an output inside "
    "of a module that is recomputed in backward was written to after the forward of the module. Pass recompute=False."
)

T = TypeVar("T")
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
    ) -> None:
        self.policy, self.pack, self.unpack, self.state, self.timed = policy, pack, unpack, state, timed
        self.alone, self.draws = alone, draws
        self.stream, self.at = stream, stream()
        self.reads = Reads() if reads is None else reads
        self.trace = Trace() if trace is None else trace
        self.learner: Learner | None = None
        self.flags: Hashable = None
        self.chosen: set[Key] = set()  # by the policy
        self.saved: dict[Key, Any] = {}  # the outputs of an operator, with `_Held` in place of tensors
        self.used: set[Key] = set()
        self.left_out: Mapping[int, Any] = {}  # by place: the shapes of outputs that recomputation need not make
        self.complete: frozenset[Key] = frozenset()  # the saved outputs for which that holds

    def modes(self) -> tuple[DispatchMode, DispatchMode]:
        """Return the modes for the forward and for all recomputations; see [Note: two modes]."""
        return _Saving(self), _Returning(self)

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begin a forward with given inputs."""
        kind = tensors[0].device.type if tensors else "cpu"
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        flags = () if self.state is None else self.state.flags()
        self.flags = autocast, flags, tuple([of.requires_grad for of in tensors])
        if not self.trace.known:
            self.learner = Learner(self.trace, self.flags)

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


class _Held:
    """Stands for a tensor among the outputs of an operator; not a container that `tree_map` would enter."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class _Mode(Mode):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.calls = dict[Any, int]()

    def __enter__(self) -> Any:
        self.calls.clear()  # [guard: graph that is recomputed twice]
        return super().__enter__()

    def key(self, operator: Any) -> Key:
        number = self.calls.get(operator, 0)
        self.calls[operator] = number + 1
        return operator, number


class _Saving(_Mode):
    def __init__(self, region: Region) -> None:
        super().__init__(region)
        sees_all = region.timed is not None or region.learner is not None
        self._concerns = None if sees_all else concern_of(region.policy)
        self._expected, self._useless = region.trace.expected, region.trace.useless
        self._operators: list[Any] = []
        self._shapes: dict[int, Any] = {}

    def __exit__(self, *error: object) -> Any:
        left = super().__exit__(*error)
        region, trace = self.region, self.region.trace
        # [guard: operators as in the trace -> True]
        if trace.operators and self._operators == trace.operators and region.flags == trace.flags:
            (places, useless), known = trace.left_out(region.chosen), self._shapes
            saved = region.chosen - useless <= region.saved.keys()
            if saved and all(known.get(place) for place in places):  # [guard: shapes of what is left out -> True]
                region.left_out = {place: known[place] for place in places}
                region.complete = frozenset(region.saved)
        return left

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = -1
        if counted(operator):
            place = len(self._operators)
            self._operators.append(operator)
        if self._concerns is not None and not self._concerns(operator):  # nearly all, and the host has little time
            outputs = operator(*args, **kwargs)
            if place in self._expected:
                self._shapes[place] = shapes(outputs)
            return outputs
        key, region = self.key(operator), self.region
        if region.timed is None:
            outputs = operator(*args, **kwargs)
        else:
            outputs = region.timed(*key, partial(operator, *args, **kwargs))
        if place in self._expected:
            self._shapes[place] = shapes(outputs)
        if region.learner is not None:
            region.learner.ran(key, args, kwargs, outputs)
        # [guard: outputs that a policy saves]
        if (
            (region.trace.operators or key in region.reads)
            and saveable(operator, args, kwargs)
            and region.policy(Call(*key, args, kwargs, outputs))
        ):
            region.chosen.add(key)
            # A traced call saves nothing: what is alive behind it, something else refers to.
            if region.learner is not None or key in self._useless:
                return outputs
            with versions_shared():  # an alias, as the tensor itself refers to the graph, and the graph to the region
                region.saved[key] = _mapped(Tensor, lambda of: _Held(region.pack(of.detach())), outputs)
        return outputs


class _Returning(_Mode):
    def __enter__(self) -> Any:
        region = self.region
        self._operators = {operator for operator, _ in region.saved}
        self._last = (
            not keeps_graph()  # [guard: graph that is retained]
            and region.stream() == region.at  # [guard: recomputation on another stream]
        )
        # Not if some were dropped, and not under another mode, which may read what every operator returns.
        complete = current_dispatch_mode() is None and region.complete == frozenset(region.saved)
        self._left_out = region.left_out if complete else {}
        self._place = -1
        return super().__enter__()

    def __exit__(self, *error: object) -> Any:
        left = super().__exit__(*error)
        if not self.region.trace.operators:  # which says more
            self.region.reads.learn(self.region.saved, self.region.used)
        return left

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        region = self.region
        if self._left_out and counted(operator):
            self._place += 1
            shapes = self._left_out.get(self._place)
            if self._place >= len(region.trace.operators) or region.trace.operators[self._place] is not operator:
                raise RuntimeError(OTHERS)
            if shapes is not None:
                if operator in self._operators:
                    self.key(operator)
                return hollow(shapes)
        if operator not in self._operators:
            return operator(*args, **(kwargs or {}))
        key = self.key(operator)
        outputs = region.saved.get(key)
        if outputs is not None:
            complete = True

            def unpacked(of: _Held) -> Tensor | None:
                nonlocal complete
                tensor = region.unpack(of.held)
                complete = complete and tensor is not None
                # An alias: autograd makes what is returned part of a graph, which would then refer to itself.
                return None if tensor is None else tensor.detach()

            tensors = _mapped(_Held, unpacked, outputs)
            if complete:  # [guard: output that was edited -> True]
                region.used.add(key)
                if self._last:  # what the recomputed graph needs of it, that holds from here on
                    del region.saved[key]
                return tensors
            if self._left_out and key not in region.trace.results:  # what it reads may be left out
                raise RuntimeError(EDITED)
        return operator(*args, **(kwargs or {}))


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

    Autograd saves all tensors in `args` and `kwargs`, so that an in-place edit of one is caught.  Recomputation gets
    containers of its own: the function may have changed those of the program.
    """
    leaves, tree = tree_flatten((args, kwargs))
    places = [k for k, of in enumerate(leaves) if isinstance(of, Tensor) and not of.is_inference()]
    tensors = [leaves[k] for k in places]
    for k in places:
        leaves[k] = None
    first: list[Any] = [(args, kwargs)]
    backends = _enabled_backends()

    def call(*tensors: Tensor) -> T:
        if first:  # [guard: containers of the program -> False]
            args, kwargs = first.pop()
            with region.around():
                return function(*args, **kwargs)
        if region.state is not None:
            region.state.check()  # [guard: weight that is changed before recomputation]
        again = dict(zip(places, tensors, strict=True))
        args, kwargs = tree_unflatten([again.get(k, of) for k, of in enumerate(leaves)], tree)
        if not backends or backends == _enabled_backends():  # [guard: attention as in the forward -> True]
            return function(*args, **kwargs)
        with sdpa_kernel(backends):
            return function(*args, **kwargs)

    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": region.draws}
    if region.trace.fixed:
        how["determinism_check"] = "none"  # which compares the shapes of all that is saved, and takes time of the host
    if region.policy is never or DispatchMode is None:
        result: T = checkpoint(call, *tensors, **how)
        return result
    region.begin(tensors)
    result = checkpoint(call, *tensors, **how, context_fn=region.modes)
    region.finish(result, tensors)
    return result
