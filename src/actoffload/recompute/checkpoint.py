"""One call of a function that saves nothing for backward, and runs again there.

`[Note: our own checkpointing]`  This is what `torch.utils.checkpoint` does without reentrant autograd, whose rules it
keeps: in place of each tensor that autograd would save, it gets an empty slot.  When a backward reads the first slot,
the function runs again with the same inputs, random numbers and autocast, until it has saved as many tensors; each
fills its slot until it is read.  What differs: what short steps wait for is the host, and it takes the host less.  A
Llama layer with adapters (LoRA) saves 57 tensors.  Its forward and its backward took 1.15 ms each of one core (torch
2.13); beside the second forward, `torch.utils.checkpoint` added 1.8 ms, and this 1.3.  It keeps fewer objects of Python
too, and a node may read a saved tensor twice in one backward.

Only autograd has a reference to a slot.  So the tensor in it is freed after its node has run, even if it was not read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch.autograd import NO_BACKWARD, backward_id, saved_tensor_hooks
from .._torch.compiling import opaque
from .._torch.tensors import no_torch_dispatch, version_of

__all__ = ["OTHERS", "Checkpoint", "described", "recomputing"]

Described: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]

OTHERS = (
    "A module that is recomputed ran other operators than in its forward: what it does depends on something that has "
    "changed since. Change nothing between forward and backward, or pass recompute=False, or keep=[...] with the "
    "module's name."
)
WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a "
    "module that is recomputed in backward was written to after its forward. Pass recompute=False."
)


_thread = threading.local()


def recomputing() -> int:
    """Return how many recomputations run in this thread, inside of each other; a program may begin one in a forward."""
    return getattr(_thread, "recomputing", 0)


class _Slot:
    """Stands for one tensor that autograd would save; `tensor` is there from its recomputation until it is read."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Filled(BaseException):
    """Ends a recomputation when all slots are filled; not an `Exception`, which the function may handle."""


class Checkpoint:
    """One call of a function, which is recomputed in each backward that reads what autograd saved in it.

    Parameters
    ----------
    function : callable
        From tensors to anything.
    inputs : sequence of torch.Tensor
        Autograd saves them in place of all that the function saves.
    draws : bool
        Whether the function may draw random numbers, so that it has to draw the same ones again.
    again : callable
        Returns a context in which the function is recomputed.
    name : str
        What errors of a recomputation say of the function; nothing if it is empty.

    Raises
    ------
    RuntimeError
        In backward, if the function saves other tensors than before, or if an input was written to in between.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        *,
        draws: bool = True,
        again: Callable[[], AbstractContextManager[Any]] = nullcontext,
        name: str = "",
    ) -> None:
        self._function, self._context, self._name = function, again, name
        hooks: tuple[Any, Any] = saved_tensor_hooks() or (_keep, _kept)
        pack, self._unpack = hooks
        self._inputs = [(pack(of), of.requires_grad) for of in inputs]
        self._around = _Surroundings(inputs, draws=draws)
        self._slots: list[weakref.ref[_Slot]] = []
        self._saved: list[Described] = []
        self._filled_for = NO_BACKWARD  # the backward for which the slots were filled

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context of the call in forward."""
        return saved_tensors_hooks(self._pack, self._read)

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        self._saved.append(described(tensor))
        return slot

    opaque(_pack)

    def _read(self, slot: _Slot) -> Tensor:
        """Return what fills a slot, for a node that runs or for who looks at the graph outside of a backward."""
        now = backward_id()
        # [guard: another backward through a retained graph]
        if slot.tensor is None or self._filled_for != now or now == NO_BACKWARD:
            outer, _thread.recomputing = recomputing(), recomputing() + 1
            try:
                self._recompute()
            except Exception as error:
                if self._name:
                    error.add_note(f"This was raised in backward, while {self._name} was recomputed.")
                raise
            finally:
                _thread.recomputing = outer
            self._filled_for = now
        tensor, slot.tensor = slot.tensor, None
        assert tensor is not None
        return tensor

    opaque(_read)

    def _recompute(self) -> None:
        held = [(self._unpack(of), requires_grad) for of, requires_grad in self._inputs]
        fill = _Filling(self._slots, self._saved).pack
        with torch.enable_grad(), saved_tensors_hooks(fill, _same), self._around.restored():
            inputs = [_again(*of) for of in held]
            del held
            try:
                with self._context():
                    self._function(*inputs)
            except _Filled:
                return
        raise RuntimeError(OTHERS)  # [guard: recomputation that saves fewer tensors]


