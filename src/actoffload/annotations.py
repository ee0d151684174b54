"""Annotations of single tensors by a module's author, and whether offloading is enabled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._torch.subclasses import has_parts, parts_to_save
from .engine import eligibility


def mark_not_offload(*tensors: Any) -> None:
    """Keep tensors on the device when autograd saves them.

    The mark belongs to the storage: it applies to every view, also to earlier ones, and ends when the storage is freed.
    Of an object with several tensors it applies to each.

    Parameters
    ----------
    *tensors : torch.Tensor, object or None
        Tensors of any shape, also subclasses with ``__tensor_flatten__``; objects with ``prepare_for_saving`` and
        ``restore_from_saved``, or with ``get_data_tensors``.  None is skipped.

    Raises
    ------
    TypeError
        If an argument is none of these.

    Notes
    -----
    As in Transformer Engine's PyTorch API, whose quantized tensors are such objects.

    Examples
    --------
    >>> hidden = torch.randn(512, 1024)
    >>> actoffload.mark_not_offload(hidden, hidden.t())
    """
    for value in _checked(tensors, "mark_not_offload"):
        for tensor, _ in parts_to_save(value):
            if tensor.layout is torch.strided:  # others are kept anyway, and have no storage
                eligibility.mark_kept(tensor)


def start_offload(*tensors: Any, offload_base_tensor: bool = False) -> None:
    """Let the copies of final tensors start here, before autograd saves them, as in Transformer Engine's PyTorch API.

    A copy normally waits for all work that is on the current stream when the tensor is saved.  A fused function saves
    its tensors at its end; with this call after each was computed, the copies start earlier.  An in-place change
    afterwards cancels the call.  Outside of an enabled context, and for tensors that are never saved, it does nothing.

    Parameters
    ----------
    *tensors : torch.Tensor, object or None
        As for `mark_not_offload`, on the offloading device.
    offload_base_tensor : bool
        Offload the whole storage of each tensor even if the saved view covers little of it, such as the interleaved
        query, key and value of one projection.
    """
    found = _checked(tensors, "start_offload")
    if not eligibility.enabled():
        return
    backend = eligibility.running.backends[-1]
    for tensor, wrappers in (part for value in found for part in parts_to_save(value)):
        if tensor.device.type == backend.type and tensor.layout is torch.strided:
            stream = backend.current_stream(backend.place(tensor))
            if backend.checks:
                backend.saved(tensor, stream)
            event = backend.record(stream)
            eligibility.mark_final(tensor, event, backend.capturing(), whole=offload_base_tensor, wrappers=wrappers)


def is_cpu_offload_enabled() -> bool:
    """Return whether the calling thread is inside an enabled offloading context."""
    return eligibility.enabled()


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
