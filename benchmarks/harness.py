"""Measure the arms of a job in rounds: step times, peaks, kernels, host times, and how long the plan took.

Each arm of a round trains a model of its own, and frees it before the next one begins. An arm that fails or runs out of
memory is a sample that says so, and the others go on.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from jobs import Job
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import actoffload
from actoffload.measure import MemoryMeter

__all__ = ["DEVICE", "Recorder", "Sample", "UnavailableError", "Way", "plain_steps", "run_arms", "way_of"]

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
ABOVE = 1.03
"""A budget over the peak of checkpointing."""
SETTLING = 40
"""Steps after which the plan has to be final."""
PROVEN = 2
"""First steps of which loss and gradients are noted, to be compared between arms."""
BY_RANK = "peak_bytes", "predicted_bytes", "drop_bytes", "d2h", "h2d"
"""What a sample has of each rank."""
LEFT = 64 * 2**20
"""Bytes that an arm may leave allocated, such as workspaces, without a note."""
_ATTENTION = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
SAVED = [getattr(torch.ops.aten, name).default for name in ("mm", *_ATTENTION)]
"""Matrix products and attention, which selective checkpointing saves."""
ENOUGH = 8.0
"""Seconds of measured steps in a round, of two steps at least."""

Sample: TypeAlias = dict[str, Any]


class UnavailableError(Exception):
    """An arm or a job cannot run here, as a package is missing; the message says why."""


@dataclass(frozen=True)
class Way:
    """How an arm saves memory.

    Parameters
    ----------
    checkpointed, inputs_offloaded, trl : bool
        Whether layers are checkpointed, their inputs are offloaded by `save_on_cpu`, and TRL offloads what is saved.
    selective, saved_on_cpu : bool
        Whether checkpointing saves matrix products and attention, and whether `save_on_cpu` offloads all that is saved.
    waits : bool
        Whether the dispatcher of a mixture of experts makes the host wait for the device.
    ours : dict, optional
        Arguments of `actoffload.offload`; None without it.
    """

    checkpointed: bool = False
    inputs_offloaded: bool = False
    trl: bool = False
    selective: bool = False
    saved_on_cpu: bool = False
    waits: bool = False
    ours: dict[str, Any] | None = None

    def call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a layer of a plain loop in this way."""
        moved = self.inputs_offloaded or self.saved_on_cpu
        with save_on_cpu(pin_memory=DEVICE.type != "cpu") if moved else nullcontext():
            if not self.checkpointed:
                return layer(*args, **kwargs)
            if self.selective:
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
        if not self.trl:
            return nullcontext()
        try:
            from trl.models import activation_offloading
        except ImportError as error:
            raise UnavailableError(f"TRL cannot be imported: {error}.".splitlines()[0]) from None
        if DEVICE.type == "cpu":
            raise UnavailableError("TRL's offloading needs an accelerator.")
        return activation_offloading.get_act_offloading_ctx_manager(model=model, warn_if_no_head=False)


def way_of(arm: str, checkpoint_peak: int | None) -> Way:
    """Return the way of an arm; `checkpoint_peak` is the peak of checkpointing in bytes, if it was measured."""
    name, _, gib = arm.partition(":")
    ours = {"min_bytes": 1024} if DEVICE.type == "cpu" else {}  # a rehearsal has small tensors
    if name == "budget":
        if not gib and checkpoint_peak is None:
            raise UnavailableError("Checkpointing has no peak in this run, so there is no budget.")
        budget = float(gib) * 2**30 if gib else ABOVE * float(checkpoint_peak or 0)
        return Way(ours={**ours, "memory_budget": int(budget)})
    ways = {"none": Way(), "none2": Way(), "checkpoint": Way(True), "offload": Way(ours=ours)}
    ways |= {"waiting": Way(waits=True), "qkv": Way(ours={**ours, "layers": "*.qkv", "fraction": 1.0})}
    ways |= {"checkpoint_offload": Way(True, inputs_offloaded=True), "trl": Way(True, trl=True)}
    ways |= {"selective": Way(True, selective=True), "save_on_cpu": Way(saved_on_cpu=True)}
    return ways[name]


