"""What an author of a module can say about single tensors, and how to ask whether offloading is on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .engine import notes, state

__all__ = ["is_cpu_offload_enabled", "mark_not_offload", "start_offload"]


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep tensors on the device when autograd saves them.

    The mark belongs to the storage: it reaches every view of it, also views made before, and ends when the
    storage is freed.  Nothing is written on the tensors.

    Parameters
    ----------
    *tensors : torch.Tensor or None
        Tensors of any shape; None is passed over.

    Raises
    ------
    TypeError
        If an argument is neither a tensor nor None.

    Notes
    -----
    Same name and meaning as in Transformer Engine's PyTorch API.

    Examples
    --------
    >>> hidden = torch.randn(512, 1024)
    >>> actoffload.mark_not_offload(hidden, hidden.t())
    """
    for tensor in _tensors(tensors, "mark_not_offload"):
        notes.keep(tensor)


def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """Say that tensors are final from here on, before autograd saves them.

    A copy normally waits for everything that was queued on the current stream when the tensor was saved.  A
    fused function saves its tensors when it ends; calling this where each was computed lets the copies start
    there.  A tensor that is changed in place afterwards loses the note.  Outside of an enabled context, and for
    tensors that are never saved, nothing happens.

    Parameters
    ----------
    *tensors : torch.Tensor or None
        Tensors of any shape on the offloading device; None is passed over.
    offload_base_tensor : bool
        Move the whole storage of each tensor even if the saved view covers little of it; for instance the
        interleaved query, key and value of one projection.

    Raises
    ------
    TypeError
        If an argument is neither a tensor nor None.

    Notes
    -----
    Same name and meaning as in Transformer Engine's PyTorch API.
    """
    found = list(_tensors(tensors, "start_offload"))
    if not state.enabled():
        return
    backend = state.running.backends[-1]
    for tensor in found:
        if tensor.device.type == backend.type:
            stream = backend.current_stream(backend.place(tensor))
            if backend.checks:
                backend.saved(tensor, stream)
            notes.final(tensor, backend.record(stream), backend.capturing(), whole=offload_base_tensor)


def is_cpu_offload_enabled() -> bool:
    """Return whether the calling thread is inside an enabled offloading context.

    Examples
    --------
    >>> actoffload.is_cpu_offload_enabled()
    False
    """
    return state.enabled()


def _tensors(values: Iterable[torch.Tensor | None], name: str) -> Iterable[torch.Tensor]:
    for value in values:
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} got a {type(value).__name__}; expected tensors (or None).")
        yield value
