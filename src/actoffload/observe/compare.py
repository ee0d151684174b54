"""A step with offloading beside the same step without: memory, time, and how much of the one the other cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from .counters import mebibytes
from .measure import DeviceInfo, MemoryMeter, describe_device, measure_step_times

if TYPE_CHECKING:
    from ..handle import OffloadHandle
    from ..offload_context import OffloadContext

__all__ = ["Comparison", "compare_steps"]


@dataclass(frozen=True)
class Comparison:
    """Two measured steps; ``print`` gives a table.

    Parameters
    ----------
    device : DeviceInfo
        What they were measured on.
    peak_without, peak_with : int
        Peaks of device memory in bytes.
    bytes_offloaded : int
        Bytes that one step copied to the host.
    bytes_absent : int
        The part of them that the plan lets go before the peak: the drop that can be expected.
    seconds_without, seconds_with : float
        Median times of a step.
    """

    device: DeviceInfo
    peak_without: int
    peak_with: int
    bytes_offloaded: int
    bytes_absent: int
    seconds_without: float
    seconds_with: float

    @property
    def drop(self) -> int:
        """Bytes by which the peak is lower."""
        return self.peak_without - self.peak_with

    @property
    def ratio(self) -> float:
        """R: the drop over the bytes that should be absent at the peak; 1.0 says that none of them was there."""
        return self.drop / self.bytes_absent if self.bytes_absent else 1.0

    def __str__(self) -> str:
        def ms(seconds: float) -> str:
            return f"{seconds * 1e3:.2f} ms"

        rows = (
            ("", "without", "with offload", "difference"),
            ("peak memory", mebibytes(self.peak_without), mebibytes(self.peak_with), mebibytes(-self.drop)),
            (
                "step time",
                ms(self.seconds_without),
                ms(self.seconds_with),
                f"{(self.seconds_with / self.seconds_without - 1) * 100:+.1f} %",
            ),
            ("bytes offloaded", "", mebibytes(self.bytes_offloaded), ""),
            ("absent at the peak", "", mebibytes(self.bytes_absent), ""),
            ("R = drop / absent", "", f"{self.ratio * 100:.2f} %", ""),
        )
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
            for row in rows
        ]
        lines.insert(1, "-" * (sum(widths) + 6))
        return "\n".join([*lines, f"measured on {self.device}"])


def compare_steps(
    without: Callable[[], object],
    within: Callable[[], object],
    offloading: OffloadContext | OffloadHandle,
    *,
    bytes_absent: int | None = None,
    repeats: int = 7,
    steps: int = 3,
) -> Comparison:
    """Measure a step without and with offloading, side by side.

    Parameters
    ----------
    without, within : callable
        The step without offloading and the step with it, run without arguments.
    offloading : OffloadContext or OffloadHandle
        What offloads in `within`; its statistics start anew.
    bytes_absent : int, optional
        Offloaded bytes that should not be resident at the peak; all of them by default, as in the default
        schedule, which has released every offloaded layer when the last layer starts, and as with `offload`, where
        everything has left when the forward ends.
    repeats, steps : int
        See `measure_step_times`.

    Returns
    -------
    Comparison

    Examples
    --------
    >>> from actoffload.observe.compare import compare_steps
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    >>> x = torch.randn(1024, 512)
    >>> def step():
    ...     model(x * 1.0).square().mean().backward()
    >>> def without():
    ...     with handle.paused():
    ...         step()
    >>> handle = actoffload.offload(model)
    >>> compare_steps(without, step, handle, repeats=1).drop / 2**20
    8.0
    >>> handle.remove()
    """
    peaks = []
    for function in (without, within):
        for _ in range(2):
            function()
        offloading.reset_statistics()
        with MemoryMeter() as meter:
            function()
        peaks.append(meter.peak_bytes)
    offloaded = offloading.statistics().bytes_offloaded
    times = measure_step_times({"without": without, "with": within}, repeats=repeats, steps=steps, warmup=1)
    return Comparison(
        device=describe_device(),
        peak_without=peaks[0],
        peak_with=peaks[1],
        bytes_offloaded=offloaded,
        bytes_absent=offloaded if bytes_absent is None else bytes_absent,
        seconds_without=median(times["without"]),
        seconds_with=median(times["with"]),
    )
