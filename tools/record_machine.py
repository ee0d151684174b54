"""Record what the machine of the benchmarks can do; ``benchmarks/run.py machine links overlap`` runs this.

    python tools/record_machine.py machine --out build/bench --commit $(git rev-parse HEAD)

machine    machine.txt: what ``python -m actoffload`` prints
links      links.json: the bandwidth of each GPU, alone and with all GPUs of the host copying; runs under torchrun
overlap    overlap.json: a step whose copies overlap with compute and one that waits, for the page on concepts
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import actoffload
from actoffload.machine import measure_machine
from actoffload.measure import describe_device, measure_link, measure_step_times
from actoffload.schedule import Kind, LayerCost, Timeline
from actoffload.schedule.costs import spread_evenly

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def machine(out: Path, about: dict[str, Any], _: bool) -> None:
    """Measure what ``python -m actoffload`` prints."""
    device, date, commit = about["device"], about["date"][:10], about["commit"][:12]
    when = f"{device['name']}, torch {device['torch']}, {date}, commit {commit}"
    (out / "machine.txt").write_text(f"{when}\n\n{measure_machine()}\n", encoding="utf-8")


# Copies of all GPUs

COPIES = 16
"""Copies in a row, so that those of all ranks overlap."""


def links(out: Path, about: dict[str, Any], rehearse: bool) -> None:
    """Measure bytes per second between each GPU and the host, one GPU alone and all at once, in each direction."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nbytes = 2**20 if rehearse else 2**28
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE.type != "cpu")
    pairs = {"d2h": (on_host, on_device), "h2d": (on_device, on_host)}
    found: dict[str, Any] = {"rank": rank}
    for name, (target, source) in pairs.items():
        _rate(target, source, 2)  # to warm up
        for turn in range(ranks):
            dist.barrier()
            if turn == rank:
                found[f"{name}_alone"] = _rate(target, source, COPIES)
        dist.barrier()
        found[name] = _rate(target, source, COPIES)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, found)
    if rank == 0:
        written = {**about, **about["device"], "device": about["device"]["name"], "ranks": every}
        (out / "links.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _rate(target: torch.Tensor, source: torch.Tensor, copies: int) -> float:
    """Return the bytes per second of copies in a row."""
    _synchronize()
    begun = time.perf_counter()
    for _ in range(copies):
        target.copy_(source, non_blocking=True)
    _synchronize()
    return copies * source.nbytes / (time.perf_counter() - begun)


def _synchronize() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()


# Steps of five GPT blocks: with two offloaded, copies overlap with compute; with three, compute waits.
# The page on concepts shows them beside what `simulate` predicts from the measured costs and link.

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
    """Return the timelines of so many steps."""
    found = []
    for _ in range(2):
        step(pair)
    for _ in range(number):
        with pair[0].record_timeline() as recorder:
            step(pair)
        found.append(recorder.timeline())
    return found


def _costs(recordings: list[Timeline]) -> list[LayerCost]:
    """Return the cost of each layer in recordings of one step that copied nothing; times are medians.

    The tensors of a layer count as saved at equal distances, and as needed in reverse order.
    """
    found: dict[int, list[LayerCost]] = {}
    for timeline in recordings:
        levels = [*pairwise(((0.0, 0), *timeline.resident))]
        backward = {span.layer: span.seconds for span in timeline.of(Kind.BACKWARD)}
        for span in timeline.of(Kind.FORWARD):
            rises = [now - was for (_, was), (at, now) in levels if span.start <= at <= span.end and now > was]
            found.setdefault(span.layer, []).append(LayerCost(span.seconds, backward[span.layer], spread_evenly(rises)))
    return [
        LayerCost(median(cost.forward for cost in costs), median(cost.backward for cost in costs), costs[0].saved)
        for _, costs in sorted(found.items())
    ]


def overlap(out: Path, about: dict[str, Any], rehearse: bool) -> None:
    """Record the steps, and measure the costs of a block, the link and whole steps."""
    shape, number = ((1, 64, 128), 1) if rehearse else (SHAPE, 5)
    torch.manual_seed(0)
    with DEVICE:
        layers = nn.ModuleList([Block(shape[-1]) for _ in range(LAYERS)])
    step = partial(_step, layers if rehearse else layers.to(torch.bfloat16), shape)
    make = partial(actoffload.get_cpu_offload_context, enabled=True, model_layers=LAYERS)
    costs = _costs(_recorded(step, make(manual_synchronization=True)[:2], number))
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
        **about,
        "link": {"d2h": link.d2h, "h2d": link.h2d},
        "costs": [asdict(cost) for cost in costs],
        "runs": runs,
        "seconds": times,
    }
    (out / "overlap.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


RECORDERS = {"machine": machine, "links": links, "overlap": overlap}


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("name", choices=RECORDERS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the recording")
    parser.add_argument("--commit", default="", help="commit that is measured")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    about = {
        "device": asdict(describe_device()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": options.commit,
        "command": f"python benchmarks/run.py {options.name}",
    }
    if options.name == "links":
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    RECORDERS[options.name](options.out, about, options.rehearse)
    if options.name == "links":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
