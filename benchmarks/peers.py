"""The same stack of Llama layers with other tools that save activation memory, each from its own installed package.

A tool that cannot be imported, or that fails on this stack, is left out, and the result says why.  All arms have the
same weights and are timed side by side, as in `frontier`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib import metadata
from statistics import mean, median
from typing import Any

import torch
from frontier import PARTS as STACKS
from frontier import SMALL_PARTS as SMALL_STACKS
from frontier import Arm, Arms, Part, _Called, _row
from harness import CHECKPOINT, OURS
from torch import nn

import actoffload
from actoffload.measure import measure_step_times

PARTS, SMALL_PARTS = STACKS["8k"], SMALL_STACKS["8k"]
REPEATS = 5
ABOVE = 1.03  # times the peak of checkpointing: a budget that is nearly as small
ACTIVATIONS = "OffloadActivations"
CONTEXT = "get_cpu_offload_context"
SOURCES = {
    "TRL": ("trl", ("trl.models.activation_offloading", "trl.models"), ACTIVATIONS),
    "torchtune": ("torchtune", ("torchtune.training",), ACTIVATIONS),
    "Transformer Engine": ("transformer_engine", ("transformer_engine.pytorch",), CONTEXT),
}
"""Distribution, modules in which the name may lie, and the name."""


def find(tool: str) -> Any:
    """Return the function or class of a tool; raise ImportError if it is not installed."""
    package, modules, name = SOURCES[tool]
    problems = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:  # a package may fail in any way where its libraries are missing
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                raise ImportError("it is not installed where this was measured") from None
            problems.append(f"{type(error).__name__}: {error}".splitlines()[0])
    raise ImportError(f"{package} could not be imported ({problems[0]})")


def _version(tool: str) -> str:
    try:
        return metadata.version(SOURCES[tool][0])
    except metadata.PackageNotFoundError:
        return ""


def _around_forward(manager: AbstractContextManager[object], model: nn.Module, x: torch.Tensor) -> Any:
    with manager:
        return model(x)


def _in_context(pair: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    context, sync_function = pair
    with context:
        x = layer(*args, **kwargs)
    return sync_function(x)


def _with_context(arms: Arms, make: Callable[..., Any], num_layers: int) -> nn.Module:
    """Return a model with a context of Transformer Engine's signature around each layer."""
    pair = make(enabled=True, num_layers=num_layers, model_layers=arms.part.settings.layers)
    return arms._model(partial(_in_context, pair))


def _peers(arms: Arms) -> Iterator[tuple[str, Callable[[], nn.Module], int | None]]:
    """Yield the name of each arm of another tool, a function that makes its model, and its number of layers."""
    for tool in ("TRL", "torchtune"):
        # One manager for all steps, as their trainers have: what it keeps of a step is freed in the next one.
        yield tool, lambda tool=tool: _Called(arms._model(), partial(_around_forward, find(tool)())), None
    half = arms.part.settings.layers // 2
    yield "Transformer Engine", lambda: _with_context(arms, find("Transformer Engine"), half), half


def measure_peers(part: Part, device: torch.device, repeats: int = REPEATS) -> dict[str, Any]:
    """Measure the stack without offload, with stock PyTorch, with the tools that are installed, and with actoffload."""
    arms, left_out, versions = Arms(part, device, steps=2), {}, {}
    for tool, model, count in _peers(arms):
        try:
            arm = Arm(tool, arms._step(model()), num_layers=count)
            arm.step()
        except Exception as error:
            left_out[tool] = " ".join(str(error).split()) or type(error).__name__
            continue
        versions[tool] = _version(tool)
        arms.arms.append(arm)
    half = part.settings.layers // 2
    own = Arm(CONTEXT, arms._step(_with_context(arms, actoffload.get_cpu_offload_context, half)), num_layers=half)
    own.step()
    arms.arms.append(own)
    rows = [_row(arm) for arm in arms.arms]
    checkpoint = next(row for row in rows if row["method"] == CHECKPOINT)
    budget = round(ABOVE * checkpoint["peak_bytes"])
    rows += [_row(arms.offload(OURS)), _row(arms.offload(OURS, memory_budget=budget))]
    samples = measure_step_times(
        {str(k): arm.step for k, arm in enumerate(arms.arms)}, repeats=repeats, steps=arms.steps, warmup=0
    )
    times = [median(of) for of in samples.values()]
    baseline = mean(times[:2])
    for row, seconds, of in zip(rows, times, samples.values(), strict=True):
        row |= {"seconds": seconds, "ratio": seconds / baseline, "samples": of}
        print(f"  {row['method']}: {row['ratio']:.3f}, {row['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    arms.close()
    noise = abs(times[1] - times[0]) / baseline
    found = {"settings": part.settings.to_json(), "noise": noise, "arms": rows}
    return {**found, "left_out": left_out, "versions": versions}
