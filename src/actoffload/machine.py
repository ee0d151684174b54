"""What a machine offers for offloading: the link between device and host, matrix products, limits of host memory.

``python -m actoffload`` prints it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from .device.host import HostMemory, host_memory
from .measure import DeviceInfo, describe_device, measure_link, measure_step_times
from .report.tables import Printable, Table
from .schedule.costs import Link

__all__ = ["HostMemory", "Machine", "host_memory", "measure_machine"]

GIB = 2**30


@dataclass(frozen=True)
class Machine(Printable):
    """What offloading depends on; ``print`` gives a table and what follows from it.

    Parameters
    ----------
    device : DeviceInfo
        The device and versions.
    host : HostMemory
        Limits of host memory.
    device_bytes : int or None
        Memory of the device in bytes.
    link : Link or None
        Bytes per second of copies in each direction alone, and of both together; None on the reference device.
    flops : float or None
        Floating-point operations per second of large bfloat16 matrix products.
    pin_seconds : float or None
        Seconds to allocate 1 GiB of pinned memory, which is done once and not in each step.
    products_beside, additions_beside : float or None
        Time of matrix products, and of additions of large tensors, beside copies in both directions, over their time
        alone.  Copies share the memory bandwidth and the power of the device with compute.
    """

    device: DeviceInfo
    host: HostMemory
    device_bytes: int | None = None
    link: Link | None = None
    flops: float | None = None
    pin_seconds: float | None = None
    products_beside: float | None = None
    additions_beside: float | None = None

    @property
    def flops_per_byte(self) -> float | None:
        """FLOP in forward for each saved byte from which on copies to the host take no longer than the forward."""
        return None if self.link is None or self.flops is None else self.flops / self.link.d2h

    def _content(self) -> tuple[list[Table], tuple[str, ...]]:
        d2h, h2d, both = (None, None, None) if self.link is None else (self.link.d2h, self.link.h2d, self.link.both)
        rows = [
            ("device", str(self.device)),
            ("device memory", _gib(self.device_bytes)),
            ("device to host", _rate(d2h)),
            ("host to device", _rate(h2d)),
            ("both at once, in sum", _rate(both)),
            ("bfloat16 matrix products", "" if self.flops is None else f"{self.flops / 1e12:.0f} TFLOP/s"),
            ("matrix products beside copies", _longer(self.products_beside)),
            ("additions beside copies", _longer(self.additions_beside)),
            ("1 GiB of pinned memory", "" if self.pin_seconds is None else f"{self.pin_seconds:.2f} s to allocate"),
            ("host memory", f"{_gib(self.host.total)}, {_gib(self.host.available)} available"),
            ("locked memory (ulimit -l)", "no limit" if self.host.memlock is None else _gib(self.host.memlock)),
        ]
        table = Table(("", ""), tuple(row for row in rows if row[1]), left=2)
        return [table], (self._verdict(),)

    def _verdict(self) -> str:
        if self.flops_per_byte is None:
            return (
                "No accelerator found: the link is not measured, because times of the reference device say nothing "
                "about a GPU."
            )
        return (
            f"All layers can be offloaded at no cost if each computes {self.flops_per_byte:,.0f} FLOP in forward for "
            "each byte that it saves. With half of that, half of the layers can be. What compute takes longer beside "
            "copies comes on top."
        )


def measure_machine(nbytes: int = 2**28, width: int = 8192) -> Machine:
    """Measure this machine.

    Parameters
    ----------
    nbytes : int
        Bytes of each copy that is measured.
    width : int
        Rows and columns of the matrices that are multiplied.

    Examples
    --------
    >>> from actoffload.machine import measure_machine
    >>> measure_machine().host.total > 0
    True
    """
    machine = Machine(describe_device(), host_memory())
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return machine
    total = torch.get_device_module().mem_get_info()[1]
    begun = time.perf_counter()
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    pin_seconds = time.perf_counter() - begun
    del pinned
    link = measure_link(nbytes)
    copies = _Copies(device, nbytes)
    both = 2 * nbytes / copies.seconds()
    a = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    b = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    product, addition = (lambda: a @ a), (lambda: b.add_(1))
    seconds = median(measure_step_times({"product": product}, steps=10)["product"])
    return replace(
        machine,
        device_bytes=total,
        # The sum of both cannot be more than each direction alone allows; a little more is noise.
        link=replace(link, both=min(both, link.d2h + link.h2d)),
        flops=2 * width**3 / seconds,
        pin_seconds=pin_seconds,
        products_beside=copies.slow_down(product),
        additions_beside=copies.slow_down(addition),
    )


class _Copies:
    """Copies of `nbytes` in both directions at once, each on a stream of its own."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        on_device = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        on_host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._pairs = (on_host[0], on_device[0]), (on_device[1], on_host[1])  # to, from
        self._streams = torch.Stream(device), torch.Stream(device)

    def _queue(self, count: int = 1) -> None:
        current = torch.accelerator.current_stream()
        for stream, (target, source) in zip(self._streams, self._pairs, strict=True):
            stream.wait_stream(current)
            with stream:
                for _ in range(count):
                    target.copy_(source, non_blocking=True)

    def _copy(self) -> None:
        self._queue()
        for stream in self._streams:
            torch.accelerator.current_stream().wait_stream(stream)

    def seconds(self) -> float:
        """Return the seconds of one copy in each direction, both at once."""
        arms: dict[str, Callable[[], object]] = {"both": self._copy}
        return median(measure_step_times(arms)["both"])

    def slow_down(self, compute: Callable[[], object]) -> float:
        """Return the time of some compute beside copies that run twice as long, over its time alone."""
        alone, copy = median(measure_step_times({"once": compute}, steps=10)["once"]), self.seconds()
        calls = max(1, math.floor(0.5 * copy / alone))
        copies = math.ceil(2 * calls * alone / copy)

        def several() -> None:
            for _ in range(calls):
                compute()

        def beside() -> None:
            self._queue(copies)
            several()

        times = measure_step_times({"alone": several, "beside": beside}, repeats=15)
        return median(times["beside"]) / median(times["alone"])


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 else f"{nbytes / 2**10:.0f} KiB"


def _longer(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f} x as long"


def _rate(bytes_per_second: float | None) -> str:
    return "" if not bytes_per_second else f"{bytes_per_second / 1e9:.1f} GB/s"
