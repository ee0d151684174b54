"""Which operators make the host wait for the device, why, and what to write instead.

The rules were read off the CUDA kernels of PyTorch (``aten/src/ATen/native/cuda``): whatever calls
``c10::cuda::memcpy_and_sync`` or ``stream_synchronize``, or ends in a Thrust algorithm that returns a size.
The GPU tests hold each rule against `torch.cuda.set_sync_debug_mode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = []


@dataclass(frozen=True)
class Cause:
    """Why an operation synchronizes, and what to do instead; each is one phrase."""

    why: str
    instead: str


VALUE = Cause(
    "reads a value of the device into Python",
    "keep the value on the device (detach it) and read it once in many steps",
)
SIZE = Cause(
    "the host has to know how many elements are selected",
    "keep the shape with torch.where(mask, a, b), or use torch.nonzero_static with a size known beforehand",
)
MASK = Cause(
    "a boolean mask as an index selects a number of elements that the host has to know",
    "keep the shape with torch.where(mask, x, other) or x.masked_fill(mask, number), or index with integers",
)
MASK_PUT = Cause(
    "values for a boolean mask are placed after the host has counted the mask",
    "write torch.where(mask, values, x) with values of the full shape, or x.masked_fill_(mask, number)",
)
MASK_BACKWARD = Cause(
    "adds at a boolean mask, as the backward of x[mask] does; the host counts the mask again",
    "do not index with a mask in forward: torch.where(mask, x, other) keeps the shape",
)
DISTINCT = Cause(
    "the host has to know how many distinct elements there are",
    "count into a tensor of known size with scatter_add_, or sort and keep the duplicates",
)
ANSWER = Cause(
    "compares on the device and reads the answer into Python",
    "keep the answer on the device: torch.eq(a, b).all() or torch.isclose(a, b).all()",
)
BLOCKING_OUT = Cause(
    "copies to the host and waits until everything before the copy and the copy itself are done",
    "copy with non_blocking=True into pinned memory and read it after an event, or do it once in many steps",
)
PAGEABLE_OUT = Cause(
    "copies into pageable memory, which returns only when the copy is done, also with non_blocking=True",
    "give the copy a destination in pinned memory: torch.empty(..., pin_memory=True)",
)
BLOCKING_IN = Cause(
    "copies from the host and waits until the copy is done",
    "take the tensor from pinned memory (pin_memory() or DataLoader(pin_memory=True)) and pass non_blocking=True",
)
EXPLICIT = Cause(
    "waits until the device has done what was queued",
    "leave it out; where one stream needs another, Stream.wait_event and Stream.wait_stream wait on the device",
)
OUTSIDE = Cause(
    "waits for the device outside of any operator",
    "for torch.tensor(..., device=...): make it in pinned memory and copy with non_blocking=True; "
    "for a call of synchronize(): leave it out",
)
OTHER_THREAD = Cause(
    "waits for the device; on a thread other than the one of the block the operator is not known",
    "run the same line on the thread of the block to see what to do",
)
REPLAYED = Cause(
    "an operation of backward waits for the device; which line of forward it belongs to is not known",
    "look at the synchronizing lines of forward: the backward of indexing with a mask synchronizes too",
)

# Places in torch's Python code that read values: file, and function where the file has several.
_CALLERS: Mapping[tuple[str, str | None], Cause] = {
    ("amp/grad_scaler.py", "_maybe_opt_step"): Cause(
        "the scaler reads whether a gradient is infinite, to decide about the step of the optimizer",
        "an optimizer made with fused=True decides on the device; bfloat16 needs no scaler",
    ),
    ("nn/utils/clip_grad.py", None): Cause(
        "reads whether the norm of the gradients is finite", "leave out error_if_nonfinite=True"
    ),
    ("distributions/distribution.py", None): Cause(
        "reads whether every parameter and sample is valid", "pass validate_args=False"
    ),
    ("nn/modules/transformer.py", "_detect_is_causal_mask"): Cause(
        "compares the mask with a causal one and reads the answer", "pass is_causal=True or is_causal=False"
    ),
}

# By the name in the operator's schema; all overloads unless `recognised` says otherwise.
_CAUSES: Mapping[str, Cause] = {
    "aten::_local_scalar_dense": VALUE,
    "aten::nonzero": SIZE,
    "aten::masked_select": SIZE,
    "aten::index": MASK,
    "aten::index_put": MASK_PUT,
    "aten::index_put_": MASK_PUT,
    "aten::_index_put_impl_": MASK_PUT,
    "aten::_unique": DISTINCT,
    "aten::_unique2": DISTINCT,
    "aten::unique_dim": DISTINCT,
    "aten::unique_consecutive": DISTINCT,
    "aten::unique_dim_consecutive": DISTINCT,
    "aten::equal": ANSWER,
    "aten::allclose": ANSWER,
    "aten::repeat_interleave": Cause(
        "the host has to add up the repeats to know the size of the result", "pass output_size=, the sum of the repeats"
    ),
    "aten::bincount": Cause(
        "the host reads the smallest and the largest element, also with minlength",
        "count with torch.zeros(n, ...).scatter_add_(0, index, ones)",
    ),
    "aten::histc": Cause("the host reads the smallest and the largest element", "pass min= and max="),
    "aten::normal": Cause("the host checks that no standard deviation is negative", "write mean + std * randn_like"),
    "aten::_linalg_check_errors": Cause(
        "the host reads whether the decomposition succeeded",
        "use the variant that leaves this to you: torch.linalg.inv_ex, cholesky_ex, solve_ex, lu_factor_ex",
    ),
}
_TITLES = {"aten::_local_scalar_dense": "aten::item / aten::_local_scalar_dense"}

# These wait inside of Thrust, where torch.cuda.set_sync_debug_mode does not look.
_UNREPORTED = {"aten::unique_dim", "aten::unique_dim_consecutive"}
_COPIES = {"aten::_to_copy", "aten::copy_"}


def title(name: str) -> str:
    """Return the name of an operator as people know it."""
    return _TITLES.get(name, name)


def cause_of_caller(functions: Iterable[tuple[str, str]]) -> Cause | None:
    """Return what is known of one of torch's own functions that reads a value; `functions` are files and names."""
    for file, name in functions:
        cause = _CALLERS.get((file, name)) or _CALLERS.get((file, None))
        if cause is not None:
            return cause
    return None


