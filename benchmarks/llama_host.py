"""The time that offloading takes on the host: Llama layers so short that the device is never what is waited for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from llama_arms import Offloaded, synchronize
from llama_bare import Bare
from llama_model import LlamaSettings, Stack

WARMUP = 5
CASES = ("without", "paused", "with", "bare")


def host_seconds(step: Callable[[Callable[[], object]], object], device: torch.device) -> tuple[float, float, float]:
    """Return for how long the host was busy with forward and with backward of one step, and the device thereafter.

    The device is idle before each, so that its queue has room for all that is launched and the host never waits.

    Parameters
    ----------
    step : callable
        Runs a step, and calls what it is given between forward and backward.
    device : torch.device
        Where it runs.
    """
    turns: list[float] = []

    def turn() -> None:
        turns.append(time.perf_counter())
        synchronize(device)
        turns.append(time.perf_counter())

    turn()
    step(turn)
    turn()
    return turns[2] - turns[1], turns[4] - turns[3], turns[3] - turns[2] + turns[5] - turns[4]


def measure_host(settings: LlamaSettings, device: torch.device, *, small: bool) -> dict[str, Any]:
    """Measure steps without offload, with hooks that are paused and with all but two layers offloaded, interleaved.

    On an accelerator also with all but two layers offloaded by no more than hooks and calls of CUDA.

    Parameters
    ----------
    settings : LlamaSettings
        Short enough that the host takes longer for a step than the device.
    device : torch.device
        Where it runs.
    small : bool
        Few repeats.

    Returns
    -------
    dict
        The part of the result file.  ``added`` is what the host takes longer for a step with offload than for one
        without, by medians, and ``added_bare`` what it takes longer for the hooks and the calls of CUDA alone, on an
        accelerator; ``behind`` for how long the device was busy after it.
    """
    stack = Stack(settings, device)
    offloaded = Offloaded(stack)
    handle, count = offloaded.handle, settings.layers - 2
    offloaded.step(count)  # and so the schedule is changed before anything is timed
    repeats = 3 if small else 60
    bare = None if device.type == "cpu" else Bare(stack, count)
    cases = CASES if bare is not None else CASES[:-1]

    def once(case: str) -> tuple[float, float, float]:
        if bare is not None and case == "bare":
            return host_seconds(bare.step, device)
        model = stack.twin if case == "without" else stack.model
        with handle.paused() if case == "paused" else nullcontext():
            return host_seconds(lambda turn: stack.step(model, turn), device)

    for case in cases * WARMUP:
        once(case)
    handle.reset_statistics()
    once("with")
    statistics = handle.statistics()
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in cases}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for case in cases:
                found[case].append(once(case))
    finally:
        gc.enable()
    handle.remove()
    host = {
        case: {"forward": median(s[0] for s in samples), "backward": median(s[1] for s in samples)}
        for case, samples in found.items()
    }
    without = sum(host["without"].values())
    added = sum(host["with"].values()) - without
    least = None
    if bare is not None:
        least = {"added_bare": sum(host["bare"].values()) - without, "tensors_bare": bare.storages}
    return {
        "settings": settings.to_json(),
        "repeats": repeats,
        "num_layers": count,
        "tensors_offloaded": statistics.tensors_offloaded,
        "host": host,
        "behind": {case: median(s[2] for s in samples) for case, samples in found.items()},
        "added": added,
        "added_per_layer": added / count,
        "added_per_tensor": added / statistics.tensors_offloaded,
        "added_paused": sum(host["paused"].values()) - without,
        **(least or {}),
    }
