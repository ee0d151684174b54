"""Recomputation for a split backward: once for the gradients of the inputs and of the weights.

`[Note: split backward]`  The zero-bubble schedules of `torch.distributed.pipelining` run a backward of a microbatch in
two halves: first the gradients of the inputs, with the graph retained, and later those of the weights, in one backward
for each group of parameters.  A `Checkpoint` recomputes a region in each of these backwards, and frees each
recomputed tensor when it is unpacked.  So what autograd saves in the region is wrapped once more, inside of the hooks
of the `Checkpoint`.  When a backward that retains its graph recomputes the region, the wrappers take all tensors, and
return them in the backwards that follow.  Autograd drops a wrapper, and so frees its tensor, when it has run the node
that saved it.

Most of what is recomputed is read by the first half alone: the inputs of an activation function, queries and keys.  The
calls of a region are alike, so the first call that has run both halves shows which tensors the second one reads, and
later calls keep these alone.  Should another one be read after all, the region is recomputed once more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch.autograd import NO_BACKWARD, backward_id, keeps_graph, saved_tensor_hooks
from .._torch.tensors import version_of

__all__ = ["Reuse", "in_pipeline_stage"]

EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that a "
    "module saved, which is recomputed in backward, was written to between the backward of the inputs and that of the "
    "weights. Change parameters after the step of the pipeline schedule, or pass recompute=False."
)


class _Seen:
    """What a call shows, which outlives it."""

    def __init__(self) -> None:
        self.split = False  # its backward of the inputs has begun
        self.late = set[int]()  # numbers of the tensors that other backwards have read


class _Kept:
    """What autograd holds for one tensor that was saved in a region."""

    __slots__ = ("__weakref__", "call", "number", "packed", "tensor", "version")

    def __init__(self, call: _Call, number: int, packed: Any) -> None:
        self.call, self.number, self.packed = call, number, packed
        self.tensor: Tensor | None = None
        self.version = 0


class _Call:
    """One call of a region, until autograd has dropped all that it saved."""

    def __init__(self, reuse: Reuse, unpack: Callable[[Any], Tensor]) -> None:
        self.seen = _Seen()
        self._reuse, self._unpack = reuse, unpack
        self._saved: list[weakref.ref[_Kept]] = []
        self._first = NO_BACKWARD  # the backward of the inputs

    def add(self, packed: Any) -> _Kept:
        """Return what autograd holds for the next saved tensor."""
        kept = _Kept(self, len(self._saved), packed)
        self._saved.append(weakref.ref(kept))
        return kept

    def read(self, kept: _Kept) -> Tensor:
        """Return a saved tensor in backward."""
        seen, tensor = self.seen, kept.tensor
        if not seen.split and not keeps_graph():  # [guard: full backward -> False]
            return self._unpack(kept.packed)
        first = not seen.split
        if first:
            seen.split, self._first = True, backward_id()
        later = self._first != backward_id()
        if later:
            seen.late.add(kept.number)
        if tensor is not None:
            if version_of(tensor) != kept.version:  # [guard: edit between both halves of a backward]
                raise RuntimeError(EDITED)
            return tensor
        tensor = self._unpack(kept.packed)
        if later:
            self._reuse.forget()
        if first or later:
            self._keep(kept, tensor)
        return tensor

    def _keep(self, read: _Kept, tensor: Tensor) -> None:
        """Keep what was recomputed just now, when the first tensor of it was read."""
        late = self._reuse.late
        for ref in self._saved:
            kept = ref()
            if kept is not None and (late is None or kept.number in late):  # [guard: what the weights read]
                kept.tensor = tensor if kept is read else self._unpack(kept.packed)
                kept.version = version_of(kept.tensor)


def _read(kept: _Kept) -> Tensor:
    return kept.call.read(kept)


class Reuse:
    """What the calls of one region, which are alike, keep between both halves of a split backward.

    Attributes
    ----------
    late : frozenset of int or None
        Numbers of the saved tensors that the backward of the weights reads; None until a call has shown that.
    """

    def __init__(self) -> None:
        self.late: frozenset[int] | None = None
        self._watched: tuple[weakref.ref[_Call], _Seen] | None = None

    def forget(self) -> None:
        """Learn anew what the backward of the weights reads."""
        self.late = self._watched = None

    def _learn(self) -> None:
        """Take what the watched call has shown, if all that it saved is dropped."""
        if self._watched is not None and self._watched[0]() is None:
            seen, self._watched = self._watched[1], None
            if seen.split:
                self.late = frozenset(seen.late)

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward of a call runs, inside of the `Checkpoint`."""
        outer = saved_tensor_hooks()
        if outer is None:  # no hooks are installed where no gradient is computed
            return nullcontext()
        pack, unpack = outer
        call = _Call(self, unpack)
        if self.late is None:
            self._learn()
        if self.late is None and self._watched is None:
            self._watched = weakref.ref(call), call.seen
        return saved_tensors_hooks(lambda tensor: call.add(pack(tensor)), _read)


def in_pipeline_stage() -> bool:
    """Return whether the calling thread runs the forward of a stage of `torch.distributed.pipelining`."""
    pipelining = sys.modules.get("torch.distributed.pipelining")
    if pipelining is None:  # a program that has stages has imported it
        return False
    code = pipelining.PipelineStage.forward_one_chunk.__code__
    frame: FrameType | None = sys._getframe(1)  # its own frame would refer to itself, and be kept by an interrupt
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
