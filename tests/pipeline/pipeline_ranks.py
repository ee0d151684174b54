"""One rank of a pipeline: runs cases and returns what it saw."""

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import processes
import torch
import torch.distributed as dist
from helpers import same_bits
from pipeline_programs import SPLIT, Block, Computing, Skipping, block_bytes, compare, loss, make, offloaded, train
from processes import LIMIT
from timed_device import Timed
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from actoffload.device import use
from actoffload.schedule import Do, Plan
from actoffload.tune import exchange

__all__ = ["BAD", "OTHER", "RECOMPUTED", "REFUSED", "run_ranks"]


class Nothing(nn.Module):
    """A stage that computes without any module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def fails(*arguments: dict[str, Any], empty: bool = False) -> dict[str, Any]:
    """Offload with the arguments of each rank; return the error of the first step, after which the next one runs."""
    rank = dist.get_rank()
    module = (lambda stage: Nothing()) if empty and rank else (lambda stage: nn.Sequential(Block(), Block(), Block()))
    schedule, modules = make("Schedule1F1B", 4, module=module)
    handle = offloaded(schedule, **arguments[rank])
    try:
        train(schedule, modules, 1)
    except ValueError as error:
        train(schedule, modules, 1)
        return {"message": str(error), "installed": handle.installed, "followed": type(modules[0]).__name__}
    return {"message": ""}


def refused(wrong: Callable[[Any], Any], rank: int, *, copies: bool = False) -> dict[str, Any]:
    """Call `offload` on one rank so that it raises; return what it says, after how long, and if a next call works.

    Either the other rank runs the next stage, or a copy of the same one.
    """
    schedule, modules = replica(Block) if copies else make("Schedule1F1B", 4)
    begun, message = time.monotonic(), ""
    try:
        if dist.get_rank() == rank:
            wrong(schedule)
        else:
            offloaded(schedule)
            train(schedule, modules, 1)
    except (ValueError, UserWarning) as error:
        message = str(error)
    seconds = time.monotonic() - begun
    handle = offloaded(schedule)
    x = torch.zeros(4 * 8, 16)
    for _ in range(2):
        if copies:
            schedule.step(x, target=x)
        else:
            train(schedule, modules, 1)
    again = handle.plan is not None
    handle.remove()
    return {"message": message, "seconds": seconds, "again": again}


def unknown(schedule: Any) -> None:
    """Offload a schedule that is not supported."""
    offloaded(pipelining.schedules._ScheduleForwardOnly(schedule._stage, 4))


def offloaded_on(rank: int, *, removed: bool = False) -> dict[str, Any]:
    """Run steps that are offloaded on one rank alone; return what it warns of, and whether it is offloaded then.

    The other one never had a handle, or has `removed` it.
    """
    schedule, modules = make("Schedule1F1B", 4)
    alone = dist.get_rank() == rank
    handle = offloaded(schedule) if alone or removed else None
    if handle is not None and not alone:
        handle.remove()
    with mock.patch.object(exchange, "LIMIT", 1.0), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(schedule, modules, 2)
    if handle is None:  # the next case meets again: both called `offload` equally often
        handle = offloaded(schedule)
        handle.remove()
    return {"message": " ".join(str(each.message) for each in found), "installed": handle.installed}


def removed() -> dict[str, Any]:
    """Remove the handle of one rank while the others still measure; return what they warn of, and their plan."""
    schedule, modules = make("Schedule1F1B", 4)
    handle = offloaded(schedule)
    train(schedule, modules, 1)
    if not dist.get_rank():
        handle.remove()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(schedule, modules, 2)
    held = handle.statistics().resident_bytes, handle.statistics().host_bytes_used
    handle.remove()
    return {"message": " ".join(str(each.message) for each in found), "settling": handle.settling, "held": held}


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
with_fraction = partial(offloaded, fraction=1.5)
REFUSED = {
    "a wrong number on the first rank": partial(refused, with_fraction, 0),
    "a wrong number on the second rank": partial(refused, with_fraction, 1),
    "an unknown schedule": partial(refused, unknown, 1),
    "a wrong number in a copy": partial(refused, with_fraction, 1, copies=True),
}
BAD = {
    "different arguments": partial(fails, {"fraction": None}, {"fraction": 0.5}),
    "different policies": partial(fails, *({"recompute": [product]} for product in PRODUCTS)),
    "a stage without layers": partial(fails, {}, {}, empty=True),
    "the first rank alone": partial(offloaded_on, 0),
    "the second rank alone": partial(offloaded_on, 1),
    "removed on the first rank before a step": partial(offloaded_on, 1, removed=True),
    "removed on the second rank before a step": partial(offloaded_on, 0, removed=True),
    "removed on one rank": removed,
}


def skipping(budget: int | None) -> dict[str, Any]:
    """Skip a block on the last rank in some steps; return whether the bits are the same, and what became of plans."""
    results, device = [], Timed(2**20, 2**20, memory=2**20)
    for offloads in (False, True):
        schedule, modules = make("ScheduleGPipe", 4, module=lambda stage: Skipping(*(Block() for _ in range(4))))
        with use(device) if offloads else nullcontext():
            handle = offloaded(schedule, memory_budget=budget) if offloads else None
        results.append([])
        for number in range(16):
            modules[0].skipped = {1} if dist.get_rank() and number in (1, 4, 11, 12) else ()
            results[-1] += train(schedule, modules, 1)
    found = {"same": len(results[0]) == len(results[1]), "settling": handle.settling, "plans": len(handle.plans)}
    found["same"] &= all(same_bits(a, b) for a, b in zip(*results, strict=True))
    handle.remove()
    return found


# Replicas: ranks that run the same stages


def replica(kind: type[Block]) -> tuple[Any, list[nn.Module]]:
    """Return a schedule of one stage, whose blocks are divided among two ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tensor", "pipeline"))
    torch.manual_seed(0)
    module = nn.Sequential(*(kind() for _ in range(4)))
    for block in module:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh.get_group("pipeline"))
    return Schedule1F1B(stage, 4, loss_fn=loss), [module]


