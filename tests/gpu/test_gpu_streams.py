"""Several compute streams, several threads, several devices."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_harness import (
    DEVICE,
    collect,
    forward,
    lenient,
    loss,
    make_input,
    make_layers,
    needs_cuda,
    no_offload,
    offload,
    step,
)
from torch import nn

pytestmark = [pytest.mark.gpu, *lenient]


def test_two_threads_share_a_context() -> None:
    """Each thread has its own model, passes and stream; they share engine, host pool and copy streams."""
    models = [make_layers("mlp", 6) for _ in range(2)]
    expected = [[step(model, seed, no_offload()) for seed in range(10)] for model in models]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    pair = offload(3, 6)
    found: list[list[list[str]]] = [[], []]
    errors: list[BaseException] = []
    start = threading.Barrier(2, timeout=60)

    def work(k: int) -> None:
        try:
            start.wait()
            for seed in range(10):
                if DEVICE.type == "cuda":
                    with torch.cuda.stream(streams[k]):
                        result = step(models[k], seed, pair)
                        streams[k].synchronize()
                else:
                    result = step(models[k], seed, pair)
                found[k].append(result.differences(expected[k][seed]))
        except BaseException as error:  # raised in the main thread
            errors.append(error)

    streams = [torch.cuda.Stream() for _ in range(2)] if DEVICE.type == "cuda" else []
    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread did not finish within 120 s"
    assert not errors, errors[0]
    assert found == [[[]] * 10] * 2
    statistics = pair[0].statistics()
    assert statistics.resident_bytes == statistics.host_bytes_used == 0
    assert statistics.passes == 20
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0


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
