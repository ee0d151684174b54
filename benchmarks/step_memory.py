"""Device memory over one training step of Llama layers: no offload, checkpointing, and a memory budget of its peak.

Bytes in use are noted where the forward and the backward of a layer end, on the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from frontier import Arm, Arms, Part
from harness import CHECKPOINT, NOTHING, OURS
from torch import nn

from actoffload.measure import MemoryMeter, measure_peak

ABOVE = 1.03  # budget, as a ratio to the peak with checkpointing


def measure_part(part: Part, device: torch.device) -> dict[str, Any]:
    """Return the samples of each way, as seconds and bytes."""
    arms = Arms(part, device)
    found = {arm.method: arm for arm in arms.arms if arm.method in (NOTHING, CHECKPOINT)}
    budget = round(ABOVE * measure_peak(found[CHECKPOINT].step, warmup=1))
    if device.type == "cpu":  # the layers of a rehearsal save too little for a plan of this budget
        budget = measure_peak(found[NOTHING].step, warmup=1)
    found[OURS] = arms.offload(OURS, memory_budget=budget)
    rows = {method: _record(arm) for method, arm in found.items()}
    arms.close()
    return {"settings": part.settings.to_json(), "budget": budget, "arms": rows}


def _record(arm: Arm) -> dict[str, Any]:
    """Run a step without and one with notes; return the peak of the first and the samples of the second."""
    peak = measure_peak(arm.step, warmup=2)
    layers = arm.model.layers
    with MemoryMeter() as meter:
        handles = [layer.register_forward_hook(_noting(meter.sample)) for layer in layers]
        try:
            meter.sample()
            arm.step()
            meter.sample()
        finally:
            for handle in handles:
                handle.remove()
    return {"peak_bytes": peak, "samples": meter.samples}


def _noting(sample: Callable[..., None]) -> Callable[..., None]:
    """Return a forward hook that notes the memory now and where the backward of the layer starts and ends."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        sample()
        for tensor in (output, arguments[0]):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(sample)

    return hook
