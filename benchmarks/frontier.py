"""Time against peak: what each way to save memory costs, for stacks of Llama layers, eager and compiled.

No offload, activation checkpointing of every layer, stock selective checkpointing, `save_on_cpu`, `offload(model)`,
numbers of offloaded layers, and `offload(model, memory_budget=...)` at ten budgets between the smallest peak that a
plan reaches and that without offload.  One more budget is a little above the peak with checkpointing.  All arms have
the same weights, each has a model of its own, and they are timed side by side.

Plans of the default and of a budget say which step time and peak they expect.  For a number of layers, `simulate` says
so from the costs that the default measured.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any, TypeAlias

import torch
from harness import AGAIN, CHECKPOINT, NOTHING, OURS, SAVE, settle
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from workloads import FULL, REHEARSAL, Model, Settings, Stack

import actoffload
from actoffload.measure import measure_peak, measure_step_times
from actoffload.schedule import simulate

SELECTIVE, DEFAULT, LAYERS = "selective", "default", "layers"
BUDGETS = 6
REPEATS = 3
TARGETS = {"8k": 15.4, "32k": 12.3, "8k-compiled": 15.0, "32k-compiled": 10.0}
"""Budgets in GiB, a little above the peaks with checkpointing."""
OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
"""Matrix products and attention, which stock selective checkpointing saves."""


Predict: TypeAlias = Callable[[Any], dict[str, float]]
"""From a plan to seconds and bytes."""


@dataclass(frozen=True)
class Part:
    """A stack of layers, compiled one by one or not."""

    settings: Settings
    compiled: bool


def _parts(eight: Settings, thirty_two: Settings) -> dict[str, Part]:
    stacks = {"8k": eight, "32k": thirty_two}
    return {f"{name}{'-compiled' * how}": Part(of, how) for how in (False, True) for name, of in stacks.items()}


PARTS = _parts(replace(FULL["8k"], layers=16, counts=(4, 12)), replace(FULL["32k"], layers=4, counts=(1, 3)))
SMALL_PARTS = _parts(replace(REHEARSAL["8k"], counts=(1,)), replace(REHEARSAL["32k"], counts=(1,)))


@dataclass
class Arm:
    """One way to run a step."""

    method: str
    step: Callable[[], object]
    model: Any = None
    budget: int | None = None  # bytes
    num_layers: int | None = None
    handle: Any = None
    highest: int = 0  # peak of the passes that measure, in bytes


class _Called(nn.Module):
    """Calls a layer in some way."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.how = layer, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.how(self.layer, *args, **kwargs)


