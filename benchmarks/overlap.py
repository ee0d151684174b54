"""Recorded steps of five GPT blocks: with two offloaded, copies overlap with compute; with three, compute waits.

The figures of the page on concepts show them beside what `simulate` predicts from the measured costs and link.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE
from torch import nn

import actoffload
from actoffload.measure import describe_device, measure_link, measure_step_times, measured_costs
from actoffload.schedule import Timeline

__all__ = ["record"]

LAYERS, COUNTS = 5, (2, 3)
SHAPE = 1, 40960, 4096  # the forward of a block takes much longer than half of its copy: two of five overlap
HEADS = 32


class Block(nn.Module):
    """A pre-norm GPT block: causal attention, then a GELU MLP four times as wide."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; input and output are (batch, tokens, hidden)."""
        batch, tokens, hidden = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _step(layers: nn.ModuleList, shape: tuple[int, ...], pair: Any) -> None:
    context, sync_function = pair
    x = torch.randn(shape, device=DEVICE, dtype=next(layers.parameters()).dtype)
    for layer in layers:
        with context:
            x = layer(x)
        x = sync_function(x)
    x.float().square().mean().backward()


def _recorded(step: Callable[[Any], object], pair: Any, number: int) -> list[Timeline]:
    found = []
    for _ in range(2):
        step(pair)
    for _ in range(number):
        with pair[0].record_timeline() as recorder:
            step(pair)
        found.append(recorder.timeline())
    return found


def record(out: Path, about: dict[str, Any], *, rehearse: bool) -> None:
    """Record the steps, measure the costs of a block, the link and whole steps, and write ``overlap.json``."""
    shape, number = ((1, 64, 128), 1) if rehearse else (SHAPE, 5)
    torch.manual_seed(0)
    with DEVICE:
        layers = nn.ModuleList([Block(shape[-1]) for _ in range(LAYERS)])
    step = partial(_step, layers if rehearse else layers.to(torch.bfloat16), shape)
    make = partial(actoffload.get_cpu_offload_context, enabled=True, model_layers=LAYERS)
    costs = measured_costs(_recorded(step, make(manual_synchronization=True)[:2], number))
    pairs = {count: make(num_layers=count) for count in COUNTS}
    arms = {str(count): partial(step, pair) for count, pair in pairs.items()}
    arms["0"] = partial(step, actoffload.get_cpu_offload_context(enabled=False))
    link = measure_link(2**20 if rehearse else 2**28)
    times = {name: median(found) for name, found in measure_step_times(arms, repeats=number).items()}
    runs = {}
    for count, pair in pairs.items():
        timelines = sorted(_recorded(step, pair, number), key=lambda timeline: timeline.end)
        chosen = timelines[len(timelines) // 2]  # the one with the median time
        spans = [[span.kind.name, span.layer, span.start, span.end, span.nbytes] for span in chosen.spans]
        runs[str(count)] = {"spans": spans, "resident": [list(point) for point in chosen.resident]}
    data = {
        "device": asdict(describe_device()),
        **{key: about[key] for key in ("date", "commit", "command")},
        "link": {"d2h": link.d2h, "h2d": link.h2d},
        "costs": [asdict(cost) for cost in costs],
        "runs": runs,
        "seconds": times,
    }
    (out / "overlap.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
