"""One call of a function whose activations are recomputed in backward, except outputs of operators that are saved.

`[Note: two modes]`  `torch.utils.checkpoint` runs the function under one dispatch mode in forward and under another one
when it is recomputed.  The first hands the outputs that a policy chooses to `pack`, which keeps or offloads them; the
second returns them where the same operator comes again, instead of running it, unless they were written to.  Both see
what autograd runs, below autograd itself, so the graph of the recomputation is that of the forward.  What was saved
stays as long as the graph is retained, because it may be used several times.  Otherwise, and where a split backward
keeps what is recomputed, an output is dropped when it has been returned; should a region be recomputed once more, its
operator runs again.

Autograd holds the region through the frame of the checkpoint, and the region what `pack` returned.  So all of it is
freed with the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from .._torch.autograd import DETERMINISM_CHECK, keeps_graph
from .._torch.tensors import DispatchMode, current_dispatch_mode, tree_flatten, tree_unflatten, versions_shared
from .policy import Call, concern_of, never, saveable
from .region import Key, Region
from .trace import counted, shapes, without_memory
from .watch import Mode

__all__ = ["recomputed"]

OTHERS = (
    "A module that is recomputed ran other operators than in its forward: what it does depends on something that has "
    "changed since. Pass recompute=False."
)
EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an output inside "
    "of a module that is recomputed in backward was written to after the forward of the module. Pass recompute=False."
)

T = TypeVar("T")


class Held:
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
        if self._concerns is not None and not self._concerns(operator):  # nearly all, and the host has little time
            return self._noted(operator, operator(*args, **kwargs))
        key, region = self.key(operator), self.region
        run = partial(operator, *args, **kwargs)
        outputs = self._noted(operator, run() if region.timed is None else region.timed(*key, run))
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
                region.saved[key] = _mapped(Tensor, lambda of: Held(region.pack(of.detach())), outputs)
        return outputs

    def _noted(self, operator: Any, outputs: Any) -> Any:
        """Return the outputs of an operator; note it, and their shapes if recomputation may leave it out."""
        if counted(operator):
            if len(self._operators) in self._expected:
                self._shapes[len(self._operators)] = shapes(outputs)
            self._operators.append(operator)
        return outputs


class _Returning(_Mode):
    def __enter__(self) -> Any:
        region = self.region
        self._operators = {operator for operator, _ in region.saved}
        self._last = (
            (region.reuse is not None or not keeps_graph())  # [guard: graph that is retained]
            and region.stream() == region.at  # [guard: recomputation on another stream]
        )
        # Not if some were dropped, and not under another mode, which may read what every operator returns.
        complete = current_dispatch_mode() is None and region.complete == frozenset(region.saved)
        self._left_out = region.left_out if complete else {}
        self._place = -1
        if region.state is not None:
            region.state.copy_before()
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
                return without_memory(shapes)
        if operator not in self._operators:
            return operator(*args, **(kwargs or {}))
        key = self.key(operator)
        outputs = region.saved.get(key)
        if outputs is not None:
            complete = True

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
    without_modes = region.policy is never or DispatchMode is None

    def call(*tensors: Tensor) -> T:
        if first:  # [guard: containers of the program -> False]
            args, kwargs = first.pop()
            with region.around(), nullcontext() if region.reuse is None else region.reuse.hooks():
                return function(*args, **kwargs)
        again = dict(zip(places, tensors, strict=True))
        args, kwargs = tree_unflatten([again.get(k, of) for k, of in enumerate(leaves)], tree)
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

    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": region.draws}
    how["determinism_check"] = DETERMINISM_CHECK
    if without_modes:
        result: T = checkpoint(call, *tensors, **how)
        return result
    region.begin(tensors)
    result = checkpoint(call, *tensors, **how, context_fn=lambda: (_Saving(region), _Returning(region)))
    region.finish(result, tensors)
    return result
