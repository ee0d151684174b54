"""What the ranks of a pair do that shares the experts of a mixture; each function is one rank's part."""

from __future__ import annotations

from typing import Any

import experts
import torch
import torch.distributed as dist
from helpers import same_bits
from timed_device import Timed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

import actoffload
from actoffload.device import use

__all__ = ["settled"]


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Two pipelines of one rank each, which share the experts


class Computing(experts.Block):
    """A block that takes a virtual second in forward, also where it is recomputed."""

    device = Timed()

    def forward(self, x: Tensor) -> Tensor:
        self.device.compute(1.0)
        return super().forward(x)


def settled(_: torch.device) -> dict[str, Any]:
    """Offload a mixture on a pair of which one rank copies much slower; return how many steps were measured."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "data"))
    experts.Block = Computing
    settings, results = experts.MixtureSettings(4, (1, 16, 16), "float32", 2, 24, 4), []
    for offloads in (False, True):
        nbytes = 16 * 16 * 4 * 30  # about those that a block saves
        link = nbytes / (32 if dist.get_rank() else 0.5)
        Computing.device = Timed(link, link, memory=2**30)
        torch.manual_seed(0)
        module = experts.MixtureStage(settings, mesh["data"])
        stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh.get_group("pipeline"))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, _: y.square().mean())
        x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
        if offloads:
            with use(Computing.device):
                handle = actoffload.offload(schedule, min_bytes=64, memory_budget=round(1.6 * nbytes))
        results.append([])
        steps = 0
        for _ in range(12):
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
