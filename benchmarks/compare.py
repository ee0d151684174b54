"""Step time and peak memory: no offload, actoffload, save_on_cpu and checkpointing, side by side in one process.

    PYTHONPATH=src python benchmarks/compare.py gpt --out benchmarks/results

Every arm runs the same weights.  Repeats are interleaved; no offload is measured as two arms, whose difference is
the noise.  ``--rehearse`` takes small sizes, for machines without an accelerator.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from models import FULL, REHEARSAL, Model
from results_file import RESULTS, write
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.measure import MemoryMeter, measure_link, measure_step_times, measured_costs
from actoffload.schedule import Kind, LayerCost, Link, Plan, Timeline, simulate

NOTHING, AGAIN = "no offload", "no offload, again"
Run = Callable[[int, nn.Module, torch.Tensor], torch.Tensor]


def plain(k: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def in_context(pair: Any, k: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    context, sync_function = pair
    with context:
        x = layer(x)
    return sync_function(x)


def with_save_on_cpu(count: int, pinned: bool, k: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu(pin_memory=pinned) if k < count else nullcontext():
        return layer(x)


def with_checkpoint(count: int, k: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False) if k < count else layer(x)


def record(model: Model, pair: Any, steps: int = 5) -> list[Timeline]:
    """Record steps one by one."""
    timelines = []
    for _ in range(steps):
        with pair[0].record_timeline() as recorder:
            model.step(partial(in_context, pair))
        timelines.append(recorder.timeline())
    return timelines


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the peak of a step; it was run before."""
    with MemoryMeter() as meter:
        step()
    return meter.peak_bytes


def compute_seconds(timelines: list[Timeline], step_seconds: float) -> tuple[float, float]:
    """Split the time of a step without offloading into forward and backward; the latter includes the loss."""
    forward = median(max(span.end for span in timeline.of(Kind.FORWARD)) for timeline in timelines)
    return forward, step_seconds - forward


def measure(model: Model, repeats: int, slow_repeats: int, steps: int) -> dict[str, Any]:
    """Measure all arms of one model; return the data of the result file."""
    settings = model.settings
    on_gpu = model.device.type != "cpu"
    manual = actoffload.get_cpu_offload_context(enabled=True, model_layers=settings.layers, manual_synchronization=True)
    pairs = {
        count: actoffload.get_cpu_offload_context(enabled=True, num_layers=count, model_layers=settings.layers)
        for count in settings.counts
    }
    runs: dict[tuple[str, int], Run] = {(NOTHING, 0): plain, (AGAIN, 0): plain}
    for count in settings.counts:
        runs["actoffload", count] = partial(in_context, pairs[count])
    slow: dict[tuple[str, int], Run] = {(NOTHING, 0): plain}
    for count in settings.counts:
        slow["checkpoint", count] = partial(with_checkpoint, count)
        slow["save_on_cpu", count] = partial(with_save_on_cpu, count, on_gpu)

    link = measure_link()
    times: dict[tuple[str, int], list[float]] = {}
    ratios: dict[tuple[str, int], float] = {}
    for group, count in ((runs, repeats), (slow, slow_repeats)):
        found = measure_step_times(
            {arm: partial(model.step, run) for arm, run in group.items()}, repeats=count, steps=steps
        )
        for arm, samples in found.items():
            ratios.setdefault(arm, median(samples) / median(found[NOTHING, 0]))
            times.setdefault(arm, samples)
        print(f"{settings.name}: {len(group)} arms timed", flush=True)

    peaks, statistics = {}, {}
    for arm, run in {**runs, **slow}.items():
        model.step(run)
        if arm[0] == "actoffload":
            pairs[arm[1]][0].reset_statistics()
        peaks[arm] = peak_bytes(partial(model.step, run))
        if arm[0] == "actoffload":
            statistics[arm] = pairs[arm[1]][0].statistics()
    record(model, manual[:2], 1)
    still = record(model, manual[:2])
    costs = measured_costs(still)
    baseline = median(times[NOTHING, 0])
    forward, backward = compute_seconds(still, baseline)

    arms = []
    for arm in {**runs, **slow}:
        method, count = arm
        row: dict[str, Any] = {
            "method": method,
            "num_layers": count,
            "seconds": median(times[arm]),
            "samples": times[arm],
            "ratio": ratios[arm],
            "peak_bytes": peaks[arm],
            "drop_bytes": peaks[NOTHING, 0] - peaks[arm],
        }
        if method == "actoffload":
            row |= offloading(row, pairs[count][0].plan, statistics[arm], costs, link, (forward, backward), baseline)
            row["copies"] = copies(record(model, pairs[count], 3))
        arms.append(row)
    for pair in pairs.values():
        pair[0].close()
    return {
        "settings": settings.to_json(),
        "repeats": {"fast": repeats, "slow": slow_repeats, "steps": steps},
        "link": {"d2h": link.d2h, "h2d": link.h2d},
        "compute": {"forward": forward, "backward": backward},
        "noise": abs(ratios[AGAIN, 0] - 1),
        "layers": [
            {
                "forward": c.forward,
                "backward": c.backward,
                "saved": [[s.nbytes, s.saved_at, s.needed_at] for s in c.saved],
            }
            for c in costs
        ],
        "arms": arms,
    }


