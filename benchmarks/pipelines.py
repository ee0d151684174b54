"""Pipelines of several GPUs: step times, peaks and stalls of each rank, without offload, with it, and as simulated.

Every rank is a process.  One schedule of `torch.distributed.pipelining` runs without offload, with
``offload(schedule)``, without, with a memory budget of 40 % of the highest peak, and without again.  A ratio refers to
the mean of the phases without offload before and after.  R is the drop of a rank's peak over the drop that is
expected: the peak of each computation without offload, less the saved tensors that are not on the device there by the
simulation of the plan.
"""

from __future__ import annotations

import gc
import inspect
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import AGAIN, NOTHING, OURS, synchronize
from mixtures import MixtureSettings, set_waits
from processes import run_ranks
from torch.distributed import pipelining
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Model, Settings

import actoffload
from actoffload.device.reference import CreatedStorages
from actoffload.engine.recorder import TimelineRecorder
from actoffload.measure import MemoryMeter
from actoffload.pipeline.exchange import Measured
from actoffload.pipeline.planning import slowest, variants_of
from actoffload.planner.pipeline_recomputation import recomputed, ways_of
from actoffload.schedule import Computation, Kind, Link, PipelinePlan, StageCost, simulate_pipeline
from actoffload.schedule.pipeline_results import RankSimulation

__all__ = ["PARTS", "SMALL_PARTS", "Part", "available", "measure_parts"]

BUDGET, WAITING = "budget", "waiting"
SHARE = 0.4
"""Budget as a part of the highest peak without offload."""
PLANNING = 24
"""Steps after which the plans have to be final."""
LIMIT = 560.0
"""Seconds for all parts of one number of ranks."""


@dataclass(frozen=True)
class Part:
    """A pipeline.

    Parameters
    ----------
    schedule : str
        A class of `torch.distributed.pipelining`.
    settings : Settings or MixtureSettings
        The layers of one stage.
    stages, microbatches : int
        Stages of each rank; microbatches of a step.
    world, data : int
        Number of ranks, and how many of them have different data for the same stages.
    steps : int
        Measured steps of each phase.
    """

    schedule: str
    settings: Settings | MixtureSettings
    stages: int
    microbatches: int
    world: int = 2
    data: int = 1
    steps: int = 3

    @property
    def mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return isinstance(self.settings, MixtureSettings)


def _dense(tokens: int, layers: int) -> Settings:
    """Return Llama layers as wide as those of Llama 3 8B."""
    return Settings(layers, (1, tokens, 4096), "bfloat16", 32, 8, 14336)


def _small(part: Part) -> Part:
    """Return a part that two cores run in seconds."""
    if isinstance(part.settings, MixtureSettings):
        settings: Any = replace(
            part.settings, layers=1, shape=(1, 32, 32), dtype="float32", heads=2, ffn=48, experts=4, min_bytes=1024
        )
    else:
        sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "intermediate": 112, "dtype": "float32"}
        settings = replace(part.settings, layers=2, shape=(1, 32, 32), min_bytes=1024, **sizes)
    return replace(part, settings=settings, microbatches=min(part.microbatches, 6), steps=1)


MIXTURE = Part("ScheduleInterleaved1F1B", MixtureSettings(2, (1, 8192, 4096), "bfloat16", 32, 2048, 8), 2, 8)
TWO = {
    "1f1b": Part("Schedule1F1B", _dense(8192, 4), 1, 8),
    "interleaved": Part("ScheduleInterleaved1F1B", _dense(8192, 8), 2, 16, steps=2),
    "zero-bubble": Part("ScheduleInterleavedZeroBubble", _dense(8192, 1), 2, 8),
    "mixture": MIXTURE,
}
FOUR = {f"{name}-4": replace(part, world=4) for name, part in TWO.items() if name != "mixture"}
FOUR["mixture-4"] = replace(MIXTURE, world=4, data=2)
PARTS = {**TWO, **FOUR}
SMALL_PARTS = {name: _small(part) for name, part in PARTS.items()}


def available(gpus: int) -> tuple[str, ...]:
    """Return the parts that run by default: those of two ranks, and with four GPUs all."""
    return tuple(PARTS if gpus >= 4 else TWO)


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
        """Return the weights whose gradients are averaged over the ranks with other data."""
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
        rank, data = dist.get_rank(), part.data
        self.ranks = part.world // data
        self.rank = rank // data
        # Every rank makes all groups, in the same order.
        lines = [dist.new_group(list(range(k, part.world, data))) for k in range(data)]
        pairs = [dist.new_group(list(range(k * data, (k + 1) * data))) for k in range(self.ranks)]
        self.line, self.pair = lines[rank % data], pairs[self.rank] if data > 1 else None
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
            pipelining.PipelineStage(module, index, number, device, group=self.line)
            for index, module in zip(indices, self.modules, strict=True)
        ]
        kind = getattr(pipelining, part.schedule)
        given = stages if issubclass(kind, pipelining.schedules.PipelineScheduleMulti) else stages[0]
        self.schedule = kind(given, part.microbatches, loss_fn=lambda y, _: y.float().square().mean())
        batch, tokens, width = settings.shape
        torch.manual_seed(rank)
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
                    dist.all_reduce(weight.grad, group=self.pair)

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

        The steps before wait for the device as those of a phase do, because plans are tried in them.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
            handle = actoffload.offload(self.schedule, min_bytes=self.part.settings.min_bytes, **how)
        planning = 0
        while handle.settling:
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