class Recorder:
    """Follow the steps of an arm: those until the plan is final, warm-up, those that are measured, one in a profiler.

    The loop calls `begin`, `forward_ended`, `backward_ended` and `step_ended` in each step, and stops when `done`.
    """

    def __init__(self, job: Job, *, profile: bool = False) -> None:
        self._job, self._warm_up, self._left = job, job.warm_up, job.steps
        self._profile = profile and DEVICE.type == "cuda"
        self._first, self._measured = MemoryMeter(), MemoryMeter()
        self._meter: MemoryMeter | None = None
        self._profiler: Any = None
        self._host: list[float] = []
        self._begun = self._settled = self._measuring = 0.0
        self._passes = self._steps = 0
        self.done = False
        self.handle: Any = None
        self.values: list[torch.Tensor] = []
        self.more: Sample = {}  # what else the loop found

    def begin(self) -> None:
        """Note that a step begins."""
        if self._meter is None and not self._steps:
            self._meter = self._first
            self._meter.__enter__()
            self._begun = time.perf_counter()
        self._mark()
        self._forward = time.perf_counter()

    def forward_ended(self, loss: Any = None) -> None:
        """Note the end of forward, and the loss of the first steps."""
        if self._meter is self._measured:
            self._host.append(time.perf_counter() - self._forward)
        self._mark()
        if isinstance(loss, torch.Tensor) and self._steps < PROVEN:
            self.values.append(loss.detach().clone())

    def backward_ended(self, model: nn.Module | None = None) -> None:
        """Note the end of backward, and the gradients of a model in the first steps."""
        self._mark()
        if model is not None and self._steps < PROVEN:
            norms = [p.grad.norm().float() for p in model.parameters() if p.grad is not None]
            self.values.append(torch.stack([getattr(n, "to_local", lambda n=n: n)() for n in norms]).norm())

    def step_ended(self) -> None:
        """Note the end of a step, and decide what the next one is for."""
        self._mark()
        self._steps += 1
        if self._profiler is not None:
            _synchronize()
            self._profiler.__exit__(None, None, None)
            self.done = True
        elif self._meter is self._first:
            self._step_before()
        else:
            self._left -= 1
            # Ranks have to agree, so they take all steps.
            long = time.perf_counter() - self._measuring > ENOUGH and not dist.is_initialized()
            if not self._left or (long and len(self._host) > 1):
                self._close()

    def _step_before(self) -> None:
        settling = self.handle is not None and self.handle.settling
        if settling and time.perf_counter() - self._begun < self._job.settles:
            self._passes = self._steps + 1
            if self._steps >= SETTLING:
                raise RuntimeError(f"The plan is not final after {self._steps} steps.")
            return
        if not self._settled:
            _synchronize()
            self._settled = time.perf_counter()
        self._warm_up -= 1
        if self._warm_up <= 0:
            self._first.__exit__()
            self._meter = self._measured
            self._meter.__enter__()
            self._measuring = time.perf_counter()
            self._mark()

    def _close(self) -> None:
        self._measured.__exit__()
        self._meter = None
        if self._profile:
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.__enter__()
        else:
            self.done = True

    def _mark(self) -> None:
        if self._meter is self._measured:
            self._measured.sample()

    def abandon(self) -> None:
        """Close what is open after an exception."""
        if self._meter is not None:
            self._meter.__exit__()

    def sample(self) -> Sample:
        """Return what was measured, in seconds and bytes; of several ranks the slowest time and the largest peak."""
        times = [seconds for seconds, _ in self._measured.samples]  # the end of a step, then four marks in each
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
            found["kernel_seconds"] = kernel_seconds(self._profiler)
        if self.handle is not None:
            found |= self._planned(found["seconds"])
        if dist.is_initialized():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, found)
            found = _slowest(ranks)
        return found

    def _planned(self, seconds: list[float]) -> Sample:
        plan = self.handle.plan
        found: Sample = {"plan": str(self.handle.plan), "final": not self.handle.settling}
        if self._passes:
            ordinary = self._passes * sorted(seconds)[len(seconds) // 2]
            found |= {"passes": self._passes, "startup_seconds": self._settled - self._begun - ordinary}
        for key, name in (("predicted_seconds", "seconds"), ("predicted_bytes", "peak_bytes")):
            value = getattr(plan, name, None)
            found |= {} if value is None else {key: value}
        try:
            found["report"] = str(self.handle.report())
        except (RuntimeError, AttributeError) as error:  # nothing could be offloaded, or a pipeline has no plan
            found["report"] = str(error)
        return found


def kernel_seconds(profiler: Any) -> float | None:
    """Return the seconds of all kernels in a profile, without copies; None if it has none."""
    nanoseconds = [
        event.duration_ns()
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and not event.name().startswith(("Memcpy", "Memset", "ProfilerStep"))
        and not (hasattr(event, "is_user_annotation") and event.is_user_annotation())
    ]
    return sum(nanoseconds) * 1e-9 if nanoseconds else None


def _slowest(ranks: list[Sample]) -> Sample:
    found = dict(ranks[0])
    for key in ("seconds", "pass_seconds", "host_seconds"):
        found[key] = [max(of_ranks) for of_ranks in zip(*(rank[key] for rank in ranks), strict=True)]
    for key in ("peak_bytes", "highest_bytes", "startup_seconds", "kernel_seconds", "predicted_bytes"):
        values = [rank[key] for rank in ranks if rank.get(key) is not None]
        found |= {key: max(values)} if values else {}
    found["values"] = [value for rank in ranks for value in rank["values"]]
    found["ranks"] = [{key: rank[key] for key in BY_RANK if rank.get(key) is not None} for rank in ranks]
    return found


Train: TypeAlias = Callable[[Way, Recorder], object]
"""Trains a new model in some way until the recorder is done."""


def run_arms(
    job: Job,
    train: Train,
    write: Callable[[Sample], object],
    arms: tuple[str, ...] = (),
    earlier: Iterable[Sample] = (),
    **more: Any,
) -> list[Sample]:
    """Run the arms of a job in rounds; each sample is written at once, and a line before it begins.

    Samples of an earlier process are returned, too.
    """
    found: list[Sample] = list(earlier)
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
    before = free()
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
        recorder.abandon()
        text = " ".join(str(error).split())
        short = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower()
        note = text[:200] if not short or "host" in text.lower() else ""
        sample = {"status": "out of memory" if short else "failed", "note": note}
        traceback.clear_frames(error.__traceback__)
    if recorder.handle is not None:
        recorder.handle.remove()
    del recorder
    left = free() - before
    if left > LEFT:
        sample["note"] = f"{sample.get('note', '')} {left / 2**30:.2f} GiB stayed allocated.".strip()
    return sample


def free() -> int:
    """Free unused memory of device and host; return the bytes allocated on the device."""
    gc.collect()
    gc.collect()  # what finalizers of the first one released
    if DEVICE.type == "cpu":
        return 0
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    with_host = getattr(torch._C, "_host_emptyCache", None)  # pinned memory of the arm before
    if with_host is not None:
        with_host()
    return torch.accelerator.memory_allocated()


def _synchronize() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()


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
