"""Measure the arms of a job in rounds: step times, peaks, kernels, host times, and how long the plan took.

Each arm of a round trains a model of its own, and frees it before the next one begins. An arm that fails or runs out of
memory is a sample that says so, and the others go on.
"""

from __future__ import annotations

import gc
import importlib.util
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from jobs import Job
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import actoffload
from actoffload.measure import MemoryMeter

__all__ = ["DEVICE", "Recorder", "Sample", "UnavailableError", "Way", "mean_square", "need", "plain_steps", "run_arms"]

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
ABOVE = 1.03  # a budget over the peak of checkpointing
SETTLING = 40  # steps after which the plan has to be final
PROVEN = 2  # first steps of which loss and gradients are noted, to be compared between arms
_ATTENTION = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
SAVED = [getattr(torch.ops.aten, name).default for name in ("mm", *_ATTENTION)]
"""Matrix products and attention, which selective checkpointing saves."""
ENOUGH = 8.0  # seconds of measured steps in a round, of two steps at least

Sample: TypeAlias = dict[str, Any]


class UnavailableError(Exception):
    """An arm or a job cannot run here, as a package is missing; the message says why."""


def need(package: str) -> None:
    """Raise `UnavailableError` if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"{package} is not installed where this was measured.")


@dataclass(frozen=True)
class Way:
    """How an arm saves memory: its name, and the arguments of `actoffload.offload` where it is called."""

    arm: str = "none"
    ours: dict[str, Any] | None = None

    @property
    def checkpointed(self) -> bool:
        return self.arm in ("checkpoint", "checkpoint_offload", "trl", "selective")

    def call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a layer of a plain loop in this way."""
        offloads = self.arm in ("checkpoint_offload", "save_on_cpu")
        with save_on_cpu(pin_memory=DEVICE.type != "cpu") if offloads else nullcontext():
            if not self.checkpointed:
                return layer(*args, **kwargs)
            if self.arm == "selective":
                kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED)
            return checkpoint(layer, *args, use_reentrant=False, **kwargs)

    def offload(self, model: Any) -> Any:
        """Offload a model or a schedule; return the handle, or None."""
        if self.ours is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
            return actoffload.offload(model, **self.ours)

    def around(self, model: nn.Module) -> Any:
        """Return the context of forward and backward, as `SFTTrainer` enters it."""
        if self.arm != "trl":
            return nullcontext()
        need("trl")
        if DEVICE.type == "cpu":
            raise UnavailableError("TRL's offloading needs an accelerator.")
        from trl.models import activation_offloading

        return activation_offloading.get_act_offloading_ctx_manager(model=model, warn_if_no_head=False)


def way_of(arm: str, checkpoint_peak: int | None) -> Way:
    """Return the way of an arm; `checkpoint_peak` is the peak of checkpointing in bytes, if it was measured."""
    name, _, gib = arm.partition(":")
    ours: dict[str, Any] = {"min_bytes": 1024} if DEVICE.type == "cpu" else {}  # a rehearsal has small tensors
    if name == "qkv":
        ours |= {"layers": "*.qkv", "fraction": 1.0}
    elif name == "budget":
        if not gib and checkpoint_peak is None:
            raise UnavailableError("Checkpointing has no peak in this run, so there is no budget.")
        ours["memory_budget"] = int(float(gib) * 2**30 if gib else ABOVE * (checkpoint_peak or 0))
    return Way(name, ours if name in ("offload", "qkv", "budget") else None)