class _Filling:
    """Fills slots with what a function saves; an interrupt may leave its hook behind, so it refers to nothing else."""

    def __init__(self, slots: Sequence[weakref.ref[_Slot]], saved: Sequence[Described]) -> None:
        self._slots, self._saved = slots, saved
        self._count = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Fill the next slot with a tensor that autograd saves, and return the tensor without its graph."""
        place, number = self._count, len(self._slots)
        if place == number:  # the function saves more while it is left
            raise _Filled
        now, before = described(tensor), self._saved[place]
        if now is not before and now != before:  # [guard: recomputation of other shapes]
            raise RuntimeError(f"{OTHERS} One saved a tensor of {_told(before)}, and now one of {_told(now)}.")
        if tensor.requires_grad:  # it may be an output of its own node, which would then refer to itself
            tensor = _detached(tensor)
        slot = self._slots[place]()
        if slot is not None:  # [guard: slot that was dropped]
            slot.tensor = tensor
        self._count = place + 1
        if self._count == number:
            raise _Filled
        return tensor

    opaque(pack)


class _Surroundings:
    """What a call depends on beside its inputs: random numbers, autocast and the default device."""

    def __init__(self, inputs: Sequence[Tensor], *, draws: bool) -> None:
        placed = [of.device for of in inputs if of.device.type not in ("cpu", "meta")]
        self._kind = placed[0].type if placed else _accelerator()
        self._draws, self._devices = draws, list({of.index for of in placed if of.type == self._kind})
        self._states: list[Tensor] = []
        if draws:
            get_state = torch.get_device_module(self._kind).get_rng_state if self._devices else None
            self._states = [torch.get_rng_state(), *(get_state(of) for of in self._devices if get_state is not None)]
        kinds = filter(torch.amp.is_autocast_available, (self._kind, "cpu"))
        self._autocast = [(kind, *_autocast(kind)) for kind in kinds]
        self._keeps_casts, self._default = torch.is_autocast_cache_enabled(), torch.get_default_device()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let all of it be as it was, in this block."""
        with ExitStack() as stack:
            if self._draws:
                stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._kind))
                torch.set_rng_state(self._states[0])
                for device, state in zip(self._devices, self._states[1:], strict=True):
                    torch.get_device_module(self._kind).set_rng_state(state, device)
            for kind, enabled, dtype in self._autocast:
                if enabled or _autocast(kind)[0]:  # [guard: autocast as in the forward]
                    cast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._keeps_casts)
                    stack.enter_context(cast)
            if torch.get_default_device() != self._default:  # [guard: default device as in the forward]
                stack.enter_context(self._default)
            yield


@cache
def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@lru_cache(maxsize=1024)  # one object for all tensors alike: the garbage collector pauses the host for many
def _described(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Described:
    return shape, dtype, device


def described(tensor: Tensor) -> Described:
    """Return what a tensor and its recomputation have in common."""
    try:
        return _described(tensor.shape, tensor.dtype, tensor.device)
    except TypeError:  # a symbolic shape has no hash
        return tensor.shape, tensor.dtype, tensor.device


def _told(of: Described) -> str:
    shape, dtype, device = of
    return f"shape {tuple(shape)} and {dtype} on {device}"


def _detached(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        return tensor.detach()
    with no_torch_dispatch():  # a dispatch mode, which has nothing to do here, takes ten times as long
        return tensor.detach()


def _again(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return an input for a recomputation, whose graph begins there."""
    tensor = tensor.detach()
    if not requires_grad:
        return tensor
    # A view, because autocast takes a leaf for a weight, and keeps the cast of it.  Sparse tensors have none.
    leaf = tensor.requires_grad_()
    return leaf.view_as(leaf) if leaf.layout is torch.strided else leaf  # [guard: sparse input -> True]


def _keep(tensor: Tensor) -> Any:
    return tensor, version_of(tensor)


def _kept(held: Any) -> Tensor:
    tensor, version = held
    if version_of(tensor) != version:  # [guard: input that was edited]
        raise RuntimeError(WRITTEN)
    kept: Tensor = tensor
    return kept


def _same(tensor: Tensor) -> Tensor:
    return tensor
