"""Outputs and gradients are bit-identical to the run without offloading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_harness import (
    DEVICE,
    KINDS,
    collect,
    flash,
    forward,
    lenient,
    loss,
    make_input,
    make_layers,
    manual_forward,
    needs_cuda,
    no_offload,
    offload,
    step,
)

import actoffload

pytestmark = [pytest.mark.gpu, *lenient]


@pytest.mark.parametrize(("num_layers", "model_layers"), [(1, 3), (3, 12), (6, 12), (10, 12)])
@pytest.mark.parametrize("kind", KINDS)
def test_default_schedule(kind: str, num_layers: int, model_layers: int) -> None:
    layers = make_layers(kind, model_layers)
    pair = offload(num_layers, model_layers)
    with flash():
        for seed in range(3):
            expected = step(layers, seed, no_offload())
            assert step(layers, seed, pair).differences(expected) == []
    statistics = pair[0].statistics()
    assert statistics.tensors_offloaded >= 3 * num_layers
    assert statistics.bytes_reloaded == statistics.bytes_offloaded
    assert statistics.reloaded_on_demand == 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0


STREAMS = {
    "own streams": lambda: None,
    "torch.Stream": lambda: torch.Stream(DEVICE) if DEVICE.type == "cuda" else None,
    "torch.cuda.Stream": lambda: torch.cuda.Stream() if DEVICE.type == "cuda" else None,
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_manual_synchronization(kind: str, stream: str) -> None:
    layers = make_layers(kind, 8)
    trio = actoffload.get_cpu_offload_context(
        enabled=True, model_layers=8, manual_synchronization=True, offload_stream=STREAMS[stream]()
    )
    with flash():
        for seed in range(3):
            expected = step(layers, seed, no_offload())
            output = manual_forward(layers, make_input(layers, seed), trio, offloaded=4)
            loss(output).backward()
            assert collect(layers, output).differences(expected) == []
    statistics = trio[0].statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0
    assert statistics.reloaded_on_demand == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_several_passes_in_flight(kind: str, order: tuple[int, ...]) -> None:
    layers = make_layers(kind, 6)
    pair = offload(3, 6)

    def run(pair: Any) -> Any:
        outputs = [forward(layers, make_input(layers, seed), pair) for seed in range(3)]
        losses = [loss(output) for output in outputs]
        for k in order:
            losses[k].backward()
        return collect(layers, torch.stack(outputs))

    with flash():
        expected = run(no_offload())
        for _ in range(2):
            assert run(pair).differences(expected) == []
    assert pair[0].statistics().bytes_reloaded == pair[0].statistics().bytes_offloaded > 0


@needs_cuda
def test_pinned_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from actoffload.device import Accelerator

    def none_left(self: Accelerator, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    layers = make_layers("linear", 6)
    expected = step(layers, 0, no_offload())
    monkeypatch.setattr(Accelerator, "empty_host", none_left)
    pair = offload(3, 6)
    with pytest.warns(actoffload.HostMemoryWarning, match="no more page-locked memory"):
        assert step(layers, 0, pair).differences(expected) == []
    assert pair[0].statistics().tensors_offloaded == 0