class Recorder:
    """Follow the steps of an arm.

    The loop calls `begin`, `forward_ended`, `backward_ended` and `step_ended` in each step, and stops when `done`.
    """

    def __init__(self, job: Job, *, profile: bool = False) -> None:
        self._job = job
        self._profile = profile and DEVICE.type == "cuda" and not job.searches
        self._first, self._measured = MemoryMeter(), MemoryMeter()
        self._measuring = False
        self._profiler: Any = None
        self._marks: list[Any] = []  # events, or seconds of the host: the end of a step, then four in each
        self._host: list[float] = []
        self._steps, self._passes, self._startup = 0, 1, 0.0
        self.script = self._follow()
        self.done = False
        self.handle: Any = None
        self.values: list[torch.Tensor] = []
        self.more: Sample = {}  # what else the loop found

    def _follow(self) -> Iterator[None]:
        """Follow the steps until the plan is final, warm-up, those that are measured, and one in a profiler.

        A step runs at each ``yield``.
        """
        begun = time.perf_counter()
        with self._first:
            yield
            while self.handle is not None and self.handle.settling:
                if self._job.searches and time.perf_counter() - begun > 60.0:
                    break  # passes of long sequences take long: what they take now is enough
                self._passes += 1
                if self._passes > SETTLING:
                    raise RuntimeError(f"The plan is not final after {SETTLING} steps.")
                yield
            if DEVICE.type != "cpu":
                torch.accelerator.synchronize()
            self._startup = time.perf_counter() - begun
            for _ in range(1, self._job.warm_up):
                yield
        with self._measured:
            begun = time.perf_counter()
            self._measuring = True
            self._mark()
            for number in range(self._job.steps):
                # Ranks have to agree, so they take all steps.
                if number > 1 and time.perf_counter() - begun > ENOUGH and not dist.is_initialized():
                    break
                yield
            self._measuring = False
        if self._profile:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as self._profiler:
                yield
                torch.accelerator.synchronize()
        self.done = True

    def begin(self) -> None:
        self._steps += 1
        if self._steps == 1:
            next(self.script)
        self._mark()
        self._forward = time.perf_counter()

    def forward_ended(self, loss: Any = None) -> None:
        """Note the end of forward, and the loss of the first steps."""
        if self._measuring:
            self._host.append(time.perf_counter() - self._forward)
        self._mark()
        if isinstance(loss, torch.Tensor) and self._steps <= PROVEN:
            self.values.append(loss.detach().clone())

    def backward_ended(self, model: nn.Module | None = None) -> None:
        """Note the end of backward, and the gradients of a model in the first steps."""
        self._mark()
        if model is not None and self._steps <= PROVEN:
            norms = [p.grad.norm().float() for p in model.parameters() if p.grad is not None]
            self.values.append(torch.stack([getattr(n, "to_local", lambda n=n: n)() for n in norms]).norm())

    def step_ended(self) -> None:
        """Note the end of a step, and decide what the next one is for."""
        self._mark()
        next(self.script, None)

    def _mark(self) -> None:
        if self._measuring and DEVICE.type == "cpu":
            self._marks.append(time.perf_counter())
        elif self._measuring:
            self._marks.append(torch.Event(DEVICE, enable_timing=True))
            self._marks[-1].record()

    def sample(self) -> Sample:
        """Return what was measured, in seconds and bytes; of several ranks the slowest time and the largest peak."""
        first = self._marks[0] if self._marks else None
        on_host = DEVICE.type == "cpu"
        times = [mark - first if on_host else first.elapsed_time(mark) * 1e-3 for mark in self._marks]
        found: Sample = {
            "seconds": [end - start for start, end in pairwise(times[::4])],
            "pass_seconds": [end - start for start, end in zip(times[1::4], times[3::4], strict=True)],
            "host_seconds": self._host,
            "peak_bytes": self._measured.peak_bytes,
            "highest_bytes": max(self._measured.peak_bytes, self._first.peak_bytes),
            "values": [float(value).hex() for value in self.values],
            **self.more,
        }
        if self._profiler is not None:
            found["kernel_seconds"] = kernel_seconds(self._profiler) or None
        if self.handle is not None:
            found |= self._planned(found["seconds"])
        if dist.is_initialized():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, found)
            found = _slowest(ranks)
        return found

    def _planned(self, seconds: list[float]) -> Sample:
        plan = self.handle.plan
        found: Sample = {"plan": str(plan), "final": not self.handle.settling}
        if self._passes > 1:
            found |= {"passes": self._passes, "startup_seconds": self._startup - self._passes * median(seconds)}
        for key, name in (("predicted_seconds", "seconds"), ("predicted_bytes", "peak_bytes")):
            value = getattr(plan, name, None)
            found |= {} if value is None else {key: value}
        try:
            found["report"] = str(self.handle.report())
        except (RuntimeError, AttributeError) as error:  # nothing could be offloaded, or a pipeline has no plan
            found["report"] = str(error)
        return found


