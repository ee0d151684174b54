"""Two and four GPUs: gradients under FSDP2 and DDP are the same bits with offload, with tensors copied in chunks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_harness import CUDA, WORLDS, lenient
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import actoffload

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from processes import run_ranks  # noqa: E402 - lies in tests/support

pytestmark = [pytest.mark.gpu, *lenient]

LAYERS, WIDTH = 6, 1024 if CUDA else 64
ROWS = 16_400 if CUDA else 4096  # 64 MiB and a little in a tensor of a layer: two chunks or more in each direction
STEPS = 16  # those of the default first measure


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def made(way: str, device: torch.device) -> nn.Module:
    """Return a model with the same weights on every call."""
    torch.manual_seed(1)
    net = Net().to(device)
    if way == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def steps(model: nn.Module, device: torch.device, count: int) -> list[list[Tensor]]:
    """Return the gradients of some steps."""
    found = []
    for seed in range(count):
        generator = torch.Generator(device).manual_seed(2 * seed + dist.get_rank())
        model(torch.randn(ROWS, WIDTH, generator=generator, device=device)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        found.append([getattr(g, "_local_tensor", g).clone() for g in gradients])
        model.zero_grad()
    return found


def compared(device: torch.device, way: str) -> list[dict[str, Any]]:
    """Run steps without offload and with, as one rank; return how many gradients differ, and the bytes offloaded."""
    if device.type == "cuda":
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
    expected, rows = steps(made(way, device), device, STEPS), []
    for how in ({"num_layers": 3}, {"num_layers": LAYERS - 1}, {}):
        model = made(way, device)
        with actoffload.offload(model, **how) as handle:
            found = steps(model, device, STEPS)
            pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
            different = sum(not torch.equal(one, other) for one, other in pairs)
            statistics = handle.statistics()
            row = {"how": str(how), "different": different, "bytes_offloaded": statistics.bytes_offloaded}
            rows.append({**row, "bytes_reloaded": statistics.bytes_reloaded})
    return rows


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_gradients_are_the_same_bits(way: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the ranks inherit it
    for rank in run_ranks(compared, way, world=world, device="cuda" if CUDA else "cpu", limit=240):
        for row in rank:
            assert row["different"] == 0, row
            assert row["bytes_reloaded"] == row["bytes_offloaded"] > 0, row
