"""The stages of one rank of a pipeline, and phases of its steps: times, peaks, and what is simulated for its plan."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from math import inf
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import synchronize
from mixtures import MixtureSettings
from pipeline_parts import Part
from processes import largest
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from workloads import Model

import actoffload
from actoffload.device.reference import CreatedStorages
from actoffload.engine.statistics import TimelineRecorder
from actoffload.measure import MemoryMeter
from actoffload.pipeline.exchange import Measured
from actoffload.pipeline.planning import slowest, variants_of
from actoffload.planner.variants import recomputed, ways_of
from actoffload.schedule import Computation, Kind, Link, PipelinePlan, StageCost, simulate_pipeline
from actoffload.schedule.pipeline_simulation import RankSimulation

__all__ = ["Pipeline"]

PLANNING = 24
"""Steps after which the plans have to be final."""
WORDS = 8
"""Words of the vocabulary for each number of a hidden state."""


class _First(torch.nn.Module):
    """A first stage: an embedding, and layers behind it.  Hidden states as inputs would be a large part of the peak."""

    def __init__(self, layers: Any, width: int) -> None:
        super().__init__()
        self.embedding, self.layers = torch.nn.Embedding(WORDS * width, width), layers

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.layers(self.embedding(tokens))

    def replicated(self) -> list[torch.nn.Parameter]:
        """Return the weights whose gradients are summed over the ranks with other data."""
        return [*self.embedding.parameters(), *self.layers.replicated()]


METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
"""Methods of a stage that compute, and the letter of `Computation`."""

VS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules whose first rank has the first and the last stage."""


class _Recorder(TimelineRecorder):
    """Records copies and stalls, not the level of memory."""

    levels = False


def _watched(
    function: Callable[..., Any], stage: int, letter: str, peaks: dict[str, int], storages: CreatedStorages | None
) -> Callable[..., Any]:
    """Return a method of a stage that notes the peak of its computation."""

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


class Pipeline:
    """The stages of one rank and their schedule."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part, self.device, settings = part, device, part.settings
        self.ranks = part.world // part.data
        mesh = init_device_mesh(device.type, (self.ranks, part.data), mesh_dim_names=("pipeline", "data"))
        self.rank, self.pair = mesh.get_local_rank("pipeline"), mesh["data"] if part.data > 1 else None
        self.modules: list[Any] = []
        indices = [self.rank + k * self.ranks for k in range(part.stages)]
        for index in indices:
            torch.manual_seed(index)
            with device:  # billions of weights are slow to make on the host
                module = settings.stage(self.pair) if isinstance(settings, MixtureSettings) else Model(settings)
                module = module if index else _First(module, settings.shape[-1])
            self.modules.append(module.to(getattr(torch, settings.dtype)))
        number = self.ranks * part.stages
        stages = self.stages = [
            pipelining.PipelineStage(module, index, number, device, group=mesh.get_group("pipeline"))
            for index, module in zip(indices, self.modules, strict=True)
        ]
        kind = getattr(pipelining, part.schedule)
        given = stages if issubclass(kind, pipelining.schedules.PipelineScheduleMulti) else stages[0]
        self.schedule = kind(given, part.microbatches, loss_fn=lambda y, _: y.float().square().mean())
        batch, tokens, width = settings.shape
        torch.manual_seed(dist.get_rank())
        self.input = torch.randint(WORDS * width, (batch * part.microbatches, tokens), device=device)
        self.target = torch.zeros(batch * part.microbatches, device=device)
        # The outputs of all microbatches would be kept until the step ends.
        self.more = {"return_outputs": False} if "return_outputs" in inspect.signature(kind.step).parameters else {}

    def step(self) -> None:
        """Run one step; gradients keep their memory between steps."""
        for module in self.modules:
            module.zero_grad(set_to_none=False)
        last = self.ranks - 1 if self.part.schedule not in VS else 0
        first = (self.input,) if self.rank == 0 else ()
        more = {"target": self.target, "losses": []} if self.rank == last else {}
        self.schedule.step(*first, **more, **self.more)
        if self.pair is not None:
            for module in self.modules:
                for weight in module.replicated():
                    dist.all_reduce(weight.grad, group=self.pair.get_group())

    def phase(self, warmup: int, steps: int) -> dict[str, Any]:
        """Return seconds and peaks of this rank in some steps, which all ranks begin together."""
        for _ in range(warmup):
            self.step()
        seconds, peaks = [], []
        for _ in range(steps):
            with MemoryMeter() as meter:
                dist.barrier()
                begun = time.perf_counter()
                self.step()
                synchronize(self.device)
                seconds.append(time.perf_counter() - begun)
            peaks.append(meter.peak_bytes)
        return {"seconds": seconds, "peaks": peaks}

    def profile(self) -> dict[str, int]:
        """Return the peak of device memory in each computation of a step; keys are those of `Step`."""
        peaks: dict[str, int] = {}
        storages = CreatedStorages() if self.device.type == "cpu" else None
        with storages or nullcontext(), ExitStack() as stack:
            for stage in self.stages:
                for name, letter in METHODS.items():
                    watched = _watched(getattr(stage, name), stage.stage_index, letter, peaks, storages)
                    stack.enter_context(mock.patch.object(stage, name, watched))
            self.step()
        return peaks

    def offloaded(self, profile: dict[str, int], **how: Any) -> dict[str, Any]:
        """Return a phase with offload, with what the plan of this rank does and what is simulated for it.

        The steps before wait for the device as those of a phase do, because plans are tried in them.  All ranks run
        equally many of them.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
            handle = actoffload.offload(self.schedule, min_bytes=self.part.settings.min_bytes, **how)
        planning = 0
        while largest(int(handle.settling), self.device):
            if planning == PLANNING:
                raise RuntimeError(f"The plan is not final after {planning} steps: {handle}")
            self.phase(0, 1)
            planning += 1
        found = {**self.phase(1, self.part.steps), "planning_steps": planning}
        found |= self._recorded(handle) | _simulated(handle, self.rank, profile)
        handle.remove()
        return found

    def _recorded(self, handle: Any) -> dict[str, Any]:
        """Return the copies and stalls of a recorded step."""
        engine = handle._runner.conductor.engine
        recorder = _Recorder(engine.backend, engine.counters)
        handle.reset_statistics()
        engine.record(recorder)
        try:
            self.step()
        finally:
            engine.record(None)
        timeline, statistics = recorder.timeline(), handle.statistics()
        busy = {kind.name.lower(): timeline.seconds(kind) for kind in (Kind.D2H, Kind.H2D)}
        copied = {kind.name.lower(): timeline.nbytes(kind) for kind in (Kind.D2H, Kind.H2D)}
        return {
            "stall_seconds": timeline.seconds(Kind.STALL),
            "bytes_offloaded": statistics.bytes_offloaded,
            "host_bytes": statistics.host_bytes,
            "on_demand": statistics.reloaded_on_demand,
            "rate": {name: copied[name] / seconds for name, seconds in busy.items() if seconds},
        }


