"""Steps of an interleaved pipeline, and the drop of a rank's peak that its plan should bring.

The drop is that from the highest peak of all computations without offload, to the highest of the same peaks less the
saved tensors that are not on the device there, by the simulation of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from math import inf
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import DEVICE, Recorder, Sample, Way
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from actoffload.device.reference import CreatedStorages
from actoffload.pipeline.planning import variants_of
from actoffload.planner.variants import recomputed, ways_of
from actoffload.schedule import Computation, Link, RankSimulation, simulate_pipeline

__all__ = ["mean_square", "ranks_of", "train_stages"]

STAGES = 2
"""Stages of each rank."""
METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
"""Methods of a stage that compute, and the letter of `Computation`."""


@cache  # each mesh has communicators of its own, which take device memory
def _mesh(data: int) -> DeviceMesh:
    shape = dist.get_world_size() // data, data
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=("pipeline", "data"))


def ranks_of(data: int = 1) -> tuple[DeviceMesh, range]:
    """Return the mesh of pipelines with different data, and the numbers of the stages of this rank."""
    mesh = _mesh(data)
    ranks = mesh["pipeline"].size()
    return mesh, range(mesh.get_local_rank("pipeline"), STAGES * ranks, ranks)


def mean_square(y: torch.Tensor, _: Any = None) -> torch.Tensor:
    """Return the loss."""
    return y.float().square().mean()


def train_stages(
    way: Way,
    recorder: Recorder,
    mesh: DeviceMesh,
    modules: dict[int, nn.Module],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    profile: dict[str, int],
) -> None:
    """Train the stages of this rank; plain weights have their gradients summed over the ranks with other data.

    Parameters
    ----------
    way, recorder
        Of the arm.
    mesh, modules
        Of `ranks_of`; the module of each stage by its number.
    shape, dtype
        Of the input of all microbatches, (microbatches, tokens, hidden).
    profile : dict
        Is filled by an arm without offload, and used by those with it.
    """
    rank, ranks, data = mesh.get_local_rank("pipeline"), mesh["pipeline"].size(), mesh.get_group("data")
    group = mesh.get_group("pipeline")
    stages = [PipelineStage(of, number, STAGES * ranks, DEVICE, group=group) for number, of in modules.items()]
    schedule = ScheduleInterleaved1F1B(stages, shape[0], loss_fn=mean_square)
    recorder.handle = way.offload(schedule)
    torch.manual_seed(mesh.get_local_rank("data"))
    target = torch.zeros(shape[0], device=DEVICE)

    def step() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(torch.randn(shape, device=DEVICE, dtype=dtype))
        else:
            last = {"target": target, "losses": losses} if rank == ranks - 1 else {}
            schedule.step(**last)
        plain = [p.grad for of in modules.values() for p in of.parameters() if not isinstance(p, DTensor)]
        for grad in plain if dist.get_world_size(data) > 1 else ():
            dist.all_reduce(grad, group=data)
        return torch.stack(losses).sum() if losses else None

    def free_gradients() -> None:
        for module in modules.values():
            module.zero_grad()

    while not recorder.done:
        recorder.begin()
        recorder.forward_ended(step())
        recorder.backward_ended(nn.ModuleList(modules.values()))
        free_gradients()
        recorder.step_ended()
    if way == Way():
        profile.update(_profile(stages, step))
        free_gradients()
    elif recorder.handle is not None and recorder.handle.plan is not None:
        recorder.more = _expected(recorder.handle, rank, profile)


def _profile(stages: list[PipelineStage], step: Callable[[], object]) -> dict[str, int]:
    """Return the peak of device memory in each computation of a step; keys are those of `Step`."""
    peaks: dict[str, int] = {}
    storages = CreatedStorages() if DEVICE.type == "cpu" else None

    def watch(function: Callable[..., Any], stage: int, letter: str) -> Callable[..., Any]:
        def watched(number: int, *args: Any, **kwargs: Any) -> Any:
            if storages is None:
                torch.accelerator.reset_peak_memory_stats()
            else:
                storages.peak = storages.now
            result = function(number, *args, **kwargs)
            half = letter == "B" and not kwargs.get("full_backward", True)
            peak = torch.accelerator.max_memory_allocated() if storages is None else storages.peak
            peaks[f"{stage}{'I' if half else letter}{number}"] = peak
            return result

        return watched

    with storages or nullcontext(), ExitStack() as stack:
        for stage in stages:
            for name, letter in METHODS.items():
                watched = watch(getattr(stage, name), stage.stage_index, letter)
                stack.enter_context(mock.patch.object(stage, name, watched))
        step()
    return peaks


def _expected(handle: Any, rank: int, profile: dict[str, int]) -> Sample:
    """Return the rates of the link in the plans, and the drop of this rank's peak, from what the ranks measured."""
    measured, plans = handle._runner._measured, handle.plans
    costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
    plain, variants = [costs[stage] for stage in sorted(costs)], variants_of(measured)
    again, link = (
        list(recomputed(plain, variants, ways_of(plans, variants))),
        Link.slowest(each.link for each in measured),
    )
    found: Sample = {"d2h": link.d2h, "h2d": link.h2d} if link.d2h < inf else {}
    if not profile:  # the arm without offload failed
        return found
    orders = [plan.order for plan in plans]
    without = _levels(simulate_pipeline(orders, plain, link).ranks[rank])
    now = _levels(simulate_pipeline(orders, again, link, plans).ranks[rank])
    highest = 0
    for step, before, after in zip(handle.plan.order, without, now, strict=True):
        # What is recomputed in a backward is on the device for one group at a time.
        pairs = zip(plain[step.stage].groups, again[step.stage].groups, strict=True)
        more = max(new.backward_temporary - old.backward_temporary for old, new in pairs)
        more = 0 if step.computation in (Computation.FORWARD, Computation.BACKWARD_WEIGHT) else more
        highest = max(highest, profile.get(str(step), 0) - before + after + more)
    return {**found, "drop_bytes": max(profile.values()) - highest}


def _levels(of: RankSimulation) -> list[int]:
    """Return the largest number of bytes of saved tensors in each computation of a rank, as simulated."""
    points, ends, found, level, at = of.timeline.resident, [*of.starts[1:], inf], [], 0, 0
    for start, end in zip(of.starts, ends, strict=True):
        while at < len(points) and points[at][0] <= start:
            level, at = points[at][1], at + 1
        most = level
        while at < len(points) and points[at][0] < end:
            level, at = points[at][1], at + 1
            most = max(most, level)
        found.append(most)
    return found
