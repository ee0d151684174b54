"""Measuring a step: device memory, times side by side, the link, and what the measurements were made on.

Nothing here is used by the engine.  The gallery, the benchmarks and the GPU tests measure with these functions,
and a program may measure itself with them.  They work on any accelerator of `torch.accelerator` and, without
one, on the CPU that plays the reference device.
"""

from __future__ import annotations

import platform
import random
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .engine.statistics import mebibytes
from .schedule.costs import LayerCost, Link, Saved
from .schedule.timeline import Kind, Span, Timeline

if TYPE_CHECKING:
    from .context.context import OffloadContext
    from .model.handle import OffloadHandle

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

REFERENCE = "reference device (CPU)"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a measurement was made on.

    Parameters
    ----------
    name : str
        Name of the accelerator, or ``"reference device (CPU)"``.
    reference : bool
        True if there is no accelerator: bytes are exact then, times say nothing about a GPU.
    driver : str
        Version of the accelerator's driver; empty on the reference device.
    torch, python : str
        Versions.
    """

    name: str
    reference: bool
    driver: str
    torch: str
    python: str

    def __str__(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.name}{driver}, torch {self.torch}, Python {self.python}"


def describe_device() -> DeviceInfo:
    """Return what the current accelerator is, or that there is none."""
    reference = not torch.accelerator.is_available()
    name = REFERENCE if reference else str(torch.get_device_module().get_device_name())
    return DeviceInfo(name, reference, "" if reference else _driver(), torch.__version__, platform.python_version())


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n", 1)[0].strip() or "unknown"


class MemoryMeter:
    """Device memory in use while a ``with`` block runs.

    On an accelerator the numbers are the caching allocator's: bytes in tensors, not bytes reserved.  Without one,
    the storages that are created in the block are followed until they are freed; memory from before the block
    does not count then, nor what a kernel takes and frees within itself.

    Parameters
    ----------
    host_clock : bool
        Take the seconds of samples from the host's clock, also on an accelerator.  Needed while a graph is
        captured, when the device does nothing.

    Attributes
    ----------
    peak_bytes : int
        Largest number of bytes in use; known when the block is left.
    samples : list of (float, int)
        Seconds since the first sample, and bytes in use, for each call of `sample`; known when the block is
        left.  Seconds are those at which the device came to that point of the current stream.

    Examples
    --------
    >>> from actoffload.measure import MemoryMeter
    >>> with MemoryMeter() as meter:
    ...     a = torch.zeros(2**18)
    ...     del a
    ...     meter.sample()
    >>> meter.peak_bytes >= 2**20
    True
    """

    def __init__(self, *, host_clock: bool = False) -> None:
        self._device = torch.accelerator.current_accelerator(check_available=True)
        self._storages: Any = _Storages() if self._device is None else None
        self._host_clock = host_clock or self._device is None
        self._marks: list[tuple[Any, int]] = []
        self.peak_bytes = 0
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> MemoryMeter:
        if self._storages is not None:
            self._storages.__enter__()
        else:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._storages is not None:
            self._storages.__exit__(kind, error, traceback)
            self.peak_bytes = self._storages.peak
        else:
            torch.accelerator.synchronize()
            self.peak_bytes = torch.accelerator.max_memory_allocated()
        self.samples = [(self._since_first(mark), nbytes) for mark, nbytes in self._marks]
        self._marks.clear()

    def _since_first(self, mark: Any) -> float:
        first = self._marks[0][0]
        return float(mark - first if self._host_clock else first.elapsed_time(mark) * 1e-3)

    def sample(self, *_: Any) -> None:
        """Note the bytes in use at this point; takes any arguments, so that it can be a hook."""
        nbytes = torch.accelerator.memory_allocated() if self._storages is None else self._storages.now
        if self._host_clock:
            self._marks.append((time.perf_counter(), nbytes))
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._marks.append((event, nbytes))


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operations create while this mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._follow(tensor.untyped_storage(), before)
        return result

    def _follow(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive or key in before:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, freed)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def measure_peak(function: Callable[[], object], warmup: int = 2) -> int:
    """Return the peak of device memory while a function runs, usually one training step.

    Parameters
    ----------
    function : callable
        Run without arguments.
    warmup : int
        Runs before the one that is measured: the first ones allocate what stays, gradients for instance.

    Returns
    -------
    int
        Bytes; see `MemoryMeter`.
    """
    for _ in range(warmup):
        function()
    with MemoryMeter() as meter:
        function()
    return meter.peak_bytes


def measure_step_times(
    arms: Mapping[str, Callable[[], object]], *, repeats: int = 7, steps: int = 1, warmup: int = 2
) -> dict[str, list[float]]:
    """Time several functions side by side.

    The repeats are interleaved, each time in another order: so a clock that drifts, another program, and the heat
    that the function before has left meet all of them alike.
    Each measurement follows an untimed run of the same function and covers `steps` runs without a pause
    between them, from the first to the last work on the current stream.

    Parameters
    ----------
    arms : mapping of str to callable
        What to time, by name.
    repeats : int
        Measurements of each.
    steps : int
        Runs in one measurement.
    warmup : int
        Runs of each before the first measurement.

    Returns
    -------
    dict of str to list of float
        Seconds for one run; one entry for each repeat.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for function in arms.values():
        for _ in range(warmup):
            function()
    order, names = random.Random(0), list(arms)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            arms[name]()
            seconds[name].append(_time(arms[name], steps))
    return seconds


