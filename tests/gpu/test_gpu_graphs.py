"""CUDA graphs: forward and backward are captured together with the copies."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from gpu_harness import (
    WIDTH,
    Result,
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
from torch import nn

import actoffload
from actoffload.measure import MemoryMeter
from actoffload.report import Reason

pytestmark = [pytest.mark.gpu, needs_cuda, *lenient]

LAYERS, OFFLOADED, ROWS = 8, 4, 8192


class WholeStep:
    """Forward and backward in one graph.

    Parameters
    ----------
    run : callable
        Takes the layers and an input, which may be offloaded; returns the output.
    rows : int
        Rows of the static input.
    warm_up : callable, optional
        Runs before the capture, in place of `run`.
    """

    def __init__(self, layers: nn.ModuleList, run: Any, rows: int, *, warm_up: Any = None) -> None:
        self.layers = layers
        self.static = make_input(layers, 0, rows)
        self._warm_up(run if warm_up is None else warm_up)
        clean()
        reserved, before = torch.cuda.memory_reserved(), torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step(run)
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        self.peak = peak - before["requested_bytes.all.current"]
        self.reserved = torch.cuda.memory_reserved() - reserved
        # The graph writes these gradients; eager steps allocate others.
        self.grads = [parameter.grad for parameter in layers.parameters()]
        layers.zero_grad(set_to_none=True)

    def _warm_up(self, run: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(run)
        torch.cuda.current_stream().wait_stream(side)
        self.output = None

    def _step(self, run: Any) -> None:
        # The gradients are allocated before the capture, so that the graph only writes them.  The input is a copy:
        # the graph reads the static one at a fixed address, so the static one cannot be offloaded.
        self.layers.zero_grad(set_to_none=False)
        output = run(self.layers, self.static.clone())
        loss(output).backward()
        self.output = output.detach()

    def launch(self, seed: int) -> None:
        self.static.copy_(make_input(self.layers, seed, self.static.shape[0]))
        self.graph.replay()

    def result(self) -> Result:
        return Result(self.output.clone(), [gradient.clone() for gradient in self.grads])

    def replay(self, seed: int) -> Result:
        self.launch(seed)
        return self.result()


def clean() -> None:
    """Free cached memory and the cuBLAS workspaces, so that the next measurement counts only its own."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def eager(layers: nn.ModuleList, seeds: range, rows: int) -> list[Result]:
    """Return the result of each seed without offloading and without a graph."""
    return [step(layers, seed, no_offload(), rows) for seed in seeds]


def with_pair(pair: tuple[Any, Any]) -> Any:
    return lambda layers, x: forward(layers, x, pair)


def test_eager_steps_during_a_replay_do_not_touch_its_host_memory() -> None:
    layers = make_layers("linear", LAYERS)
    expected = eager(layers, range(7), 2048)
    pair = offload(OFFLOADED, LAYERS)
    graph = WholeStep(layers, with_pair(pair), 2048)
    side = torch.cuda.Stream()
    for seed in range(6):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.launch(seed)
        result = step(layers, seed + 1, pair, 2048)
        torch.cuda.synchronize()
        assert graph.result().differences(expected[seed]) == []
        assert result.differences(expected[seed + 1]) == []
    statistics = pair[0].statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0


def test_manual_synchronization_in_a_graph() -> None:
    layers = make_layers("mlp", LAYERS)
    expected = eager(layers, range(10), 2048)
    for stream in (None, torch.cuda.Stream()):
        trio = actoffload.get_cpu_offload_context(
            enabled=True, model_layers=LAYERS, manual_synchronization=True, offload_stream=stream
        )
        graph = WholeStep(layers, lambda layers, x, trio=trio: manual_forward(layers, x, trio, 4), 2048)
        for seed in range(10):
            assert graph.replay(seed).differences(expected[seed]) == []
        statistics = trio[0].statistics()
        assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0


def test_capture_without_a_warm_pool() -> None:
    layers = make_layers("linear", LAYERS)
    expected = eager(layers, range(3), 2048)
    pair = offload(OFFLOADED, LAYERS)
    with pytest.warns(actoffload.HostMemoryWarning, match="captured"):
        graph = WholeStep(layers, with_pair(pair), 2048, warm_up=with_pair(no_offload()))
    for seed in range(3):
        assert graph.replay(seed).differences(expected[seed]) == []
    statistics = pair[0].statistics()
    assert statistics.tensors_offloaded == 0
    assert statistics.tensors_kept[Reason.HOST_FULL] == OFFLOADED
    assert step(layers, 1, pair, 2048).differences(expected[1]) == []
    assert pair[0].statistics().tensors_offloaded == OFFLOADED


def requested(what: str) -> int:
    """Return the bytes requested from the allocator, ``"current"`` or ``"peak"``."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def test_several_graphs_share_a_context() -> None:
    """Two graphs with two input shapes are replayed in turns: each keeps its own host memory."""
    layers = make_layers("linear", LAYERS)
    rows = (1024, 2048)
    expected = {n: eager(layers, range(4), n) for n in rows}
    pair = offload(OFFLOADED, LAYERS)
    graphs = {n: WholeStep(layers, with_pair(pair), n) for n in rows}
    for seed in range(4):
        for n in rows:
            assert graphs[n].replay(seed).differences(expected[n][seed]) == []
    assert pair[0].statistics().host_bytes >= OFFLOADED * sum(rows) * WIDTH * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_no_time_is_sampled_in_a_capture() -> None:
    meter, x = MemoryMeter(), torch.ones(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1  # an empty capture warns
        with pytest.raises(RuntimeError, match="trace_memory"):
            meter.sample()
