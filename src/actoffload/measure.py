"""Measure training steps: device memory, times side by side, bandwidths, and the device they were measured on.

The functions work on any accelerator of `torch.accelerator` and, without one, on the CPU with the reference device.
"""

from __future__ import annotations

import platform
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .context import OffloadContext
from .device.accelerator import Accelerator
from .device.reference import CreatedStorages
from .model import OffloadHandle
from .report.tables import Printable, Table
from .schedule.costs import Link, measured_costs
from .schedule.timeline import mebibytes, milliseconds, percent

__all__ = [
    "Comparison",
    "DeviceInfo",
    "MemoryMeter",
    "compare_steps",
    "describe_device",
    "measure_link",
    "measure_peak",
    "measure_step_times",
    "measured_costs",
]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device and the versions of a measurement.

    Parameters
    ----------
    name, driver, torch, python : str
        Name of the accelerator, or ``"reference device (CPU)"``, and versions; no driver has an empty one.
    reference : bool
        True without an accelerator: bytes are exact then, times say nothing about a GPU.
    """

    name: str
    reference: bool
    driver: str
    torch: str = torch.__version__
    python: str = platform.python_version()

    def __str__(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.name}{driver}, torch {self.torch}, Python {self.python}"


def describe_device() -> DeviceInfo:
    """Return the current accelerator and the versions of driver, torch and Python."""
    if not torch.accelerator.is_available():
        return DeviceInfo("reference device (CPU)", True, "")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=30).partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = ""
    return DeviceInfo(str(torch.get_device_module().get_device_name()), False, driver.strip() or "unknown")


class MemoryMeter:
    """Measure the device memory in use while a ``with`` block runs: bytes of tensors, not bytes reserved.

    Without an accelerator these are the bytes of the storages that the block creates, until they are freed.

    Attributes
    ----------
    peak_bytes : int
        Largest number of bytes in use; set at the end of the block.
    samples : list of (float, int)
        For each call of `sample`, seconds since the first one, and bytes in use; set at the end of the block.  Seconds
        are those of the current stream, but of the host in the capture of a CUDA graph.

    Examples
    --------
    >>> from actoffload.measure import MemoryMeter
    >>> with MemoryMeter() as meter:
    ...     a = torch.zeros(2**18)
    ...     meter.sample()
    >>> meter.peak_bytes >= 2**20
    True
    """

    def __init__(self) -> None:
        self._device = torch.accelerator.current_accelerator(check_available=True)
        self._storages = CreatedStorages()
        self._earlier = 0  # peak of a meter around this one
        self._marks: list[tuple[Any, int]] = []  # an event, or seconds of the host
        self.peak_bytes = 0
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> MemoryMeter:
        if self._device is None:
            self._storages.__enter__()
        else:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            self._earlier, Accelerator.peak_before_resets = Accelerator.peak_before_resets, 0
        return self

    def __exit__(self, *_: object) -> None:
        if self._device is None:
            self._storages.__exit__()
            self.peak_bytes = self._storages.peak
        else:
            torch.accelerator.synchronize()
            self.peak_bytes = max(torch.accelerator.max_memory_allocated(), Accelerator.peak_before_resets)
            Accelerator.peak_before_resets = max(self._earlier, self.peak_bytes)
        for mark, nbytes in self._marks:
            first = self._marks[0][0]
            seconds = mark - first if isinstance(first, float) else first.elapsed_time(mark) * 1e-3
            self.samples.append((float(seconds), nbytes))
        self._marks.clear()

    def sample(self, *_: Any) -> None:
        """Note the bytes in use now; arguments are ignored, so that it can be a hook."""
        nbytes = self._storages.now if self._device is None else torch.accelerator.memory_allocated()
        if self._device is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._marks.append((time.perf_counter(), nbytes))
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._marks.append((event, nbytes))


def measure_peak(function: Callable[[], object], warmup: int = 2) -> int:
    """Return the peak of device memory in bytes while a function runs, usually one training step.

    It is called `warmup` times before, because the first calls allocate gradients and workspaces.
    """
    _repeat(function, warmup)
    with MemoryMeter() as meter:
        function()
    return meter.peak_bytes


def measure_step_times(
    arms: Mapping[str, Callable[[], object]], *, repeats: int = 7, steps: int = 1, warmup: int = 2
) -> dict[str, list[float]]:
    """Time several functions side by side: return the seconds of one call by name, for each repeat.

    The order is random, so that drifting clocks affect all functions alike.  Each measurement follows an untimed call
    of the same function.  Seconds are times between events on the current stream.

    Parameters
    ----------
    arms : mapping of str to callable
        Functions by name, called without arguments.
    repeats, steps, warmup : int
        Measurements of each function, calls in one of them without a pause between, and calls before the first one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for function in arms.values():
        _repeat(function, warmup)
    order, names = random.Random(0), list(arms)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            arms[name]()
            seconds[name].append(_time(arms[name], steps))
    return seconds


def _repeat(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def _time(function: Callable[[], object], steps: int) -> float:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        begun = time.perf_counter()
        _repeat(function, steps)
        return (time.perf_counter() - begun) / steps  # [guard: time of one step]
    start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    torch.accelerator.synchronize()
    start.record()
    _repeat(function, steps)
    end.record()
    torch.accelerator.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / steps


def measure_link(nbytes: int = 2**28, repeats: int = 8) -> Link:
    """Measure the bandwidth between device and pinned host memory: medians over `repeats` copies of `nbytes` bytes.

    On the reference device it is that of a copy within host memory.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    arms: dict[str, Callable[[], object]] = {
        "d2h": lambda: on_host.copy_(on_device, non_blocking=True),
        "h2d": lambda: on_device.copy_(on_host, non_blocking=True),
    }
    times = measure_step_times(arms, repeats=repeats)
    return Link(d2h=nbytes / median(times["d2h"]), h2d=nbytes / median(times["h2d"]))


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
        peaks = map(mebibytes, (self.peak_without, self.peak_with, -self.drop))
        slower = percent(self.seconds_with / self.seconds_without - 1, sign="+")
        rows = (
            ("peak memory", *peaks),
            ("step time", milliseconds(self.seconds_without), milliseconds(self.seconds_with), slower),
            ("bytes offloaded", "", mebibytes(self.bytes_offloaded), ""),
            ("R = drop / offloaded", "", percent(self.ratio, 2), ""),
        )
        note = f"measured on {self.device}"
        return [Table(("", "without", "with offload", "difference"), rows, left=1, note=note)], ()


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
    # Every step runs before any is measured: libraries allocate a workspace for each stream and keep it.
    without()
    offloaded()
    peaks = []
    for function in (without, offloaded):
        _repeat(function, 2)
        offloading.reset_statistics()
        peaks.append(measure_peak(function, warmup=0))
    copied = offloading.statistics().bytes_offloaded
    arms = {"without": without, "offloaded": offloaded}
    times = measure_step_times(arms, repeats=repeats, steps=steps, warmup=1)
    seconds = [median(of_arm) for of_arm in times.values()]
    return Comparison(describe_device(), peaks[0], peaks[1], copied, seconds[0], seconds[1])