def _time(function: Callable[[], object], steps: int) -> float:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        begun = time.perf_counter()
        for _ in range(steps):
            function()
        return (time.perf_counter() - begun) / steps  # [guard: time of one step]
    start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    torch.accelerator.synchronize()
    start.record()
    for _ in range(steps):
        function()
    end.record()
    torch.accelerator.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / steps


def measure_link(nbytes: int = 2**28, repeats: int = 8) -> Link:
    """Measure the bandwidth between the device and page-locked host memory, one direction at a time.

    Parameters
    ----------
    nbytes : int
        Bytes of one copy.
    repeats : int
        Copies in each direction; the median counts.

    Returns
    -------
    Link
        Bytes per second.  On the reference device, those of a copy within host memory.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    reference = device.type == "cpu"
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not reference)
    arms: dict[str, Callable[[], object]] = {
        "d2h": lambda: on_host.copy_(on_device, non_blocking=True),
        "h2d": lambda: on_device.copy_(on_host, non_blocking=True),
    }
    times = measure_step_times(arms, repeats=repeats)
    return Link(d2h=nbytes / median(times["d2h"]), h2d=nbytes / median(times["h2d"]))


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


def measured_costs(timelines: Timeline | Sequence[Timeline]) -> tuple[LayerCost, ...]:
    """Return the cost of each layer of a step that was recorded while nothing moved.

    Record with a context of manual synchronization on whose controller nothing is called: every layer's saved
    bytes are counted then, and no copy disturbs the compute.

    Parameters
    ----------
    timelines : Timeline or sequence of Timeline
        One or several recordings of the same step; times are the medians over them.

    Returns
    -------
    tuple of LayerCost
        In order of the forward.  When a tensor is saved and when backward needs it are read off the steps of
        the resident bytes; tensors are taken to be needed in the reverse order of their saving.

    Raises
    ------
    ValueError
        If there is no recording, a recording has no layers, or something was copied.

    Examples
    --------
    >>> from actoffload.measure import measured_costs
    >>> context, sync, _ = actoffload.get_cpu_offload_context(
    ...     enabled=True, model_layers=2, manual_synchronization=True
    ... )
    >>> x = torch.randn(512, 512)
    >>> with context.record_timeline() as recorder:
    ...     for layer in (torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)):
    ...         with context:
    ...             x = layer(x)
    ...         x = sync(x)
    ...     x.sum().backward()
    >>> [cost.nbytes for cost in measured_costs(recorder.timeline())]
    [1048576, 1048576]
    """
    recordings = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not recordings:
        raise ValueError("No timeline was given; record at least one step.")
    parsed = [_one(timeline) for timeline in recordings]
    first = parsed[0]
    if any([cost.nbytes for cost in costs] != [cost.nbytes for cost in first] for costs in parsed):
        raise ValueError("The recordings are of different steps: their layers save different bytes.")
    return tuple(
        LayerCost(
            median(costs[k].forward for costs in parsed),
            median(costs[k].backward for costs in parsed),
            first[k].saved,
        )
        for k in range(len(first))
    )


def _one(timeline: Timeline) -> list[LayerCost]:
    if timeline.of(Kind.D2H, Kind.H2D):
        raise ValueError("The recorded step copied tensors; record one in which nothing moves.")
    forward = {span.layer: span for span in timeline.of(Kind.FORWARD)}
    backward = {span.layer: span for span in timeline.of(Kind.BACKWARD)}
    if not forward or set(forward) != set(backward):
        raise ValueError("The recording has no whole step: every layer needs its forward and its backward.")
    costs = []
    for layer in sorted(forward):
        saved_at = _rises(timeline, forward[layer])
        sizes = [nbytes for _, nbytes in saved_at]
        needed_at = _needed(timeline, backward[layer], sizes)
        saved = [
            Saved(nbytes, saved_at=at, needed_at=needed)
            for (at, nbytes), needed in zip(saved_at, needed_at, strict=True)
        ]
        costs.append(LayerCost(forward[layer].seconds, backward[layer].seconds, tuple(saved)))
    return costs


def _within(timeline: Timeline, span: Span) -> list[tuple[float, int, int]]:
    """Return (fraction of the span, bytes before, bytes after) for each step of the resident bytes in a span."""
    found, before = [], 0
    for at, nbytes in timeline.resident:
        if span.start <= at <= span.end and nbytes != before:
            fraction = (at - span.start) / span.seconds if span.seconds else 0.0
            found.append((min(max(fraction, 0.0), 1.0), before, nbytes))
        before = nbytes
    return found


def _rises(timeline: Timeline, span: Span) -> list[tuple[float, int]]:
    return [(at, after - before) for at, before, after in _within(timeline, span) if after > before]


def _needed(timeline: Timeline, span: Span, sizes: Sequence[int]) -> list[float]:
    """Return when backward needs each tensor: the next one is needed where those before it are gone."""
    falls = [(at, before - after) for at, before, after in _within(timeline, span) if after < before]
    needed = [0.0] * len(sizes)
    at, freed, used = 0.0, 0, 0
    for k in reversed(range(len(sizes))):
        while falls and freed < used:
            at, nbytes = falls.pop(0)
            freed += nbytes
        needed[k] = at
        used += sizes[k]
    return needed
