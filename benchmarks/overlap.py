"""Recorded steps of five GPT blocks: with two offloaded, copies overlap with compute; with three, compute waits.

The figures of the page on concepts show them beside what `simulate` predicts from the measured costs and link.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from harness import context_step
from workloads import Settings, Stack

import actoffload
from actoffload.measure import measure_link, measure_step_times, measured_costs
from actoffload.schedule import Timeline

__all__ = ["LAYERS", "TOKENS", "measure_overlap"]

LAYERS, COUNTS = 5, (2, 3)
TOKENS = 40960  # the forward of a block takes much longer than half of its copy, so two of five overlap with compute
RECORDINGS = 5


def _recorded(stack: Stack, pair: Any, number: int) -> list[Timeline]:
    """Return several recordings of a step."""
    step, found = context_step(stack, pair), []
    for _ in range(2):
        step()
    for _ in range(number):
        with pair[0].record_timeline() as recorder:
            step()
        found.append(recorder.timeline())
    return found


def measure_overlap(settings: Settings, device: torch.device, recordings: int = RECORDINGS) -> dict[str, Any]:
    """Record the steps, and measure the costs of a block, the link and the times of whole steps."""
    stack = Stack(settings, device)
    context = actoffload.get_cpu_offload_context(enabled=True, model_layers=LAYERS, manual_synchronization=True)
    costs = measured_costs(_recorded(stack, context[:2], recordings))
    pairs = {n: actoffload.get_cpu_offload_context(enabled=True, num_layers=n, model_layers=LAYERS) for n in COUNTS}
    steps = {str(n): context_step(stack, pair) for n, pair in pairs.items()}
    steps["0"] = context_step(stack, actoffload.get_cpu_offload_context(enabled=False))
    link = measure_link(2**20 if device.type == "cpu" else 2**28)
    times = {name: median(found) for name, found in measure_step_times(steps, repeats=recordings).items()}
    runs = {}
    for n, pair in pairs.items():
        timelines = sorted(_recorded(stack, pair, recordings), key=lambda timeline: timeline.end)
        chosen = timelines[len(timelines) // 2]  # the one with the median time
        spans = [[span.kind.name, span.layer, span.start, span.end, span.nbytes] for span in chosen.spans]
        runs[str(n)] = {"spans": spans, "resident": [list(point) for point in chosen.resident]}
    layers = [asdict(cost) for cost in costs]
    return {
        "settings": settings.to_json(),
        "link": {"d2h": link.d2h, "h2d": link.h2d},
        "costs": layers,
        "runs": runs,
        "seconds": times,
    }
