"""Helpers of the tests of routing and experts: forbid synchronization, capture a graph, compare bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_harness import CUDA, DEVICE
from torch import Tensor


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Make every operation that synchronizes raise an error."""
    if not CUDA:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    return a.shape == b.shape and torch.equal(a, b)


def captured(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Any]:
    """Capture `run` in a CUDA graph after a warm-up on a side stream; return its results and the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph
