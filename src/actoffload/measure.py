"""Measure training steps: device memory, times side by side, bandwidths, and the device they were measured on.

The functions work on any accelerator of `torch.accelerator` and, without one, on the CPU with the reference device.
Wall-clock times of the reference device say nothing about a GPU, so tables and figures leave them out.
"""

from __future__ import annotations

import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._arguments import check_whole
from ._text import Table, byte_unit, milliseconds, percent, size
from .context import OffloadContext
from .device.accelerator import Accelerator
from .device.reference import CreatedStorages
from .model import OffloadHandle
from .report.plots import LINES, make_axes
from .schedule.costs import Link

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "DeviceInfo",
    "Measurement",
    "Measurements",
    "MemoryMeter",
    "compare_steps",
    "describe_device",
    "measure_link",
    "measure_step_times",
    "measure_steps",
    "trace_memory",
]

# The device, its memory and its link


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device and the versions of a measurement; `reference` is True without an accelerator."""

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

    Without an accelerator these are the bytes of the storages that the block creates, until they are freed.  The peak
    is `peak_bytes`, set at the end of the block.
    """

    def __init__(self) -> None:
        self._device = torch.accelerator.current_accelerator(check_available=True)
        self._storages = CreatedStorages()
        self._earlier = 0  # peak of a meter around this one
        self.peak_bytes = 0

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

    @property
    def bytes_in_use(self) -> int:
        """Bytes in use now."""
        return self._storages.now if self._device is None else torch.accelerator.memory_allocated()


def trace_memory(function: Callable[[], object], modules: Iterable[nn.Module]) -> list[int]:
    """Return the device memory in use at the borders of modules while a function runs, usually one training step.

    Parameters
    ----------
    function : callable
        Called once, without arguments.
    modules : iterable of Module
        Modules that it calls, such as the layers of a model; their first output requires a gradient.

    Returns
    -------
    list of int
        Bytes before the function runs, after the forward of each module, before the backward of each module, and after
        the function has run.
    """
    found: list[int] = []

    def look(*_: Any) -> None:
        found.append(meter.bytes_in_use)

    def border(module: nn.Module, args: Any, output: Any) -> None:
        look()
        first = output if isinstance(output, torch.Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(look)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(border).remove)
        meter = stack.enter_context(MemoryMeter())
        look()
        function()
        look()
    return found


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
    check_whole(repeats=repeats, steps=steps, least=1)
    check_whole(warmup=warmup, least=0)
    check_steps("arms", arms)
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


def check_steps(name: str, steps: object) -> None:
    """Raise a `TypeError` for an argument that is no mapping of names to functions."""
    if not isinstance(steps, Mapping) or not steps or not all(map(callable, steps.values())):
        raise TypeError(f"{name} is {steps!r}; expected a mapping of names to functions, at least one.")


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

    Copies run in each direction alone and in both at once.  On the reference device they are copies within host memory,
    in one direction only.
    """
    check_whole(nbytes=nbytes, repeats=repeats, least=1)
    device = torch.accelerator.current_accelerator(check_available=True)
    on_device = [torch.empty(nbytes, dtype=torch.uint8, device=device or "cpu") for _ in range(2)]
    on_host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=device is not None) for _ in range(2)]
    copies: dict[str, Callable[[], object]] = {
        "d2h": lambda: on_host[0].copy_(on_device[0], non_blocking=True),
        "h2d": lambda: on_device[1].copy_(on_host[1], non_blocking=True),
    }
    streams = [] if device is None else [torch.Stream(device), torch.Stream(device)]

    def copy_both() -> None:
        current = torch.accelerator.current_stream()
        for stream, copy in zip(streams, copies.values(), strict=True):
            stream.wait_stream(current)
            with stream:
                copy()
        for stream in streams:
            current.wait_stream(stream)

    times = measure_step_times({**copies, **({"both": copy_both} if streams else {})}, repeats=repeats)
    rates = {name: nbytes / median(seconds) for name, seconds in times.items()}
    # The sum of both cannot be more than each direction alone allows; a little more is noise.
    both = min(2 * rates["both"], rates["d2h"] + rates["h2d"]) if streams else None
    return Link(rates["d2h"], rates["h2d"], both=both)


# Steps


@dataclass(frozen=True)
class Measurement:
    """Peak of device memory in one step, and its median time, which is 0.0 on the reference device."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Measurements:
    """Several kinds of steps; ``print`` gives a table, and ``|`` joins those of one device.

    Parameters
    ----------
    device, steps : DeviceInfo, mapping of str to Measurement
        The device; steps by name, of which the first is what the others are compared with.
    bytes_offloaded : int or None
        Bytes that the last of them offloads; None if that was not counted.
    """

    device: DeviceInfo
    steps: Mapping[str, Measurement]
    bytes_offloaded: int | None = None

    @property
    def drop(self) -> int:
        """Bytes by which the peak of the last step is lower than that of the first one."""
        peaks = [step.peak_bytes for step in self.steps.values()]
        return peaks[0] - peaks[-1]

    @property
    def ratio(self) -> float:
        """R: `drop` over `bytes_offloaded`; 1.0 if all of them are freed at the peak."""
        return self.drop / self.bytes_offloaded if self.bytes_offloaded else 1.0

    def __or__(self, other: Measurements) -> Measurements:
        return Measurements(self.device, {**self.steps, **other.steps})

    def __getitem__(self, name: str) -> Measurement:
        return self.steps[name]

    def __str__(self) -> str:
        first, timed = next(iter(self.steps)), not self.device.reference
        header = "", "peak memory", "drop", *(("step time", f"x {first}") if timed else ())
        rows = []
        for name, step in self.steps.items():
            drop = size(self.steps[first].peak_bytes - step.peak_bytes)
            times = milliseconds(step.seconds), f"{step.seconds / (self.steps[first].seconds or 1.0):.3f}"
            rows.append((name, size(step.peak_bytes), drop, *(times if timed else ())))
        note = f"measured on {self.device}"
        if self.bytes_offloaded is not None:
            note = f"R = drop / {size(self.bytes_offloaded)} offloaded = {percent(self.ratio, 2)}\n{note}"
        return str(Table(header, tuple(rows), left=1, note=note))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the peaks as bars, each with its time as a ratio to the first one, except on the reference device."""
        ax = make_axes(ax, 5.8, 1.2 + 0.5 * len(self.steps))
        first, timed = next(iter(self.steps)), not self.device.reference
        largest = max(step.peak_bytes for step in self.steps.values())
        unit, unit_name = byte_unit(largest)
        peaks, colours = [step.peak_bytes / unit for step in self.steps.values()], ["#7f7f7f", LINES[0][0]]
        ax.barh(list(self.steps), peaks, color=colours[:1] + colours[1:] * (len(peaks) - 1), height=0.62)
        behind = {"facecolor": ax.get_facecolor(), "linewidth": 0, "pad": 1.0}  # hides a line that is drawn across
        for row, step in enumerate(self.steps.values()):
            text = size(step.peak_bytes) + (f", {step.seconds / self.steps[first].seconds:.3f} x" if timed else "")
            place = largest / unit, row  # in one column, so that a line at a smaller limit is clear of all
            ax.annotate(text, place, (4, 0), textcoords="offset points", va="center", bbox=behind)
        ax.set_xlim(right=(1.65 if timed else 1.35) * largest / unit)
        ax.invert_yaxis()
        beside = f"\nbeside each bar: step time, x {first}" if timed else ""
        ax.set_xlabel(f"peak of device memory ({unit_name}){beside}")
        ax.tick_params(axis="y", length=0)
        return ax


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
    small        1.0 MiB   0 bytes
    large        4.0 MiB  -3.0 MiB
    measured on reference device (CPU), ...
    """
    check_whole(repeats=repeats, calls=calls, least=1)
    check_whole(warmup=warmup, least=0)
    check_steps("steps", steps)
    device = describe_device()
    for step in steps.values():
        step()  # before any peak is measured, because libraries allocate a workspace for each stream and keep it
    peaks, times = dict[str, int](), {name: [0.0] for name in steps}
    for name, step in steps.items():
        _repeat(step, warmup)
        with MemoryMeter() as meter:
            step()
        peaks[name] = meter.peak_bytes
    if not device.reference:
        times = measure_step_times(steps, repeats=repeats, steps=calls, warmup=0)
    return Measurements(device, {name: Measurement(peaks[name], median(times[name])) for name in steps})


def compare_steps(
    without: Callable[[], object],
    offloaded: Callable[[], object],
    offloading: OffloadContext | OffloadHandle,
    *,
    repeats: int = 7,
    steps: int = 3,
) -> Measurements:
    """Measure a step without and with offloading, side by side, and whether all that is offloaded is freed.

    Parameters
    ----------
    without, offloaded : callable
        The step without offloading and the step with it, called without arguments.
    offloading : OffloadContext or OffloadHandle
        What offloads in `offloaded`; its statistics are reset.
    repeats, steps : int
        Measurements of the time of each, and calls in one of them.
    """
    check_whole(repeats=repeats, steps=steps, least=1)
    found = measure_steps({"without": without, "with offload": offloaded}, repeats=repeats, calls=steps)
    offloading.reset_statistics()
    offloaded()
    return replace(found, bytes_offloaded=offloading.statistics().bytes_offloaded)
