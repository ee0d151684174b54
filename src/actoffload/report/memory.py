"""Add to an out-of-memory error what holds the device memory, and what would help."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import Module

from .._text import fold, fold_names, numberless, size
from .._torch.subclasses import plain_parts
from .._torch.tensors import address
from ..device.base import Backend
from ..schedule.plan import Plan

__all__ = ["Memory", "add_note"]

TITLE = "actoffload: "
GROUPS = "saved tensors of groups"
LARGE = 0.1  # of the memory in use: from here on a part is worth advice
WIDE = 5  # outputs by inputs of a linear module, from which on it is a head with logits
MOST = 4  # lines of groups


@dataclass(eq=False)
class Memory:
    """What is known of a model when an allocation fails; sizes are in bytes.

    Parameters
    ----------
    model, backend, plan : Module, Backend, Plan
        The model, its device and its plan.
    next_choice : str
        What a lower peak would cost; empty if it is not known.
    saved : dict of str to int
        Saved tensors on the device, by name of the group.
    outside, refused : int
        Saved tensors of no group; those for which there was no host memory.
    where : str
        What ran.
    is_outside : bool
        Whether a forward ran, and no group in it.
    """

    model: Module
    backend: Backend
    plan: Plan
    next_choice: str = ""
    saved: dict[str, int] = field(default_factory=dict)
    outside: int = 0
    refused: int = 0
    where: str = "in backward"
    is_outside: bool = False


def add_note(error: BaseException, memory: Memory) -> None:
    """Add a note to an error, unless it has one."""
    if not any(note.startswith(TITLE) for note in getattr(error, "__notes__", ())):
        error.add_note("\n".join(_lines(memory)))


def _lines(memory: Memory) -> Iterator[str]:
    parts = dict(_parts(memory))
    used, limit = memory.backend.in_use(), memory.backend.memory_limit()
    if used is not None:
        parts["everything else: temporary tensors, inputs, what the program keeps"] = max(used - sum(parts.values()), 0)
    shown = size(sum(parts.values()) if used is None else used)
    yield f"{TITLE}{shown}{f' of {size(limit)}' if limit else ''} were in use {memory.where}:"
    for name, nbytes in parts.items():
        if nbytes:
            yield f"  {size(nbytes)}: {name}"
        if name == GROUPS:
            yield from _groups(memory.saved)
    yield "What would help:"
    yield from (f"- {sentence}" for sentence in _advice(memory, sum(parts.values()) if used is None else used))


def _parts(memory: Memory) -> Iterator[tuple[str, int]]:
    weights = [*memory.model.parameters(), *memory.model.buffers()]
    yield "weights and buffers", _nbytes(memory.backend, weights)
    yield "gradients", _nbytes(memory.backend, (weight.grad for weight in weights if weight.grad is not None))
    yield "optimizer states", _nbytes(memory.backend, _states({id(weight) for weight in weights}))
    yield GROUPS, sum(memory.saved.values())
    yield "saved tensors outside of groups", memory.outside


def _nbytes(backend: Backend, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors on the device, those of local shards where they are sharded."""
    parts = [part for tensor in tensors for part in plain_parts(tensor) if part.device.type == backend.type]
    return sum({address(part.untyped_storage()): part.untyped_storage().nbytes() for part in parts}.values())


def _states(weights: set[int]) -> Iterator[torch.Tensor]:
    """Yield the states of all optimizers of these weights."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            for weight, state in getattr(found, "state", {}).items():
                if id(weight) in weights:
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _groups(saved: Mapping[str, int]) -> Iterator[str]:
    rows = fold(((name, nbytes) for name, nbytes in saved.items() if nbytes), lambda row: (numberless(row[0]), row[1]))
    largest = sorted(rows, key=lambda row: -len(row) * row[0][1])
    for row in largest[:MOST]:
        yield f"    {size(row[0][1])}{' each' if len(row) > 1 else ''}: {fold_names([name for name, _ in row])}"
    if len(largest) > MOST:
        yield f"    {size(sum(each[1] for row in largest[MOST:] for each in row))}: other groups"


def _advice(memory: Memory, used: int) -> Iterator[str]:
    kept = sum(memory.saved.values())
    if memory.next_choice:
        yield memory.next_choice
    elif kept >= LARGE * used and not memory.plan.recomputed:
        yield f"recompute=True: most of {size(kept)} would not be saved, and backward runs the operators again."
    if memory.refused:
        found = f"the host had no page-locked memory for {size(memory.refused)}"
        yield f"{found}: a larger max_host_bytes, or more free host memory; it takes as many bytes there."
    head = _head(memory.model)
    if memory.is_outside and head:
        yield (
            f"no group ran, so the logits of `{head}` may be the peak: a loss that does not keep them all, such as "
            "use_liger_kernel=True of the Trainer, at nearly no cost."
        )
    if memory.outside >= LARGE * used:
        yield (
            f"torch.utils.checkpoint around what no group covers, or its modules in layers: up to "
            f"{size(memory.outside)} less, and these parts run again in backward."
        )
    less = (kept + memory.outside) // 2
    half = f"at least {size(less)} less" if less else "half of what a step allocates"
    yield f"half the batch with twice the gradient accumulation: {half}, at some throughput."


def _head(model: Module) -> str:
    """Return the name of the linear module with the most outputs, if they are many more than its inputs."""
    linear = [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    wide = [(each.out_features, name) for name, each in linear if each.out_features >= WIDE * each.in_features]
    return max(wide)[1] if wide else ""
