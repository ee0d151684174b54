"""What an author of a module can say about single tensors, and how to ask whether offloading is on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .engine import tensor_marks
from .engine.subclasses import has_parts, parts_to_save

__all__ = ["is_cpu_offload_enabled", "mark_not_offload", "start_offload"]


def mark_not_offload(*tensors: Any) -> None:
    """Keep tensors on the device when autograd saves them.

    The mark belongs to the storage: it reaches every view of it, also views made before, and ends when the
    storage is freed.  Nothing is written on the tensors.  Of something that is made of several tensors it reaches
    every part.

    Parameters
    ----------
    *tensors : torch.Tensor, object or None
        Tensors of any shape, tensor subclasses that are made of plain ones among them (``__tensor_flatten__``);
        objects that give their tensors away by ``prepare_for_saving`` and take them back by
        ``restore_from_saved``, or show them by ``get_data_tensors``.  None is passed over.

    Raises
    ------
    TypeError
        If an argument is none of these.

    Notes
    -----
    Same name and meaning as in Transformer Engine's PyTorch API, whose quantized tensors are such objects.

    Examples
    --------
    >>> hidden = torch.randn(512, 1024)
    >>> actoffload.mark_not_offload(hidden, hidden.t())
    """
    for value in _checked(tensors, "mark_not_offload"):
        for tensor, _ in parts_to_save(value):
            if tensor.layout is torch.strided:  # others stay anyway, and have no storage to note it on
                tensor_marks.keep(tensor)


def start_offload(*tensors: Any, offload_base_tensor: bool = False) -> None:
    """Say that tensors are final from here on, before autograd saves them.

    A copy normally waits for everything that was queued on the current stream when the tensor was saved.  A
    fused function saves its tensors when it ends; calling this where each was computed lets the copies start
    there.  A tensor that is changed in place afterwards loses the note.  Outside of an enabled context, and for
    tensors that are never saved, nothing happens.

    Parameters
    ----------
    *tensors : torch.Tensor, object or None
        Tensors of any shape on the offloading device, and objects made of them, as for `mark_not_offload`; None
        is passed over.
    offload_base_tensor : bool
        Move the whole storage of each tensor even if the saved view covers little of it; for instance the
        interleaved query, key and value of one projection.

    Raises
    ------
    TypeError
        If an argument is none of these.

    Notes
    -----
    Same name and meaning as in Transformer Engine's PyTorch API.
    """
    found = _checked(tensors, "start_offload")
    if not tensor_marks.enabled():
        return
    backend = tensor_marks.running.backends[-1]
    for tensor, wrappers in (part for value in found for part in parts_to_save(value)):
        if tensor.device.type == backend.type and tensor.layout is torch.strided:
            stream = backend.current_stream(backend.place(tensor))
            if backend.checks:
                backend.saved(tensor, stream)
            event = backend.record(stream)
            tensor_marks.final(tensor, event, backend.capturing(), whole=offload_base_tensor, wrappers=wrappers)


def is_cpu_offload_enabled() -> bool:
    """Return whether the calling thread is inside an enabled offloading context.

    Examples
    --------
    >>> actoffload.is_cpu_offload_enabled()
    False
    """
    return tensor_marks.enabled()


def _checked(values: Iterable[Any], name: str) -> list[Any]:
    """Return the arguments of a function that are not None."""
    found = [value for value in values if value is not None]
    for value in found:
        if not has_parts(value):
            raise TypeError(
                f"{name} got a {type(value).__name__}; expected tensors, objects with prepare_for_saving and "
                "restore_from_saved, objects with get_data_tensors, or None."
            )
    return found
