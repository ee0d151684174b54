"""CUDA graphs: forward and backward captured with the transfers inside."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from gpu_harness import (
    WIDTH,
    Result,
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
from torch import nn

import actoffload
from actoffload.report import Reason

pytestmark = [pytest.mark.gpu, needs_cuda, *lenient]

LAYERS, LEAVING, ROWS = 8, 4, 8192
NBYTES = ROWS * WIDTH * 4  # saved by a Linear layer: 16 MiB


class WholeStep:
    """Forward and backward in one graph.

    Parameters
    ----------
    run : callable
        From layers and an input, which may leave, to the output.
    warm_up : callable, optional
        Runs before the capture instead of `run`.
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
        # The graph writes its gradients here; eager steps get others.
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
        # The gradients are there before the capture, which then only writes them.  The input is a copy: the graph
        # reads the static one, so that can never leave the device.
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
    """Free what is cached, cuBLAS's workspaces too: the next measurement counts its own."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def eager(layers: nn.ModuleList, seeds: range, rows: int) -> list[Result]:
    """Return what each seed gives without offloading and without a graph."""
    return [step(layers, seed, no_offload(), rows) for seed in seeds]


def with_pair(pair: tuple[Any, Any]) -> Any:
    return lambda layers, x: forward(layers, x, pair)


@pytest.mark.parametrize("kind", ["linear", "mlp", "attention"])
def test_whole_step(kind: str) -> None:
    layers = make_layers(kind, LAYERS)
    rows = 2048
    with flash():
        expected = eager(layers, range(10), rows)
        pair = offload(LEAVING, LAYERS)
        graph = WholeStep(layers, with_pair(pair), rows)
        for seed in range(10):
            assert graph.replay(seed).differences(expected[seed]) == []
        for seed in range(3):  # the context serves eager steps beside the graph
            assert step(layers, seed, pair, rows).differences(expected[seed]) == []
            assert graph.replay(seed + 1).differences(expected[seed + 1]) == []
    statistics = pair[0].statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0
    assert statistics.reloaded_on_demand == 0
    pair[0].close()


def test_eager_steps_beside_a_replay_do_not_touch_its_host_memory() -> None:
    layers = make_layers("linear", LAYERS)
    expected = eager(layers, range(7), 2048)
    pair = offload(LEAVING, LAYERS)
    graph = WholeStep(layers, with_pair(pair), 2048)
    side = torch.cuda.Stream()
    for seed in range(6):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.launch(seed)
        beside = step(layers, seed + 1, pair, 2048)
        torch.cuda.synchronize()
        assert graph.result().differences(expected[seed]) == []
        assert beside.differences(expected[seed + 1]) == []


def test_whole_step_keeps_the_drop() -> None:
    layers = make_layers("linear", LAYERS)
    plain = WholeStep(layers, with_pair(no_offload()), ROWS)
    pair = offload(LEAVING, LAYERS)
    offloading = WholeStep(layers, with_pair(pair), ROWS)
    # The allocator counts a few bytes of its own for a capture.
    assert abs(plain.peak - offloading.peak - LEAVING * NBYTES) <= 512
    # What the graph's own pool takes from the driver shrinks as well.
    assert plain.reserved - offloading.reserved >= 0.9 * LEAVING * NBYTES


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


def test_capture_without_a_warm_pool() -> None:
    layers = make_layers("linear", LAYERS)
    expected = eager(layers, range(3), 2048)
    pair = offload(LEAVING, LAYERS)
    with pytest.warns(actoffload.HostMemoryWarning, match="captured"):
        graph = WholeStep(layers, with_pair(pair), 2048, warm_up=with_pair(no_offload()))
    for seed in range(3):
        assert graph.replay(seed).differences(expected[seed]) == []
    statistics = pair[0].statistics()
    assert statistics.tensors_offloaded == 0
    assert statistics.tensors_kept[Reason.HOST_FULL] == LEAVING
    assert step(layers, 1, pair, 2048).differences(expected[1]) == []
    assert pair[0].statistics().tensors_offloaded == LEAVING


class Model(nn.Module):
    """Layers with the context inside, as a module that can be made a graphed callable."""

    def __init__(self, layers: nn.ModuleList, pair: tuple[Any, Any]) -> None:
        super().__init__()
        self.layers, self.pair = layers, pair

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():  # the warm-up is over: what counts is what the graphs need
            torch.cuda.reset_peak_memory_stats()
        # The sample input is an address in the graph; a tensor of the graph's own may leave.
        return forward(self.layers, x.clone(), self.pair)


def requested(what: str) -> int:
    """Return the bytes that programs asked the allocator for: ``"current"`` or ``"peak"``."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def graphed(layers: nn.ModuleList, pair: tuple[Any, Any], rows: int) -> tuple[Any, int]:
    """Return the graphed model, and the peak of memory during its captures of forward and backward."""
    clean()
    before = requested("current")
    model = torch.cuda.make_graphed_callables(Model(layers, pair), (make_input(layers, 0, rows),))
    return model, requested("peak") - before


@pytest.mark.parametrize("kind", ["linear", "mlp", "attention"])
def test_graphed_callables(kind: str) -> None:
    layers = make_layers(kind, LAYERS)
    with flash():
        expected = eager(layers, range(10), 2048)
        pair = offload(LEAVING, LAYERS)
        model, _ = graphed(layers, pair, 2048)
        for seed in range(10):
            output = model(make_input(layers, seed, 2048))
            loss(output).backward()
            assert collect(layers, output).differences(expected[seed]) == []
    assert pair[0].statistics().tensors_offloaded > 0
    assert pair[0].statistics().reloaded_on_demand == 0


def test_graphed_callables_keep_the_drop() -> None:
    layers = make_layers("linear", LAYERS)
    expected = eager(layers, range(1), ROWS)[0]
    # The first one is not counted: during its captures, what earlier programs left behind may be freed.
    pairs = (no_offload(), no_offload(), offload(LEAVING, LAYERS))
    models = [graphed(layers, pair, ROWS) for pair in pairs][1:]
    (_, plain), (_, offloading) = models
    # Backward returns weight gradients in new memory, and its first gradient comes from outside the graph. So without
    # offload the peak is at its very start; with it, the peak is as high until the last layer has come back, when one
    # more gradient of an activation's size and those of the weights of up to LEAVING layers are there.
    weights = sum(p.nbytes for p in layers[0].parameters())
    assert LEAVING * NBYTES - NBYTES - LEAVING * weights <= plain - offloading <= LEAVING * NBYTES
    for model, _ in models:
        output = model(make_input(layers, 0, ROWS))
        loss(output).backward()
        assert collect(layers, output).differences(expected) == []


def test_several_graphs_share_a_context() -> None:
    """Two input shapes, two graphs, replayed in turns: each keeps host memory of its own."""
    layers = make_layers("linear", LAYERS)
    rows = (1024, 2048)
    expected = {n: eager(layers, range(4), n) for n in rows}
    pair = offload(LEAVING, LAYERS)
    graphs = {n: WholeStep(layers, with_pair(pair), n) for n in rows}
    for seed in range(4):
        for n in rows:
            assert graphs[n].replay(seed).differences(expected[n][seed]) == []
    assert pair[0].statistics().host_bytes >= LEAVING * sum(rows) * WIDTH * 4
