"""What a machine offers for offloading: the link between device and host, matrix products, limits of host memory.

``python -m actoffload`` prints it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from ._text import Table, percent, size
from .device import backend
from .device.host import HostMemory, host_memory
from .measure import DeviceInfo, describe_device, measure_link, measure_step_times
from .schedule.costs import Link

__all__ = ["HostMemory", "Machine", "host_memory", "measure_machine"]

GIB = 2**30
COPY = 2**28  # bytes
WIDTH = 8192
LLAMA_FLOP_PER_BYTE = 2500  # eager, bfloat16, with the formula of the guide


@dataclass(frozen=True)
class Machine:
    """What offloading depends on; ``print`` gives a table and what follows from it.

    Parameters
    ----------
    device, host : DeviceInfo, HostMemory
        The device and versions; limits of host memory.
    device_bytes, link, flops, pin_seconds : int, Link, float, float or None
        Memory of the device; bandwidth of copies; floating-point operations per second of large bfloat16 matrix
        products; seconds to allocate 1 GiB of pinned memory.  None on the reference device.
    """

    device: DeviceInfo
    host: HostMemory
    device_bytes: int | None = None
    link: Link | None = None
    flops: float | None = None
    pin_seconds: float | None = None

    @property
    def flops_per_byte(self) -> float | None:
        """FLOP in forward for each saved byte from which on copies to the host take no longer than the forward."""
        return None if self.link is None or self.flops is None else self.flops / self.link.d2h

    def __str__(self) -> str:
        rows = [("device", str(self.device))]
        if self.device_bytes is not None:
            rows.append(("device memory", size(self.device_bytes)))
        if self.link is not None:
            rates = ("device to host", self.link.d2h), ("host to device", self.link.h2d)
            both = ("both at once, in sum", self.link.both)
            rows += [(name, f"{rate / 1e9:.1f} GB/s") for name, rate in (*rates, both) if rate is not None]
        if self.flops is not None:
            rows.append(("bfloat16 matrix products", f"{self.flops / 1e12:.0f} TFLOP/s"))
        if self.pin_seconds is not None:
            rows.append(("1 GiB of pinned memory", f"{self.pin_seconds:.2f} s to allocate"))
        rows.append(("host memory", f"{size(self.host.total)}, {size(self.host.available)} available"))
        return f"{Table(('', ''), tuple(rows), left=2)}\n\n- {self._verdict()}"

    def _verdict(self) -> str:
        if self.flops_per_byte is None:
            return (
                "No accelerator found: the link is not measured, because times of the reference device say nothing "
                "about a GPU."
            )
        share = min(LLAMA_FLOP_PER_BYTE / self.flops_per_byte, 1.0)
        return (
            f"Copies of a layer are hidden behind its forward if that computes {self.flops_per_byte:,.0f} FLOP for "
            f"each byte that it saves. A layer of Llama 8B with 8192 tokens computes {LLAMA_FLOP_PER_BYTE:,}: "
            f"{percent(share, 0)} of such layers can be offloaded at no cost in time. Longer sequences and compiled "
            "layers compute more."
        )


def measure_machine() -> Machine:
    """Measure this machine: copies of 256 MiB, and products of matrices with 8192 rows and columns."""
    device, host = torch.accelerator.current_accelerator(check_available=True), host_memory()
    if device is None:
        return Machine(describe_device(), host)
    begun = time.perf_counter()
    pinned = backend().empty_host(GIB)
    pin_seconds = time.perf_counter() - begun
    del pinned
    link = measure_link(COPY)
    matrix = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
    seconds = median(measure_step_times({"product": lambda: matrix @ matrix}, steps=10)["product"])
    return Machine(
        describe_device(),
        host,
        device_bytes=torch.get_device_module().mem_get_info()[1],
        link=link,
        flops=2 * WIDTH**3 / seconds,
        pin_seconds=pin_seconds,
    )