def replicas() -> dict[str, Any]:
    """Divide the blocks of a pipeline among two ranks, of which one copies much slower; return what is recomputed."""
    results: list[list[torch.Tensor]] = []
    for offloads in (False, True):
        link = block_bytes() / (32 if dist.get_rank() else 0.5)
        Computing.device = Timed(link, link, memory=2**30)
        schedule, (module,) = replica(Computing)
        x = torch.randn(4 * 8, 16, generator=torch.Generator().manual_seed(1))
        if offloads:
            with use(Computing.device):
                handle = offloaded(schedule, memory_budget=round(1.6 * block_bytes()))
        results.append([])
        for _ in range(10):
            module.zero_grad()
            schedule.step(x, target=x)
            results[-1] += [weight.grad.to_local().clone() for weight in module.parameters()]
    same = all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert handle.plan is not None
    saves = [str(plan.saves) for plan in handle.plans]
    handle.remove()
    return {"same": same, "saves": saves}


def delta_bytes() -> dict[str, Any]:
    """Offload one block less of each microbatch on the second rank; return the bytes of each microbatch, by rank."""
    found = []
    for delta in (0, block_bytes()):
        schedule, modules = make("ScheduleGPipe")
        handle = offloaded(schedule, delta_bytes_per_rank=delta)
        train(schedule, modules, 2, after=lambda k, handle=handle: handle.reset_statistics() if not k else None)
        found.append([[_of_microbatch(plan, k) for k in range(4)] for plan in handle.plans])
        assert handle.statistics().bytes_offloaded == sum(found[-1][dist.get_rank()])
        handle.remove()
    return {"without": found[0], "with": found[1]}


def _of_microbatch(plan: Plan, microbatch: int) -> int:
    actions = (action for each in plan.steps.values() for action in each)
    return sum(plan.nbytes[layer] for do, layer, number in actions if do is Do.OFFLOAD and number == microbatch)


def recomputed(name: str) -> dict[str, Any]:
    """Run a pipeline whose groups take too long to copy for its budget; return what is recomputed on all ranks."""
    results, budget = [], round(1.6 * block_bytes())
    for offloads in (False, True):
        Computing.device = Timed(block_bytes() / 16, block_bytes() / 16, memory=2**30)
        schedule, modules = make(name, module=lambda stage: nn.Sequential(Computing(), Computing()))
        if offloads:
            with use(Computing.device):
                handle = offloaded(schedule, memory_budget=budget)
        results.append(train(schedule, modules, 10))
    same = all(same_bits(a, b) for a, b in zip(*results, strict=True))
    handle.reset_statistics()
    train(schedule, modules, 1)
    saves, on_demand = [bool(plan.saves) for plan in handle.plans], handle.statistics().reloaded_on_demand
    handle.remove()
    return {"same": same, "saves": saves, "on_demand": on_demand}


RECOMPUTED = {f"{name}, recomputed": partial(recomputed, name) for name in ("Schedule1F1B", SPLIT[1])}
SKIPPING = {"skipped blocks": partial(skipping, None), "skipped blocks, a budget": partial(skipping, 24 * 2**10)}
OTHER = {
    **SKIPPING,
    "replicas": replicas,
    "delta bytes": delta_bytes,
    **RECOMPUTED,
}
CASES = {**REFUSED, **BAD, **OTHER}


def run_cases(device: torch.device, names: list[str]) -> list[dict[str, Any]]:
    """Run cases as one of several ranks; return what it saw of each."""
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", message="No accelerator found")
    found = []
    for name in names:
        try:
            known = name in CASES
            found.append(
                CASES[name]() if known else compare(name, microbatches=4 * dist.get_world_size() // 2, steps=2)
            )
        except BaseException as error:
            error.add_note(f"In the case {name!r}.")
            raise
    return found


def run_ranks(world: int, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run cases in a process for each rank; return what each rank saw of each case."""
    ranks = processes.run_ranks(run_cases, names, world=world, device="cpu", limit=LIMIT)
    return dict(zip(names, map(list, zip(*ranks, strict=True)), strict=True))