def _say(what: str) -> None:
    """Print a line of progress on the first rank."""
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def _arms(pipeline: Pipeline) -> list[tuple[str, dict[str, Any]]]:
    """Run all phases on this rank; return what each showed."""
    part = pipeline.part
    found: list[tuple[str, dict[str, Any]]] = []

    def add(method: str, phase: dict[str, Any]) -> None:
        found.append((method, phase))
        peak, seconds = max(phase["peaks"]) / 2**30, median(phase["seconds"])
        _say(f"  {method}: {seconds:.3f} s, {peak:.2f} GiB on the first rank")

    if part.mixture:
        set_waits(pipeline.modules, waits=True)
        add(WAITING, pipeline.phase(2, part.steps))
        set_waits(pipeline.modules, waits=False)
    add(NOTHING, pipeline.phase(1 if part.mixture else 2, part.steps))
    profile = pipeline.profile()
    add(OURS, pipeline.offloaded(profile))
    add(AGAIN, pipeline.phase(1, part.steps))
    peaks: list[Any] = [None] * part.world
    dist.all_gather_object(peaks, max(found[-1][1]["peaks"]))
    budget = int(SHARE * max(peaks))
    add(BUDGET, {**pipeline.offloaded(profile, memory_budget=budget), "budget": budget})
    add(AGAIN, pipeline.phase(1, part.steps))
    return found


def _measured(device: torch.device, names: tuple[str, ...], small: bool, folder: str) -> None:
    """Measure parts as one rank; rank 0 writes a file for each."""
    for name in names:
        part = (SMALL_PARTS if small else PARTS)[name]
        # Slower attention than the flash kernel would hide copies.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if device.type == "cuda" else SDPBackend.MATH):
            _say(f"{name}:")
            pipeline = Pipeline(part, device)
            mine = _arms(pipeline)
        ranks: list[Any] = [None] * part.world
        dist.all_gather_object(ranks, mine)
        if dist.get_rank() == 0:
            path = Path(folder) / f"{name}.json"
            path.with_suffix(".part").write_text(json.dumps(_result(part, ranks)), encoding="utf-8")
            path.with_suffix(".part").replace(path)
        del pipeline, mine, ranks
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()


def _result(part: Part, ranks: list[list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Return the data of a part from what all ranks measured."""
    arms = []
    for k, (method, first) in enumerate(ranks[0]):
        phases = [of[k][1] for of in ranks]
        samples = [max(step) for step in zip(*(of["seconds"] for of in phases), strict=True)]
        arm: dict[str, Any] = {"method": method, "seconds": median(samples), "samples": samples}
        arm |= {key: first[key] for key in ("budget", "because", "planning_steps") if key in first}
        arms.append({**arm, "ranks": [_of_rank(of) for of in phases]})
    still = [arm for arm in arms if arm["method"] in (NOTHING, AGAIN)]
    for k, arm in enumerate(arms):
        none = [arm] if arm in still else [each for each in arms[max(k - 1, 0) : k + 2] if each in still]
        arm["baseline_seconds"] = mean(each["seconds"] for each in none)
        arm["ratio"] = arm["seconds"] / arm["baseline_seconds"]
        for rank, row in enumerate(arm["ranks"]):
            row["peak_without"] = max(each["ranks"][rank]["peak_bytes"] for each in none)
            row["drop_bytes"] = row["peak_without"] - row["peak_bytes"]
            expected = row.get("predicted", {}).get("drop_bytes")
            if expected:
                row["r"] = row["drop_bytes"] / expected
    times = [arm["seconds"] for arm in still]
    described = {"schedule": part.schedule, "stages": part.stages, "microbatches": part.microbatches}
    described |= {"world": part.world, "data": part.data, "mixture": part.mixture, "settings": part.settings.to_json()}
    return {**described, "noise": (max(times) - min(times)) / mean(times), "arms": arms}


def _of_rank(phase: dict[str, Any]) -> dict[str, Any]:
    """Return what is written of a phase of one rank."""
    left = ("seconds", "budget", "because")
    return {"peak_bytes": max(phase["peaks"]), **{key: of for key, of in phase.items() if key not in left}}


def measure_parts(
    names: Sequence[str], device: torch.device, *, rehearse: bool, done: Callable[[str, dict[str, Any]], object]
) -> None:
    """Measure parts, each on its number of ranks; call `done` with the name and the data of each.

    Raises `RankError` if a rank fails, after `done` was called for the parts before.
    """
    for world in sorted({PARTS[name].world for name in names}):
        some = tuple(name for name in names if PARTS[name].world == world)
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(_measured, some, rehearse, folder, world=world, device=device.type, limit=LIMIT)
            finally:
                for name in some:
                    path = Path(folder) / f"{name}.json"
                    if path.is_file():
                        done(name, json.loads(path.read_text(encoding="utf-8")))