def _saved_on_cpu(pinned: bool, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with save_on_cpu(pin_memory=pinned):
        return layer(*args, **kwargs)


class Arms:
    """All arms of a stack; `steps` of them in a row are timed later, as in `measure_step_times`."""

    def __init__(self, part: Part, device: torch.device, steps: int = 1) -> None:
        self.part, self.device, self.stack, self.steps = part, device, Stack(part.settings, device), steps
        ways: dict[str, Callable[..., Any] | None] = {NOTHING: None, AGAIN: None}
        ways[CHECKPOINT] = partial(checkpoint, use_reentrant=False)
        if not part.compiled:  # compiled code is one operator, and checks strides, which save_on_cpu changes
            contexts = partial(create_selective_checkpoint_contexts, OPERATORS)
            ways[SELECTIVE] = partial(checkpoint, use_reentrant=False, context_fn=contexts)
            ways[SAVE] = partial(_saved_on_cpu, device.type != "cpu")
        models = {method: self._model(way) for method, way in ways.items()}
        self.arms = [Arm(method, self._step(model), model) for method, model in models.items()]
        for arm in self.arms:
            arm.step()  # makes workspaces

    def _model(self, way: Callable[..., Any] | None = None) -> Model:
        """Return a model with the weights of the stack, whose layers are called in some way."""
        weights = {id(weight): weight for weight in self.stack.twin.parameters()}
        model = copy.deepcopy(self.stack.twin, weights)
        for k, layer in enumerate(model.layers):
            if self.part.compiled:
                layer.compile()
            if way is not None:
                model.layers[k] = _Called(layer, way)
        return model

    def _step(self, model: Model) -> Callable[[], object]:
        def step() -> None:
            model.zero_grad()  # as in training: gradients come during backward, while activations go
            self.stack.step(model)

        return step

    def offload(self, method: str, **how: Any) -> Arm:
        """Add an arm of `actoffload.offload`, and run it until its plan is final."""
        model = self._model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
            handle = actoffload.offload(model, min_bytes=self.part.settings.min_bytes, **how)
        arm = Arm(method, self._step(model), model, handle=handle)
        arm.budget, arm.num_layers = how.get("memory_budget"), how.get("num_layers")
        begun = time.monotonic()
        number, arm.highest = settle(handle, arm.step, self.steps)
        print(f"  {method}: the plan is final after {number} steps, {time.monotonic() - begun:.0f} s", flush=True)
        self.arms.append(arm)
        return arm

    def close(self) -> None:
        """Free the host memory."""
        for arm in self.arms:
            if arm.handle is not None:
                arm.handle.remove()


def measure_part(name: str, part: Part, device: torch.device, budgets: int = BUDGETS) -> dict[str, Any]:
    """Measure all arms of a stack."""
    arms, gpu = Arms(part, device), device.type != "cpu"
    peak = measure_peak(arms.arms[0].step, warmup=1)
    target = round(TARGETS[name] * 2**30) if gpu else peak // 2
    first = arms.offload(OURS, memory_budget=target)
    smallest = _smallest(first.handle) if gpu else peak // 3
    for k in range(budgets):
        arms.offload(OURS, memory_budget=smallest + (peak - smallest) * k // max(budgets - 1, 1))
    default = arms.offload(DEFAULT)
    for count in part.settings.counts:
        arms.offload(LAYERS, num_layers=count)
    predict = measured_costs(default.handle)
    rows = [_row(arm, predict) for arm in arms.arms]
    steps = {str(k): arm.step for k, arm in enumerate(arms.arms)}
    samples = measure_step_times(steps, repeats=REPEATS, steps=arms.steps, warmup=0)
    times = [median(of) for of in samples.values()]
    baseline = mean(times[:2])
    for row, seconds, of in zip(rows, times, samples.values(), strict=True):
        row |= {"seconds": seconds, "ratio": seconds / baseline, "samples": of}
        if row.get("predicted"):
            row["distance"] = {key: row["predicted"][key] / row[key] - 1 for key in ("seconds", "peak_bytes")}
        shown = "" if row["budget"] is None else f" {row['budget'] / 2**30:.2f} GiB"
        print(f"  {row['method']}{shown}: {row['ratio']:.3f}, {row['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    found = _profile(first)
    arms.close()
    del arms, first, steps
    gc.collect()
    noise = abs(times[1] - times[0]) / baseline
    return {**_described(part), "noise": noise, "target": target, "arms": rows, "profile": {**found, "none": baseline}}


def _described(part: Part) -> dict[str, Any]:
    return {"settings": part.settings.to_json(), "compiled": part.compiled}


def _profile(arm: Arm) -> dict[str, float]:
    """Record a step; return where its time goes, in seconds."""
    with arm.handle.recording():
        arm.step()
    seconds = {kind.name.lower(): of for kind, of in arm.handle.timeline().seconds.items()}
    return {**seconds, "again": arm.handle.plan.recompute_seconds}


def _smallest(handle: Any) -> int:
    """Return the smallest peak that a plan reaches, in bytes."""
    found: int = handle.frontier().plans[0].peak_bytes
    return found


def measured_costs(handle: Any) -> Predict | None:
    """Return a function that predicts plans without recomputation from what the first steps of a handle measured.

    None if nothing was measured.
    """
    found = getattr(handle._tracker.steering, "_chosen", None)
    if found is None or found.choose is None:
        return None
    _, groups, link = found.choose.args
    layers, host_seconds = [ways[0].cost for ways in groups], found.choose.keywords["host_seconds"]
    whole = {"excess": found.excess, "outside": found.outside, "pace": found.pace}
    return partial(predicted, layers, link, host_seconds, **whole)


def predicted(
    layers: Any, link: Any, host_seconds: float, plan: Any, *, excess: int = 0, outside: float = 0.0, pace: float = 1.0
) -> dict[str, float]:
    """Return what `simulate` gives for a plan, with what whole passes take beside their groups."""
    result = simulate(plan, layers, link, host_seconds=host_seconds)
    return {"seconds": pace * (result.step_time + outside), "peak_bytes": result.device_peak_bytes + excess}


def _row(arm: Arm, predict: Predict | None = None) -> dict[str, Any]:
    """Return the peak of an arm, and what its plan expects."""
    row: dict[str, Any] = {"method": arm.method, "budget": arm.budget, "num_layers": arm.num_layers}
    row["peak_bytes"] = measure_peak(arm.step, warmup=2)
    if arm.handle is not None:
        plan = arm.handle.plan
        row |= {"plan": str(plan), "highest_bytes": max(arm.highest, row["peak_bytes"])}
        if arm.num_layers is not None:
            row |= {"predicted": predict(plan.plan)} if predict is not None else {}
        elif plan.seconds is not None:
            row["predicted"] = {"seconds": plan.seconds, "peak_bytes": plan.peak_bytes}
    return row
