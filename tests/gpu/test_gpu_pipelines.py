"""Pipelines of two and four GPUs: gradients with the bits of a run without offload, and equal peaks in all steps."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_harness import DEVICE, KINDS, flash, gpu, loss, requested
from helpers import deterministic
from processes import run_ranks
from torch import nn
from torch.distributed import pipelining
from whole_model import equal

import actoffload
from actoffload.measure import MemoryMeter

pytestmark = gpu

WAYS: dict[str, dict[str, Any]] = {"default": {}, "all": {"fraction": 1.0}, "budget": {"memory_budget": 0.6}}
"""Arguments of `offload`; of a budget the part of the highest peak of all ranks without offload."""
SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")
MICROBATCHES, BLOCKS, WIDTH, ROWS = 8, 3, 512, 2048
SAME = 3
"""Steps at the end that have to have the same peaks: what is measured and tried is over by then."""
STEPS = SAME + 27


def make(name: str, device: torch.device) -> tuple[Any, list[nn.Module]]:
    """Return a schedule of this rank and the modules of its stages; the same weights each time."""
    rank, world, per_rank = dist.get_rank(), dist.get_world_size(), 1 if name == "Schedule1F1B" else 2
    count = world * per_rank
    mine = [rank, count - 1 - rank] if name == "ScheduleZBVZeroBubble" else range(rank, count, world)
    stages, modules = [], []
    for stage in mine:
        torch.manual_seed(stage)
        modules.append(nn.Sequential(*(KINDS["attention"](WIDTH) for _ in range(BLOCKS))).to(device, torch.bfloat16))
        stages.append(pipelining.PipelineStage(modules[-1], stage, count, device))
    given = stages if per_rank > 1 else stages[0]
    return getattr(pipelining, name)(given, MICROBATCHES, loss_fn=lambda y, target: loss(y - target)), modules


def train(schedule: Any, modules: list[nn.Module], after: Any = lambda: None) -> tuple[list[Any], list[int]]:
    """Run steps; return losses and gradients of all, on the host, and the peaks of the last ones."""
    weight = next(modules[0].parameters())
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    last = any(stage.is_last for stage in stages)
    results, peaks = [], []
    for k in range(STEPS):
        torch.manual_seed(100 + k)
        both = torch.randn(2, ROWS * MICROBATCHES, WIDTH, device=weight.device).to(weight)
        for module in modules:
            module.zero_grad(set_to_none=False)
        losses: list[torch.Tensor] = []
        with MemoryMeter() if k >= STEPS - SAME else nullcontext() as meter:
            first = [both[0]] if dist.get_rank() == 0 else []
            schedule.step(*first, target=both[1] if last else None, losses=losses if last else None)
        if meter is not None:
            peaks.append(requested("peak"))
        after()
        results += [each.detach().cpu() for each in losses]
        results += [p.grad.cpu() for module in modules for p in module.parameters() if p.grad is not None]
    return results, peaks


def compare(device: torch.device) -> dict[str, dict[str, Any]]:
    """Train each schedule without offload and with, as one rank; return what is not the same in all runs."""
    warnings.simplefilter("ignore")
    found = {}
    for name in SCHEDULES:
        with deterministic(), flash():
            want, without = train(*make(name, device))
            highest: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(highest, max(without))
            for way, given in WAYS.items():
                arguments = {k: round(v * max(highest)) if k == "memory_budget" else v for k, v in given.items()}
                schedule, modules = make(name, device)
                handle = actoffload.offload(schedule, min_bytes=2**20, **arguments)
                steps: list[dict[str, int]] = []
                got, peaks = train(schedule, modules, partial(note, handle, steps))
                equal(got, want)
                check(f"{name}, {way}", handle, steps, arguments.get("memory_budget"))
                found[f"{name}, {way}"] = {"peaks": peaks, "without": without, "offloads": bool(handle.plan.offloaded)}
                handle.remove()
                del schedule, modules, handle
    return found


def note(handle: Any, steps: list[dict[str, int]]) -> None:
    """Note what a step did."""
    statistics, report = handle.statistics(), handle.report()
    expected = 0 if handle.plan is None else handle.plan.saved_peak_bytes or 0
    saved = {"saved": report.peak_resident_bytes, "expected": expected}
    on_demand, resident = statistics.reloaded_on_demand, statistics.resident_bytes
    steps.append({**saved, "offloaded": statistics.bytes_offloaded, "on_demand": on_demand, "resident": resident})
    handle.reset_statistics()


def check(name: str, handle: Any, steps: list[dict[str, int]], budget: int | None) -> None:
    """Check what one rank saw of one schedule."""
    assert not handle.settling
    assert steps[0]["offloaded"] > 0  # the first step offloads everything
    assert [step["resident"] for step in steps] == [0] * STEPS
    last = steps[-SAME:]
    assert [step["on_demand"] for step in last] == [0] * SAME
    # Memory follows the plan: the same on every step.
    assert len({step["saved"] for step in last}) == 1
    assert last[-1]["saved"] <= last[-1]["expected"], (name, last, str(handle))
    if budget is not None:
        assert handle.plan.peak_bytes <= budget or "No plan of this rank is within" in str(handle)


@pytest.fixture(scope="module", params=[pytest.param(count, marks=pytest.mark.multi_gpu(count)) for count in (2, 4)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(compare, world=request.param, device=DEVICE.type, limit=300.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_and_peaks(name: str, way: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    """The bits and the plan are checked in each rank."""
    for rank in ranks:
        seen = rank[f"{name}, {way}"]
        # A tensor lives until the host has seen that it was sent to another rank, also without offload.  How many do
        # at a time varies.
        assert max(seen["peaks"]) - min(seen["peaks"]) <= MICROBATCHES * ROWS * WIDTH * 2
    first = ranks[0][f"{name}, {way}"]
    assert way != "all" or (first["offloads"] and max(first["peaks"]) < min(first["without"]))
