"""Pipelines of small blocks, trained without offload and with, in any number of processes."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import same_bits
from timed_device import Timed
from torch import Tensor, nn
from torch.distributed import pipelining

from actoffload import PipelineHandle, offload

SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")  # the backward of most microbatches is split
NAMES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
WIDTH, HIDDEN, ROWS, BLOCKS = 16, 48, 8, 3
MIN_BYTES = 256
STEPS = 3


class Block(nn.Module):
    """A residual block that saves three tensors, one of which the gradients of the weights do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Computing(Block):
    """A block that takes a virtual second in forward, also where it is recomputed."""

    device = Timed()

    def forward(self, x: Tensor) -> Tensor:
        self.device.compute(1.0)
        return super().forward(x)


class Skipping(nn.Sequential):
    """Blocks of which some may be skipped."""

    skipped: Collection[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self):
            x = x if k in self.skipped else block(x)
        return x


class StoppedError(Exception):
    """Raised by a block."""


class Stopping(nn.Sequential):
    """Blocks of which the second raises an exception in a forward, or in its backward, when it is told to."""

    after, backward = -1, False  # so many forwards with gradients

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self):
            x = block(x)
            if k == 1 and torch.is_grad_enabled():
                self.after -= 1
                if not self.after and not self.backward:
                    raise StoppedError
                if not self.after:
                    x.register_hook(self.stop)
        return x

    def stop(self, gradient: Tensor) -> None:
        raise StoppedError


def block_bytes() -> int:
    """Bytes that a block saves for one microbatch."""
    return 4 * ROWS * (WIDTH + 2 * HIDDEN)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make(
    name: str,
    microbatches: int = 4,
    blocks: int = BLOCKS,
    module: Callable[[int], nn.Module] | None = None,
    stages_per_rank: int = 2,
) -> tuple[Any, list[nn.Module]]:
    """Return a schedule of this rank and the modules of its stages; the same weights each time."""
    world, rank = dist.get_world_size(), dist.get_rank()
    per_rank = 1 if name in SINGLE else stages_per_rank
    count = world * per_rank
    mine = [rank + world * k for k in range(per_rank)]
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        mine = [rank, count - 1 - rank]
    stages, modules = [], []
    for stage in mine:
        torch.manual_seed(stage)
        made = nn.Sequential(*(Block() for _ in range(blocks))) if module is None else module(stage)
        modules.append(made)
        stages.append(pipelining.PipelineStage(made, stage, count, torch.device("cpu")))
    kind = getattr(pipelining, name)
    return kind(stages[0] if name in SINGLE else stages, microbatches, loss_fn=loss), modules


def train(
    schedule: Any,
    modules: Sequence[nn.Module],
    steps: int = STEPS,
    microbatches: int = 4,
    after: Callable[[int], None] = lambda k: None,
    rows: int = ROWS,
) -> list[Tensor]:
    """Run steps; return the losses and gradients of each."""
    first = dist.get_rank() == 0
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    results = []
    for k in range(steps):
        torch.manual_seed(100 + k)
        x, target = torch.randn(rows * microbatches, WIDTH), torch.randn(rows * microbatches, WIDTH)
        for module in modules:
            module.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        last = any(stage.is_last for stage in stages)
        schedule.step(*([x] if first else []), target=target if last else None, losses=losses if last else None)
        after(k)
        results += [each.detach().clone() for each in losses]
        results += [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    return results


def same(want: list[Tensor], got: list[Tensor]) -> bool:
    """Return whether two runs had the same results, to the bit, and had any."""
    return len(want) == len(got) > 0 and all(same_bits(a, b) for a, b in zip(want, got, strict=True))


def held(handle: PipelineHandle) -> tuple[int, int]:
    """Return the bytes that are offloaded and resident, and those of host memory in use."""
    statistics = handle.statistics()
    return statistics.resident_bytes, statistics.host_bytes_used


def offloaded(schedule: Any, **arguments: Any) -> PipelineHandle:
    """Offload a schedule."""
    return offload(schedule, min_bytes=MIN_BYTES, **arguments)


def compare(name: str, *, microbatches: int = 4, steps: int = STEPS, **arguments: Any) -> dict[str, Any]:
    """Train without offload and with; return whether the bits are the same, and what each step did."""
    want = train(*make(name, microbatches), steps, microbatches)
    schedule, modules = make(name, microbatches)
    handle, seen = offloaded(schedule, **arguments), []

    def after(k: int) -> None:
        statistics = handle.statistics()
        seen.append(
            {
                "peak": handle.report().peak_resident_bytes,
                "expected": None if handle.plan is None else handle.plan.saved_peak_bytes,
                "on_demand": statistics.reloaded_on_demand,
                "offloaded": statistics.bytes_offloaded,
                "reloaded": statistics.bytes_reloaded,
                "resident": statistics.resident_bytes,
                "host_used": statistics.host_bytes_used,
            }
        )
        handle.reset_statistics()

    got = train(schedule, modules, steps, microbatches, after)
    plan = handle.plan
    report = handle.report()
    table = handle.table()
    handle.remove()
    return {
        "same": same(want, got),
        "steps": seen,
        "plan": None if plan is None else str(plan),
        "plan_bytes": 0 if plan is None else plan.offloaded_bytes,
        "saved": report.totals.bytes_saved,
        "ranks": len(table.reports),
        "table": str(table),
        "host_bytes": handle.statistics().host_bytes,
        "removed": PipelineHandle.of(schedule) is None and "_actoffload_pipeline" not in vars(schedule),
    }
