"""What the ranks of a pair do that shares the experts of a mixture; each function is one rank's part."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_forked
from helpers import same_bits
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "model")]

import mixtures  # noqa: E402 - lies in benchmarks, as the next one
import processes  # noqa: E402
from timed_device import Timed  # noqa: E402 - lies beside the tests of models

import actoffload  # noqa: E402
from actoffload.device import use  # noqa: E402

__all__ = ["forked", "settled", "spread"]

LIMIT = 120.0


def forked(folder: Path, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Do what `run_ranks` does with forked processes, which take less time to start."""
    run_forked(_rank, world, folder, function, arguments, world, str(folder), limit=LIMIT)
    errors = [error.read_text() for error in folder.glob("*.error")]
    ended = [rank for rank in range(world) if (folder / f"{rank}.json").is_file()]
    assert len(ended) == world, f"Of {world} ranks ended within {LIMIT:.0f} s: {ended}. {errors}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _rank(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], world: int, folder: str) -> None:
    warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
    processes._rank(function, arguments, rank, world, "cpu", LIMIT, folder)


# Gradients of a stage whose experts are spread over the pair


def spread(device: torch.device, dtype: str) -> dict[str, Any]:
    """Compare a stage of the pair with one that has all experts and the data of both ranks, by dispatcher."""
    settings, rank = mixtures.MixtureSettings(2, (1, 32, 16), dtype, 2, 24, 4), dist.get_rank()
    torch.set_default_dtype(getattr(torch, dtype))
    torch.manual_seed(0)
    whole, part = settings.stage(), settings.stage(init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        for name, weight in part.named_parameters():
            local(weight).copy_(share(whole.get_parameter(name), weight))
    x = torch.randn(2, 32, 16)
    found: dict[str, Any] = {"distances": {}}
    results = []
    for waits in (True, False):
        mixtures.set_waits([whole, part], waits=waits)
        expected = trained(whole, x.clone().requires_grad_())
        mine = trained(part, x[rank : rank + 1].clone().requires_grad_())
        for weight in part.replicated():
            dist.all_reduce(weight.grad)
        names = ["output", "input", *(name for name, _ in part.named_parameters())]
        wanted = [of[rank : rank + 1] for of in expected[:2]]
        wanted += [share(of, weight) for of, weight in zip(expected[2:], part.parameters(), strict=True)]
        for name, of, want in zip(names, map(local, mine), wanted, strict=True):
            found["distances"][f"{name}, {waits}"] = float((of - want).abs().max() / want.abs().max())
        results.append([local(of).clone() for of in mine])
    return {**found, "same": all(map(torch.equal, *results))}


def trained(stage: Any, x: Tensor) -> list[Tensor]:
    """Return the output of a stage, the gradient of its input, and those of its weights."""
    stage.zero_grad()
    y = stage(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(weight.grad for weight in stage.parameters())]


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share(of_whole: Tensor, weight: Tensor) -> Tensor:
    """Return the part of a tensor of all experts that belongs to a weight of this rank."""
    return of_whole.chunk(2)[dist.get_rank()] if isinstance(weight, DTensor) else of_whole


# Two pipelines of one rank each, which share the experts


class Computing(mixtures.Block):
    """A block that takes a virtual second in forward, also where it is recomputed."""

    device = Timed()

    def forward(self, x: Tensor) -> Tensor:
        self.device.compute(1.0)
        return super().forward(x)


def settled(_: torch.device) -> dict[str, Any]:
    """Offload a mixture on a pair of which one rank copies much slower; return how many steps were measured."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "data"))
    mixtures.Block = Computing
    settings, results = mixtures.MixtureSettings(4, (1, 16, 16), "float32", 2, 24, 4, min_bytes=64), []
    for offloads in (False, True):
        nbytes = 16 * 16 * 4 * 30  # about those that a block saves
        link = nbytes / (32 if dist.get_rank() else 0.5)
        Computing.device = Timed(link, link, memory=2**30)
        torch.manual_seed(0)
        module = settings.stage(mesh["data"])
        stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh.get_group("pipeline"))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, _: y.square().mean())
        x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
        if offloads:
            with use(Computing.device):
                handle = actoffload.offload(schedule, min_bytes=64, memory_budget=round(1.6 * nbytes))
        results.append([])
        steps = 0
        for _ in range(20):
            module.zero_grad()
            schedule.step(x, target=x)
            results[-1] += [local(weight.grad).clone() for weight in module.parameters()]
            steps += offloads and handle.settling
    same = all(same_bits(a, b) for a, b in zip(*results, strict=True))
    plan = handle.plan
    found = {"same": same, "steps": steps, "settling": handle.settling}
    found |= {"saves": str(plan and plan.saves), "recomputed": bool(plan and plan.saves)}
    handle.remove()
    return found