def offloading(
    row: dict[str, Any],
    plan: Plan,
    statistics: actoffload.report.Statistics,
    costs: tuple[LayerCost, ...],
    link: Link,
    compute: tuple[float, float],
    baseline: float,
) -> dict[str, Any]:
    """Return what is derived for an arm of ours: R, the bound, the prediction and the host memory."""
    moved = statistics.bytes_offloaded
    still, leaving = simulate(Plan(plan.model_layers), costs, link), simulate(plan, costs, link)
    absent = still.peak_bytes - leaving.peak_bytes
    bound = max(compute[0], moved / link.d2h) + max(compute[1], moved / link.h2d)
    # The simulation knows the layers; what a step does beside them, input and loss, is the same in both.
    predicted = leaving.step_time + baseline - still.step_time
    return {
        "bytes_offloaded": moved,
        "bytes_absent": absent,
        "r": row["drop_bytes"] / absent,
        "host_bytes": statistics.host_bytes,
        "host_ratio": statistics.host_bytes / moved,
        "stalls": statistics.stalls,
        "bound_seconds": bound,
        "bound_ratio": row["seconds"] / bound,
        "predicted_seconds": predicted,
        "deviation": row["seconds"] / predicted - 1,
        "predicted_stall_seconds": leaving.stall_seconds,
    }


def copies(timelines: list[Timeline]) -> dict[str, float]:
    """Return bandwidths and stalls as they were in recorded steps: beside compute, copy by copy."""
    found = {}
    for kind, name in ((Kind.D2H, "d2h"), (Kind.H2D, "h2d")):
        busy = [timeline.seconds(kind) for timeline in timelines]
        nbytes = timelines[0].nbytes(kind)
        found[name] = nbytes / median(busy) if median(busy) else 0.0
    found["stall_seconds"] = median(timeline.seconds(Kind.STALL) for timeline in timelines)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", choices=sorted(FULL))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--rehearse", action="store_true", help="small sizes")
    parser.add_argument("--profile", type=int, metavar="N", help="profile one step with N layers offloaded instead")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = Model((REHEARSAL if options.rehearse else FULL)[options.model], device)
    counts = {"linear": (9, 7, 4), "gpt": (9, 5, 2)}[options.model]
    repeats, slow_repeats, steps = (2, 1, 1) if options.rehearse else counts
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if options.profile is not None:
            from profiling import profile_step

            pair = actoffload.get_cpu_offload_context(
                enabled=options.profile > 0, num_layers=options.profile, model_layers=model.settings.layers
            )
            name, data = f"profile-{options.model}", profile_step(partial(model.step, partial(in_context, pair)))
            data |= {"settings": model.settings.to_json(), "num_layers": options.profile}
        else:
            name, data = options.model, measure(model, repeats, slow_repeats, steps)
    command = f"PYTHONPATH=src python benchmarks/compare.py {options.model}"
    if options.profile is not None:
        command += f" --profile {options.profile}"
    path = write(options.out, name, data, command)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
