"""Where the time of one step goes, as torch.profiler saw it: kernels and copies, and calls of the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

ROWS = 25


def profile_step(step: Callable[[], None], warmup: int = 4) -> dict[str, Any]:
    """Return a summary of one step after some that are not looked at.

    Returns
    -------
    dict
        ``device_calls`` and ``host_calls``: lists of (name, calls, seconds), longest first; ``busy``: seconds in
        which the device ran kernels, copied out and copied in, each counted once where they overlap with their like;
        ``seconds``: from the first to the last work on the device.
    """
    for _ in range(warmup):
        step()
    activities = [ProfilerActivity.CPU]
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        with record_function("step"):
            step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    on_host = torch.autograd.DeviceType.CPU
    device: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    host: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in profiler.events():
        start, end = event.time_range.start * 1e-6, event.time_range.end * 1e-6
        where = host if event.device_type == on_host else device
        if where is device and event.name == "step":
            continue  # the annotation's shadow on the device
        where[event.name][0] += 1
        where[event.name][1] += event.self_cpu_time_total * 1e-6 if where is host else end - start
        if where is device:
            spans[_lane(event.name)].append((start, end))
    every = [span for lane in spans.values() for span in lane]
    return {
        "device_calls": _longest(device),
        "host_calls": _longest(host),
        "busy": {lane: _covered(found) for lane, found in spans.items()},
        "seconds": max((end for _, end in every), default=0.0) - min((start for start, _ in every), default=0.0),
    }


def _lane(name: str) -> str:
    if "Memcpy DtoH" in name:
        return "d2h"
    return "h2d" if "Memcpy HtoD" in name else "kernels"


def _longest(found: dict[str, list[float]]) -> list[tuple[str, int, float]]:
    rows = [(name[:120], int(calls), seconds) for name, (calls, seconds) in found.items()]
    return sorted(rows, key=lambda row: -row[2])[:ROWS]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of stretches of time."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
