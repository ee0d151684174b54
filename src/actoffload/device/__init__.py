"""The accelerator of this machine, or the reference device, which runs on any CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from .._warnings import warn
from .accelerator import Accelerator
from .base import Backend
from .reference import ReferenceDevice

__all__ = ["ReferenceDevice", "ReferenceDeviceWarning", "use"]


class ReferenceDeviceWarning(UserWarning):
    """Offloading runs on the reference device, because the machine has no accelerator."""


D = TypeVar("D", bound=Backend)
_found: Backend | None = None
_chosen: list[Backend] = []
_lock = threading.Lock()


def backend() -> Backend:
    """Return the device that new contexts use.

    That is the innermost one chosen with `use`, else the accelerator of this machine, else the reference
    device, with one `ReferenceDeviceWarning` in a process.
    """
    global _found
    if _chosen:
        return _chosen[-1]
    with _lock:
        if _found is None:
            if torch.accelerator.is_available():
                _found = Accelerator()
            else:
                _found = ReferenceDevice(wall_clock=True)
                warn(
                    "No accelerator found: actoffload runs on its reference device, where CPU memory plays the "
                    "device too. Gradients and bytes are exact; times say nothing about a GPU.",
                    ReferenceDeviceWarning,
                )
        return _found


@contextmanager
def use(device: D) -> Iterator[D]:
    """Use a given device for contexts created in this block: for tests and virtual-time experiments.

    Examples
    --------
    >>> from actoffload.device import ReferenceDevice, use
    >>> with use(ReferenceDevice(d2h=50e9, h2d=50e9)) as device:
    ...     context, sync = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    """
    if not all(hasattr(device, name) for name in ("type", "current_stream", "empty_host")):  # a part of `Backend`
        raise TypeError(f"use got {device!r}; expected a device, such as ReferenceDevice().")
    _chosen.append(device)
    try:
        yield device
    finally:
        _chosen.remove(device)
