"""The least that offloading by hooks costs the host: the hooks, and for each storage that leaves the calls of CUDA.

No offloader in Python that moves each storage by itself can be expected to take less.  This one is of no other use: it
knows from a step before which of the saved tensors leave, it takes for granted that the model always saves the same
ones and that nobody changes them, and it counts nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from llama_model import Stack
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Bare"]


@dataclass(slots=True)
class _Slot:
    """A storage that leaves: its copy on the host and its layout, and how many saved tensors are on it."""

    host: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    uses: int = 1


_Again: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]
"""Which save put the storage there, and how this one lies on it."""


class Bare:
    """Moves the same storages of a stack as `actoffload.offload`, with as little code as that takes.

    Parameters
    ----------
    stack : Stack
        On an accelerator; its twin is offloaded.
    layers : int
        The first so many layers leave; each is gone when two more have run.
    """

    def __init__(self, stack: Stack, layers: int) -> None:
        self._stack, self._device = stack, stack.device
        self._index = torch.accelerator.current_device_index()
        self._out, self._back = torch.Stream(stack.device), torch.Stream(stack.device)
        self._saves: list[_Slot | _Again | None] = []  # what becomes of each save of a step
        self._learn(layers)
        self._order = [k for k, save in enumerate(self._saves) if isinstance(save, _Slot)]
        self._each = len(self._order) // layers  # storages of a layer
        self._next = 0
        self._leaving: deque[tuple[list[torch.Tensor], torch.Event]] = deque()
        self._ahead: list[int] = []  # saves that come back, the next one last
        self._back_again: dict[int, list[Any]] = {}  # save -> memory, end of its copy until that was waited for, uses

    @property
    def storages(self) -> int:
        """How many storages leave."""
        return len(self._order)

    def _learn(self, layers: int) -> None:
        """Run a forward, and give each storage that leaves memory on the host."""
        weights = {weight.untyped_storage()._cdata for weight in self._stack.twin.parameters()}
        saved: list[torch.Tensor] = []
        layer_of: list[int] = []
        layer = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            layer_of.append(layer)
            return saved[-1]

        def begins(number: int) -> Callable[..., None]:
            def note(*_: Any) -> None:
                nonlocal layer
                layer = number

            return note

        handles = [each.register_forward_pre_hook(begins(k)) for k, each in enumerate(self._stack.twin.layers)]
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self._stack.twin(self._stack.input())
        for handle in handles:
            handle.remove()
        addresses = [tensor.untyped_storage()._cdata for tensor in saved]
        in_layers: dict[int, set[int]] = {}
        for address, number in zip(addresses, layer_of, strict=True):
            in_layers.setdefault(address, set()).add(number)
        first: dict[int, int] = {}
        for k, (tensor, address) in enumerate(zip(saved, addresses, strict=True)):
            small = tensor.nbytes < self._stack.settings.min_bytes
            if small or address in weights or len(in_layers[address]) > 1 or layer_of[k] >= layers:
                self._saves.append(None)
            elif address in first:
                slot = self._saves[first[address]]
                assert isinstance(slot, _Slot)
                slot.uses += 1
                self._saves.append((first[address], tensor.size(), tensor.stride()))
            else:
                first[address] = k
                memory = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
                host = memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
                self._saves.append(_Slot(host, tensor.size(), tensor.stride()))

    def step(self, between: Callable[[], object]) -> None:
        """Run a step, with a call between forward and backward."""
        self._next, self._ahead = 0, self._order.copy()
        with saved_tensors_hooks(self._pack, self._unpack):
            self._stack.step(self._stack.twin, between)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | int | _Again:
        k = self._next
        self._next += 1
        save = self._saves[k] if k < len(self._saves) else None  # the loss saves as well
        if save is None:
            return tensor if tensor.is_leaf else tensor.detach()
        if isinstance(save, tuple):
            return save
        home = torch._C._accelerator_getStream(self._index)
        held = [tensor.detach()]
        self._out.wait_event(home.record_event())
        with self._out:
            save.host.copy_(held[0], True)
        self._leaving.append((held, self._out.record_event()))
        if len(self._leaving) > 2 * self._each or k == self._order[-1]:
            self._release(home, everything=k == self._order[-1])
        return k

    def _release(self, home: torch.Stream, *, everything: bool) -> None:
        while len(self._leaving) > (0 if everything else 2 * self._each):
            held, copied = self._leaving.popleft()
            home.wait_event(copied)
            held.clear()

    def _unpack(self, saved: torch.Tensor | int | _Again) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        k = saved if isinstance(saved, int) else saved[0]
        home = torch._C._accelerator_getStream(self._index)
        if self._ahead and len(self._back_again) <= self._each:
            self._reload(home)
        memory, arrived, uses = back = self._back_again[k]
        if arrived is not None:
            home.wait_event(arrived)
            back[1] = None
        if uses == 1:
            del self._back_again[k]
        else:
            back[2] = uses - 1
        return memory if isinstance(saved, int) else memory.as_strided(saved[1], saved[2])

    def _reload(self, home: torch.Stream) -> None:
        """Queue the copies of two layers, or of as many as are left."""
        saves = [self._ahead.pop() for _ in range(min(2 * self._each, len(self._ahead)))]
        slots = [self._saves[k] for k in saves]
        empty = [torch.empty_strided(s.size, s.stride, dtype=s.host.dtype, device=self._device) for s in slots]
        self._back.wait_event(home.record_event())
        for k, slot, memory in zip(saves, slots, empty, strict=True):
            with self._back:
                memory.copy_(slot.host, True)
            self._back_again[k] = [memory, self._back.record_event(), slot.uses]