def _simulated(handle: Any, rank: int, profile: dict[str, int]) -> dict[str, Any]:
    """Return what is simulated for the plans of all ranks, from what was measured when they were made.

    The expected peak is that of the profile without offload, less the saved tensors that the plan has not on the device
    in the same computation.
    """
    if handle.plan is None:
        return {"because": str(handle)}
    plain, again, link = _costs(handle._runner._measured, handle.plans)
    orders = [plan.order for plan in handle.plans]
    without = simulate_pipeline(orders, plain, link).ranks[rank]
    found = simulate_pipeline(orders, again, link, handle.plans)
    mine, expected = found.ranks[rank], 0
    levels = zip(handle.plan.order, _levels(without), _levels(mine), strict=True)
    for step, before, now in levels:
        # What is recomputed in a backward is on the device for one group at a time.
        pairs = zip(plain[step.stage].groups, again[step.stage].groups, strict=True)
        more = max(new.backward_temporary - old.backward_temporary for old, new in pairs)
        now += 0 if step.computation in (Computation.FORWARD, Computation.BACKWARD_WEIGHT) else more
        expected = max(expected, profile.get(str(step), 0) - before + now)
    seconds, baseline = handle.plan.seconds or found.step_time, handle.plan.baseline_seconds or found.baseline_time
    return {
        "because": handle.plan.because,
        "plan": str(handle.plan),
        "predicted": {
            "seconds": seconds,
            "ratio": seconds / baseline,
            "stall_seconds": mine.stall_seconds,
            "bubble_seconds": mine.bubble_seconds,
            "drop_bytes": max(profile.values()) - expected,
            "saved_drop_bytes": without.peak_bytes - mine.peak_bytes,
        },
    }


def _costs(
    measured: Sequence[Measured], plans: Sequence[PipelinePlan]
) -> tuple[list[StageCost], list[StageCost], Link]:
    """Return the costs of all stages, as measured and as the plans recompute them, and the link of the slowest rank."""
    costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
    plain = [costs[stage] for stage in sorted(costs)]
    variants = variants_of(measured)
    again = recomputed(plain, variants, ways_of(plans, variants))
    return plain, list(again), slowest([of.link for of in measured])