def cause_of_report(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cause:
    """Return the cause of a wait that torch reported inside of the operator `name`."""
    if name in _COPIES:
        copied = _copy(name, args, kwargs)
        if copied is not None:
            return copied
    if _CAUSES.get(name) is MASK_PUT and _accumulates(args, kwargs):
        return MASK_BACKWARD
    return _CAUSES.get(name) or Cause(f"waits for the device inside of {name}", "look for a form with a known size")


def recognised(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cause | None:
    """Return why an operator synchronizes on an accelerator, judged by its name and arguments; None if it does not.

    Tensors on the CPU are judged as if they were on the device.
    """
    if name in _COPIES:
        return _copy(name, args, kwargs)
    cause = _CAUSES.get(name)
    if cause is None:
        return None
    if cause is MASK:
        return cause if _masks(args[1]) else None
    if cause is MASK_PUT:
        if not _masks(args[1]) or _is_masked_fill(args, kwargs):
            return None
        return MASK_BACKWARD if _accumulates(args, kwargs) else cause
    if name == "aten::repeat_interleave":
        return cause if kwargs.get("output_size") is None else None
    if name == "aten::histc":
        low, high = (_argument(args, kwargs, at, key, 0) for at, key in ((2, "min"), (3, "max")))
        return cause if low == high else None
    if name == "aten::normal":
        return cause if isinstance(_argument(args, kwargs, 1, "std", None), torch.Tensor) else None
    return cause


def unreported(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cause | None:
    """Return why an operator on CUDA waits although the sync debug mode says nothing; None if it does not."""
    if name == "aten::copy_":
        cause = _copy(name, args, kwargs)
        return cause if cause is PAGEABLE_OUT else None
    if name == "aten::unique_consecutive":  # with a dimension it is unique_dim_consecutive inside
        return DISTINCT if _argument(args, kwargs, 3, "dim", None) is not None else None
    return _CAUSES[name] if name in _UNREPORTED else None


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, key: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(key, default)


def _masks(indices: Sequence[Any]) -> list[torch.Tensor]:
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _accumulates(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(_argument(args, kwargs, 3, "accumulate", False))


def _is_masked_fill(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether ``x[mask] = number``, which torch turns into ``masked_fill_``, is what is asked for."""
    given = [index for index in args[1] if index is not None]
    value: torch.Tensor = args[2]
    return not _accumulates(args, kwargs) and len(given) == 1 and value.numel() == 1 and value.device.type == "cpu"


def _copy(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cause | None:
    if name == "aten::_to_copy":
        source: torch.Tensor = args[0]
        target = torch.device(kwargs.get("device") or source.device)
        non_blocking = bool(kwargs.get("non_blocking", False))
        pinned = non_blocking  # such a copy makes its own destination in pinned memory
    else:
        source, target = args[1], args[0].device
        non_blocking = bool(_argument(args, kwargs, 2, "non_blocking", False))
        pinned = False
    outwards, inwards = source.device.type != "cpu", target.type != "cpu"
    if outwards == inwards or source.numel() == 0:
        return None
    if inwards:
        return None if non_blocking else BLOCKING_IN
    if not non_blocking:
        return BLOCKING_OUT
    return None if pinned or args[0].is_pinned() else PAGEABLE_OUT
