"""Several compute streams, several threads, several devices."""

from __future__ import annotations

import pytest
import torch
from gpu_harness import (
    collect,
    forward,
    lenient,
    loss,
    make_input,
    make_layers,
    needs_cuda,
    no_offload,
    offload,
)
from torch import nn

pytestmark = [pytest.mark.gpu, *lenient]


@needs_cuda
@pytest.mark.multi_gpu
@pytest.mark.parametrize("split", [2, 4])
def test_layers_on_two_devices(split: int) -> None:
    class There(nn.Module):
        def __init__(self, layer: nn.Module, device: torch.device) -> None:
            super().__init__()
            self.layer, self.device = layer.to(device), device

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.to(self.device))

    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    layers = nn.ModuleList(
        [There(layer, first if k < split else second) for k, layer in enumerate(make_layers("mlp", 6))]
    )
    pair = offload(4, 6)
    for seed in range(3):
        results = []
        for chosen in (no_offload(), pair):
            output = forward(layers, make_input(layers, seed, device=first), chosen)
            loss(output).backward()
            results.append(collect(layers, output))
        assert results[1].differences(results[0]) == []
    statistics = pair[0].statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0
