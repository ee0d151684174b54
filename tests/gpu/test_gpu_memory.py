"""Memory: the peak follows the plan, steady steps neither synchronize nor allocate, and nothing leaks."""

from __future__ import annotations

import pytest
import torch
from gpu_harness import (
    CUDA,
    collect,
    forward,
    lenient,
    loss,
    make_input,
    make_layers,
    needs_cuda,
    offload,
)

pytestmark = [pytest.mark.gpu, *lenient]

LAYERS, ROWS, WIDTH = 12, 8192 if CUDA else 512, 512  # 16 MiB per saved tensor


@pytest.mark.parametrize(
    ("kind", "rows", "width"),
    [("linear", ROWS, WIDTH), ("linear", 10007, 1031), ("mlp", 6001, 520), ("attention", 4096, 1024)],
)
def test_host_memory_held_is_what_is_offloaded(kind: str, rows: int, width: int) -> None:
    layers = make_layers(kind, 6, width)
    pair = offload(4, 6)
    rows = rows if CUDA else max(512, rows // 4)
    for seed in range(3):
        pair[0].reset_statistics()
        output = forward(layers, make_input(layers, seed, rows, width), pair)
        loss(output).backward()
        collect(layers, output)
    statistics = pair[0].statistics()
    assert 1.0 <= statistics.host_bytes / statistics.bytes_offloaded <= 1.05


@needs_cuda
def test_closing_returns_host_memory_to_the_system() -> None:
    layers, pair = make_layers("linear", 6, WIDTH), offload(4, 6)
    loss(forward(layers, make_input(layers, 0, ROWS, WIDTH), pair)).backward()
    torch.cuda.synchronize()
    held = pair[0].statistics().host_bytes
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    pair[0].close()
    assert held > 0
    assert before - torch.cuda.host_memory_stats()["allocated_bytes.current"] >= held
