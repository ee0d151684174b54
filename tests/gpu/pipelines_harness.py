"""Pipelines of several processes without offload and with: what each rank saw.  Rehearsed on CPUs when called by hand.

PYTHONPATH=src:tests/support:tests/gpu python tests/gpu/pipelines_harness.py cpu 4
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests/support", "tests/gpu")]

from gpu_harness import KINDS, flash, requested_peak  # noqa: E402 - lies beside this file, as does what follows elsewhere
from processes import run_ranks  # noqa: E402

import actoffload  # noqa: E402
from actoffload.measure import MemoryMeter  # noqa: E402

__all__ = ["SCHEDULES", "WAYS", "check", "compare", "run"]

WAYS: dict[str, dict[str, Any]] = {"default": {}, "all": {"fraction": 1.0}, "budget": {"memory_budget": 0.6}}
"""Arguments of `offload`; of a budget the part of the highest peak of all ranks without offload."""
SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")
GPU = torch.cuda.is_available()
MICROBATCHES, BLOCKS = 8, 3 if GPU else 2
SAME = 3
"""Steps at the end that have to have the same peaks: what is measured and tried is over by then."""
STEPS = SAME + (27 if GPU else 2)


def make(name: str, device: torch.device, width: int) -> tuple[Any, list[nn.Module]]:
    """Return a schedule of this rank and the modules of its stages; the same weights each time."""
    rank, world, per_rank = dist.get_rank(), dist.get_world_size(), 1 if name == "Schedule1F1B" else 2
    count = world * per_rank
    mine = [rank, count - 1 - rank] if name == "ScheduleZBVZeroBubble" else range(rank, count, world)
    stages, modules = [], []
    for stage in mine:
        torch.manual_seed(stage)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        module = nn.Sequential(*(KINDS["attention"](width) for _ in range(BLOCKS))).to(device, dtype)
        modules.append(module)
        stages.append(pipelining.PipelineStage(module, stage, count, device))
    kind = getattr(pipelining, name)
    given = stages if per_rank > 1 else stages[0]
    return kind(given, MICROBATCHES, loss_fn=lambda y, target: (y - target).float().square().mean()), modules


def train(schedule: Any, modules: list[nn.Module], rows: int, after: Any = None) -> tuple[list[Any], list[int]]:
    """Run steps; return losses and gradients of all, on the host, and the peaks of the last ones."""
    weight = next(modules[0].parameters())
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    last = any(stage.is_last for stage in stages)
    results, peaks = [], []
    for k in range(STEPS):
        torch.manual_seed(100 + k)
        both = torch.randn(2, rows * MICROBATCHES, weight.shape[0], device=weight.device).to(weight)
        for module in modules:
            module.zero_grad(set_to_none=False)
        losses: list[torch.Tensor] = []
        with MemoryMeter() if k >= STEPS - SAME else nullcontext() as meter:
            first = [both[0]] if dist.get_rank() == 0 else []
            schedule.step(*first, target=both[1] if last else None, losses=losses if last else None)
        if meter is not None:
            peaks.append(requested_peak(meter))
        if after is not None:
            after()
        results += [loss.detach().cpu() for loss in losses]
        results += [p.grad.cpu() for module in modules for p in module.parameters() if p.grad is not None]
    return results, peaks


def compare(device: torch.device, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Train each schedule without offload and with, as one rank."""
    warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    gpu = device.type == "cuda"
    width, rows, itemsize = (512, 2048, 2) if gpu else (32, 16, 4)
    found = {}
    for name in names:
        with flash():
            want, peaks_without = train(*make(name, device, width), rows)
            highest: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(highest, max(peaks_without))
            for way, given in WAYS.items():
                arguments = {
                    key: round(value * max(highest)) if key == "memory_budget" else value
                    for key, value in given.items()
                }
                schedule, modules = make(name, device, width)
                handle = actoffload.offload(schedule, min_bytes=2**20 if gpu else 512, **arguments)
                seen: list[dict[str, int]] = []
                got, peaks = train(schedule, modules, rows, partial(note, handle, seen))
                found[f"{name}, {way}"] = {
                    "same": len(want) == len(got) and all(map(torch.equal, want, got)),
                    "peaks": peaks,
                    "sent": rows * width * itemsize,
                    "peaks_without": peaks_without,
                    "steps": seen,
                    "plan": str(handle),
                    "settled": not handle.settling,
                    "budget": arguments.get("memory_budget"),
                    "planned": None if handle.plan is None else handle.plan.peak_bytes,
                    "offloads": handle.plan is not None and bool(handle.plan.transfers),
                }
                handle.remove()
                del schedule, modules, handle
    return found


def note(handle: Any, seen: list[dict[str, int]]) -> None:
    """Note what a step did."""
    statistics, report = handle.statistics(), handle.report()
    seen.append(
        {
            "saved": report.peak_bytes,
            "expected": report.expected_bytes or 0,
            "offloaded": statistics.bytes_offloaded,
            "on_demand": statistics.reloaded_on_demand,
            "resident": statistics.resident_bytes,
        }
    )
    handle.reset_statistics()


def run(device: str, world: int, limit: float = 300.0) -> dict[str, list[dict[str, Any]]]:
    """Run all schedules in processes of their own; return what each rank saw, by schedule and way."""
    ranks = run_ranks(compare, SCHEDULES, world=world, device=device, limit=limit)
    return {case: [of[case] for of in ranks] for case in ranks[0]}


def check(seen: dict[str, Any]) -> None:
    """Check what one rank saw of one schedule."""
    assert seen["same"]
    assert seen["settled"]
    steps = seen["steps"]
    assert steps[0]["offloaded"] > 0  # the first step offloads everything
    assert [step["resident"] for step in steps] == [0] * STEPS
    last = steps[-SAME:]
    assert [step["on_demand"] for step in last] == [0] * SAME
    # Memory follows the plan: the same on every step.
    assert len({step["saved"] for step in last}) == 1
    assert last[-1]["saved"] <= last[-1]["expected"]
    # On a GPU a tensor lives until the host has seen that it was sent to another rank, also without offload.  How many
    # do at a time varies.
    assert max(seen["peaks"]) - min(seen["peaks"]) <= MICROBATCHES * seen["sent"]
    if seen["budget"] is not None:
        assert seen["planned"] <= seen["budget"] or "No plan of this rank is within" in seen["plan"]


if __name__ == "__main__":
    for name, ranks in run(sys.argv[1], int(sys.argv[2])).items():
        for rank, seen in enumerate(ranks):
            check(seen)
            print(f"{name}, rank {rank}: {seen['peaks_without']} bytes without offload, {seen['peaks']} with it")
