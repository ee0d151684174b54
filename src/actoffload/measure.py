"""Measure training steps: device memory, times side by side, bandwidths, and the device they were measured on.

The functions work on any accelerator of `torch.accelerator` and, without one, on the CPU with the reference device.
Wall-clock times of the reference device say nothing about a GPU, so tables and figures leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ._arguments import check_whole
from ._meters import (
    DeviceInfo,
    MemoryMeter,
    check_steps,
    describe_device,
    measure_link,
    measure_peak,
    measure_step_times,
    trace_memory,
)
from .context import OffloadContext
from .model import OffloadHandle
from .report.plots import ByteUnit, plot_measurements
from .report.tables import Printable, Table
from .schedule.costs import measured_costs
from .schedule.timeline import milliseconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Comparison",
    "DeviceInfo",
    "Measurement",
    "Measurements",
    "MemoryMeter",
    "compare_steps",
    "describe_device",
    "measure_link",
    "measure_peak",
    "measure_step_times",
    "measure_steps",
    "measured_costs",
    "trace_memory",
]


@dataclass(frozen=True)
class Comparison(Printable):
    """A step without and with offloading; ``print`` gives a table.

    Parameters
    ----------
    device : DeviceInfo
        Device of the measurement.
    peak_without, peak_with, bytes_offloaded : int
        Peaks of device memory in bytes; bytes that one step offloads.
    seconds_without, seconds_with : float
        Median step times.
    """

    device: DeviceInfo
    peak_without: int
    peak_with: int
    bytes_offloaded: int
    seconds_without: float
    seconds_with: float

    @property
    def drop(self) -> int:
        """Bytes by which the peak is lower."""
        return self.peak_without - self.peak_with

    @property
    def ratio(self) -> float:
        """R: drop of the peak over `bytes_offloaded`; 1.0 if all of them are freed at the peak."""
        return self.drop / self.bytes_offloaded if self.bytes_offloaded else 1.0

    def _content(self) -> tuple[list[Table], tuple[str, ...]]:
        unit = ByteUnit.of(max(self.peak_without, self.peak_with, self.bytes_offloaded))
        rows = [("peak memory", *map(unit.text, (self.peak_without, self.peak_with, -self.drop)))]
        if not self.device.reference:
            slower = percent(self.seconds_with / self.seconds_without - 1, sign="+")
            rows.append(("step time", milliseconds(self.seconds_without), milliseconds(self.seconds_with), slower))
        rows.append(("bytes offloaded", "", unit.text(self.bytes_offloaded), ""))
        rows.append(("R = drop / offloaded", "", percent(self.ratio, 2), ""))
        note = f"measured on {self.device}"
        return [Table(("", "without", "with offload", "difference"), tuple(rows), left=1, note=note)], ()


def compare_steps(
    without: Callable[[], object],
    offloaded: Callable[[], object],
    offloading: OffloadContext | OffloadHandle,
    *,
    repeats: int = 7,
    steps: int = 3,
) -> Comparison:
    """Measure a step without and with offloading, side by side; `repeats` and `steps` are as in `measure_step_times`.

    Parameters
    ----------
    without, offloaded : callable
        The step without offloading and the step with it, called without arguments.
    offloading : OffloadContext or OffloadHandle
        What offloads in `offloaded`; its statistics are reset.

    Examples
    --------
    >>> from actoffload.measure import compare_steps
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
    """
    check_whole(repeats=repeats, steps=steps, least=1)
    # Every step runs before any is measured: libraries allocate a workspace for each stream and keep it.
    without()
    offloaded()
    peaks = []
    for function in (without, offloaded):
        function()
        function()
        offloading.reset_statistics()
        peaks.append(measure_peak(function, warmup=0))
    copied, device = offloading.statistics().bytes_offloaded, describe_device()
    arms = {"without": without, "offloaded": offloaded}
    if device.reference:  # its times are not shown
        repeats = steps = 1
    times = measure_step_times(arms, repeats=repeats, steps=steps, warmup=0 if device.reference else 1)
    seconds = [median(of_arm) for of_arm in times.values()]
    return Comparison(device, peaks[0], peaks[1], copied, seconds[0], seconds[1])


@dataclass(frozen=True)
class Measurement:
    """Peak of device memory and time of one kind of step.

    Parameters
    ----------
    peak_bytes : int
        Peak of device memory while one step runs, in bytes.
    seconds : float
        Median time of a step; not measured and 0.0 on the reference device.
    """

    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Measurements(Printable):
    """Several kinds of steps; ``print`` gives a table, and ``|`` joins those of one device.

    Parameters
    ----------
    device : DeviceInfo
        Device of the measurement.
    steps : mapping of str to Measurement
        Steps by name; the first one is what the others are compared with.
    """

    device: DeviceInfo
    steps: Mapping[str, Measurement]

    def __or__(self, other: Measurements) -> Measurements:
        return Measurements(self.device, {**self.steps, **other.steps})

    def __getitem__(self, name: str) -> Measurement:
        return self.steps[name]

    def _content(self) -> tuple[list[Table], tuple[str, ...]]:
        first = next(iter(self.steps.values()))
        unit = ByteUnit.of(max(of.peak_bytes for of in self.steps.values()))
        header: tuple[str, ...] = ("", "peak memory", "drop")
        rows = [
            (name, unit.text(of.peak_bytes), unit.text(first.peak_bytes - of.peak_bytes))
            for name, of in self.steps.items()
        ]
        if self.device.reference:
            return [Table(header, tuple(rows), left=1, note=f"measured on {self.device}")], ()
        header += ("step time", f"x {next(iter(self.steps))}")
        timed = tuple(
            (*row, milliseconds(of.seconds), f"{of.seconds / first.seconds:.3f}")
            for row, of in zip(rows, self.steps.values(), strict=True)
        )
        return [Table(header, timed, left=1, note=f"measured on {self.device}")], ()

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the peaks as bars, each with its time as a ratio to the first one, except on the reference device."""
        times = {} if self.device.reference else {name: of.seconds for name, of in self.steps.items()}
        return plot_measurements({name: of.peak_bytes for name, of in self.steps.items()}, times, ax)


def measure_steps(
    steps: Mapping[str, Callable[[], object]], *, warmup: int = 2, repeats: int = 5, calls: int = 1
) -> Measurements:
    """Measure the peak memory of several kinds of steps, and on an accelerator their times side by side.

    Parameters
    ----------
    steps : mapping of str to callable
        Steps by name, called without arguments.
    warmup, repeats, calls : int
        Calls of each step before it is measured, measurements of its time, and calls in one of them.

    Examples
    --------
    >>> from actoffload.measure import measure_steps
    >>> print(measure_steps({"small": lambda: torch.zeros(2**18), "large": lambda: torch.zeros(2**20)}))
             peak memory      drop
    -----  -------------  --------
    small        1.0 MiB   0.0 MiB
    large        4.0 MiB  -3.0 MiB
    measured on reference device (CPU), ...
    """
    check_whole(repeats=repeats, calls=calls, least=1)
    check_whole(warmup=warmup, least=0)
    check_steps(steps=steps)
    device = describe_device()
    for step in steps.values():
        step()  # before any peak is measured, because libraries keep workspaces
    peaks = {name: measure_peak(step, warmup=warmup) for name, step in steps.items()}
    times = {name: [0.0] for name in steps}
    if not device.reference:
        times = measure_step_times(steps, repeats=repeats, steps=calls, warmup=0)
    return Measurements(device, {name: Measurement(peaks[name], median(times[name])) for name in steps})