def kernel_seconds(profiler: Any) -> float:
    """Return the seconds of all kernels in a profile, without copies."""
    cuda, copies = torch.autograd.DeviceType.CUDA, ("Memcpy", "Memset", "ProfilerStep")
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == cuda]
    kernels = [e for e in events if not e.name().startswith(copies) and not getattr(e, "is_user_annotation", bool)()]
    return sum(event.duration_ns() for event in kernels) * 1e-9


def _slowest(ranks: list[Sample]) -> Sample:
    found = dict(ranks[0])
    for key in ("seconds", "pass_seconds", "host_seconds"):
        found[key] = [max(of_ranks) for of_ranks in zip(*(rank[key] for rank in ranks), strict=True)]
    for key in ("peak_bytes", "highest_bytes", "startup_seconds", "kernel_seconds", "predicted_bytes"):
        values = [rank[key] for rank in ranks if rank.get(key) is not None]
        found |= {key: max(values)} if values else {}
    found["values"] = [value for rank in ranks for value in rank["values"]]
    found["ranks"] = [{key: rank[key] for key in ("peak_bytes", "drop_bytes") if key in rank} for rank in ranks]
    return found


Train: TypeAlias = Callable[[Way, Recorder], object]
"""Trains a new model in some way until the recorder is done."""


def run_arms(
    job: Job,
    train: Train,
    write: Callable[[Sample], object],
    arms: tuple[str, ...] = (),
    **more: Any,
) -> list[Sample]:
    """Run the arms of a job in rounds; each sample is written at once, and a line before it begins."""
    found: list[Sample] = []
    arms = arms or job.arms
    for number in range(job.rounds):
        # Every second round in reversed order, so that a drift of clocks changes all arms alike.
        for arm in arms if number % 2 == 0 else reversed(arms):
            if any(sample["status"] != "ok" for sample in found if sample["arm"] == arm):
                continue
            peaks = [s["highest_bytes"] for s in found if s["arm"] == "checkpoint" and s["status"] == "ok"]
            base = {"arm": arm, "round": number, **more}
            write({**base, "status": "begun"})
            sample = {**base, **run_arm(job, train, arm, max(peaks, default=None), profile=number == job.rounds - 1)}
            write(sample)
            found.append(sample)
    return found


def run_arm(job: Job, train: Train, arm: str, checkpoint_peak: int | None, *, profile: bool = False) -> Sample:
    """Run one arm of a round; return its sample, also if it fails."""
    free_memory()
    recorder = Recorder(job, profile=profile)
    try:
        way = way_of(arm, checkpoint_peak)
        torch.manual_seed(0)
        train(way, recorder)
        sample = {"status": "ok", **recorder.sample()}
        if way.ours and "memory_budget" in way.ours:
            sample |= {"budget_bytes": way.ours["memory_budget"]}
    except UnavailableError as error:
        sample = {"status": "skipped", "note": str(error)}
    except Exception as error:
        traceback.print_exc()
        recorder.script.close()
        text = " ".join(str(error).split())
        short = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower()
        note = text[:200] if not short or "host" in text.lower() else ""
        sample = {"status": "out of memory" if short else "failed", "note": note}
        traceback.clear_frames(error.__traceback__)
    if recorder.handle is not None:
        recorder.handle.remove()
    return sample


def free_memory() -> None:
    """Free unused memory of device and host."""
    gc.collect()
    gc.collect()  # what finalizers of the first one released
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        actoffload.device.backend().release_host()  # pinned memory of the arm before


def mean_square(y: torch.Tensor, _: Any = None) -> torch.Tensor:
    return y.float().square().mean()


def plain_steps(
    way: Way,
    recorder: Recorder,
    model: nn.Module,
    batch: Callable[[], tuple[Any, ...]],
    loss: Callable[[Any], torch.Tensor],
    *,
    optimize: bool = False,
) -> None:
    """Run a plain loop until the recorder is done: with autocast and AdamW, or without, where gradients are freed."""
    recorder.handle, around = way.offload(model), way.around(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if optimize else None
    while not recorder.done:
        inputs = batch()
        recorder.begin()
        with around:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=optimize):
                value = loss(model(*inputs))
            recorder.forward_ended(value)
            value.backward()
        recorder.backward_ended(model)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        recorder.step_ended()
