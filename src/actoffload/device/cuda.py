"""What only CUDA (and ROCm under its name) has: graphs and memory statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["MEMORY_COUNTERS", "capturing", "driver_calls"]

MEMORY_COUNTERS = ("num_device_alloc", "num_device_free", "num_alloc_retries")


capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
"""Whether the current stream is being captured into a CUDA graph.  Asks the driver; does not synchronize."""


def driver_calls() -> dict[str, int]:
    """Return how often memory was taken from the driver so far, on the device and page-locked on the host.

    A steady-state training step leaves every count where it was.
    """
    device = torch.cuda.memory_stats()
    host = torch.cuda.host_memory_stats()
    counts = {name: int(device.get(name, 0)) for name in MEMORY_COUNTERS}
    counts["num_host_alloc"] = int(host.get("num_host_alloc", 0))
    counts["num_host_free"] = int(host.get("num_host_free", 0))
    return counts
