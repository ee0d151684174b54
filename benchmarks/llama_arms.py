"""The arms of the Llama benchmark: a stack under `actoffload.offload`, and what is asked of one step."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from llama_model import Stack

import actoffload
from actoffload.measure import MemoryMeter
from actoffload.schedule import Kind


class Offloaded:
    """A stack under `actoffload.offload`, with a step for any number of layers.

    Parameters
    ----------
    stack : Stack
        Whose model is offloaded, at first with as many layers as possible: the host pool is complete then.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._count = stack.settings.layers - 1
        self.handle = actoffload.offload(stack.model, num_layers=self._count, min_bytes=stack.settings.min_bytes)

    def step(self, count: int) -> None:
        """Run one step; the schedule is changed only if it has to be, and so outside of what is timed."""
        if count != self._count:
            self._count = count
            self.handle.reschedule(num_layers=count)
        self._stack.step(self._stack.model)

    def counted(self, count: int) -> tuple[actoffload.report.Statistics, int, float]:
        """Return statistics, peak in bytes and about the seconds of a step, the second one of its kind."""
        self.step(count)
        self.handle.reset_statistics()
        with MemoryMeter() as meter:
            begun = time.perf_counter()
            self.step(count)
            synchronize(self._stack.device)
            seconds = time.perf_counter() - begun
        return self.handle.statistics(), meter.peak_bytes, seconds

    def timeline(self, count: int) -> dict[str, Any]:
        """Return the sums of one recorded step, and what the report advises."""
        self.step(count)
        with self.handle.recording():
            self.step(count)
        step = self.handle.timeline()
        return {
            "num_layers": count,
            "end_seconds": step.timeline.end,
            "seconds": {kind.name.lower(): seconds for kind, seconds in step.seconds.items()},
            "bandwidth": {kind.name.lower(): speed for kind, speed in step.bandwidth.items()},
            "bytes": {kind.name.lower(): step.timeline.nbytes(kind) for kind in (Kind.D2H, Kind.H2D)},
            "stalls": [
                {"layer": layer, "forward": times.forward_stall, "backward": times.backward_stall}
                for layer, times in enumerate(step.by_layer())
            ],
            "advice": list(self.handle.report().advice),
        }


def forward_share(stack: Stack, repeats: int = 5) -> float:
    """Return which part of a step without offload is its forward; the loss counts as backward."""
    shares = []
    for _ in range(repeats):
        clock = _Clock(stack.device)
        clock.mark()
        stack.step(stack.twin, clock.mark)
        clock.mark()
        first, middle, last = clock.seconds()
        shares.append((middle - first) / (last - first))
    return median(shares)


class _Clock:
    """Points in time of the current stream, or of the host where there is no accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        synchronize(device)

    def mark(self) -> None:
        """Note the present end of the stream."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the points in seconds."""
        if self._device.type == "cpu":
            return self._marks
        synchronize(self._device)
        return [self._marks[0].elapsed_time(mark) * 1e-3 for mark in self._marks]


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is something to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def driver_calls(device: torch.device) -> dict[str, int]:
    """Return how often memory was taken from the driver, where that is known."""
    if device.type != "cuda":
        return {}
    from actoffload.device.accelerator import driver_calls as calls

    return calls()
