"""Time against peak: what each way to save memory costs, for stacks of Llama layers, eager and compiled.

No offload, activation checkpointing of every layer, stock selective checkpointing, `save_on_cpu`, numbers of offloaded
layers, and `offload(model, memory_budget=...)` at ten budgets between the smallest peak that a plan reaches and that
without offload.  All arms have the same weights and are timed side by side.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from harness import AGAIN, CHECKPOINT, NOTHING, OURS, SAVE
from predict import PARTS, SMALL_PARTS, Part
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from workloads import Model, Stack

import actoffload
from actoffload.measure import measure_peak, measure_step_times

__all__ = ["PARTS", "SMALL_PARTS", "measure_part"]

SELECTIVE, LAYERS = "selective checkpoint", "layers"
BUDGETS = 10
PASSES = 12  # of which the first measure
REPEATS = 3
TARGETS = {"8k": 15.4, "32k": 12.3, "8k-compiled": 15.0, "32k-compiled": 10.0}
"""Budgets in GiB, a little above the peak with activation checkpointing, at which the time has a target."""
OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
"""Matrix products and attention, which stock selective checkpointing saves."""


@dataclass
class Arm:
    """One way to run a step."""

    method: str
    step: Callable[[], object]
    budget: int | None = None  # bytes
    layers: int | None = None  # that are offloaded
    handle: Any = None


class _Wrapped(nn.Module):
    """Calls a layer in some way; shares its weights."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.how = layer, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.how(self.layer, *args, **kwargs)


def _saved_on_cpu(pinned: bool, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with save_on_cpu(pin_memory=pinned):
        return layer(*args, **kwargs)


class Arms:
    """All arms of a stack; each has a model of its own, with the same weights."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part, self.device = part, device
        self.stack = Stack(part.settings, device)
        self.stack.model = None  # type: ignore[assignment]  # the twin has the weights
        pinned, contexts = device.type != "cpu", partial(create_selective_checkpoint_contexts, OPERATORS)
        self.arms = [Arm(NOTHING, self._step(self._model())), Arm(AGAIN, self._step(self._model()))]
        ways = {CHECKPOINT: partial(checkpoint, use_reentrant=False), SAVE: partial(_saved_on_cpu, pinned)}
        if not part.compiled:
            ways[SELECTIVE] = partial(checkpoint, use_reentrant=False, context_fn=contexts)
        for method, way in ways.items():
            self.arms.append(Arm(method, self._step(self._model(way))))

    def _model(self, way: Callable[..., Any] | None = None) -> Model:
        """Return a model with the weights of the stack, whose layers are called in some way."""
        weights = {id(weight): weight for weight in self.stack.twin.parameters()}
        model = copy.deepcopy(self.stack.twin, weights)
        for k, layer in enumerate(model.layers):
            if self.part.compiled:
                layer.compile()
            if way is not None:
                model.layers[k] = _Wrapped(layer, way)
        return model

    def _step(self, model: Model) -> Callable[[], object]:
        def step() -> None:
            model.zero_grad()  # as in training: gradients come during backward, while activations go
            self.stack.step(model)

        return step

    def offloading(self, method: str, *, passes: int, **how: Any) -> Arm:
        """Add an arm of `actoffload.offload`, whose plan is final."""
        model = self._model()
        settings = {"min_bytes": self.part.settings.min_bytes, **how}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
            handle = actoffload.offload(model, **settings)
        arm = Arm(method, self._step(model), how.get("memory_budget"), how.get("num_layers"), handle)
        arm.peak = max(measure_peak(arm.step, warmup=0) for _ in range(passes))  # type: ignore[attr-defined]
        self.arms.append(arm)
        return arm

    def close(self) -> None:
        """Free the host memory."""
        for arm in self.arms:
            if arm.handle is not None:
                arm.handle.remove()


def measure_part(name: str, part: Part, device: torch.device, budgets: int = BUDGETS) -> dict[str, Any]:
    """Measure all arms of a stack."""
    arms = Arms(part, device)
    for arm in arms.arms:
        arm.step()  # warms up
    peak = measure_peak(arms.arms[0].step, warmup=1)
    passes = PASSES if device.type != "cpu" else 2
    target = round(TARGETS[name] * 2**30) if device.type != "cpu" else peak // 2
    first = arms.offloading(OURS, passes=passes, memory_budget=target)
    try:
        smallest = first.handle.frontier().plans[0].peak_bytes
    except RuntimeError:  # nothing is measured on the reference device
        smallest = peak // 3
    for k in range(budgets):
        arms.offloading(OURS, passes=passes, memory_budget=smallest + (peak - smallest) * k // max(budgets - 1, 1))
    for count in part.settings.counts if budgets else ():
        arms.offloading(LAYERS, passes=2, num_layers=count)
    rows = [_row(arm) for arm in arms.arms]
    times = measure_step_times({str(k): arm.step for k, arm in enumerate(arms.arms)}, repeats=REPEATS, warmup=0)
    baseline = mean((median(times["0"]), median(times["1"])))
    for k, row in enumerate(rows):
        row |= {"seconds": median(times[str(k)]), "samples": times[str(k)]}
        row["ratio"] = row["seconds"] / baseline
        gib = f"{row['budget'] / 2**30:.2f}" if row["budget"] else row["layers"] or ""
        print(f"  {row['method']} {gib}: {row['ratio']:.3f}, {row['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    arms.close()
    del arms, first
    gc.collect()
    noise = abs(rows[1]["seconds"] - rows[0]["seconds"]) / baseline
    return {"settings": part.settings.to_json(), "compiled": part.compiled, "noise": noise, "arms": rows}


def _row(arm: Arm) -> dict[str, Any]:
    """Return the peak of an arm, and what its plan expects."""
    row = {"method": arm.method, "budget": arm.budget, "layers": arm.layers}
    row["peak_bytes"] = measure_peak(arm.step, warmup=1)
    if arm.handle is not None:
        plan = arm.handle.plan
        row |= {"text": str(plan), "highest_bytes": max(arm.peak, row["peak_bytes"])}  # type: ignore[attr-defined]
        row["predicted"] = {key: getattr(plan, key) for key in ("seconds", "peak_bytes", "baseline_seconds")}
        print(f"{plan}\n", flush=True)
    return row
