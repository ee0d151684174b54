"""`actoffload.offload` on a GPU: CUDA graphs of whole steps, and timelines of device events."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from gpu_harness import CUDA, WIDTH, collect, flash, lenient, loss, make_input, needs_cuda
from offload_harness import LAYERS, NBYTES, ROWS, Net, expected, make, offload, run_step, step
from test_gpu_graphs import WholeStep, clean, requested
from torch import Tensor, nn

from actoffload.planner import GroupPlan
from actoffload.schedule import Action, Do, Event, Kind, Plan, When

pytestmark = [pytest.mark.gpu, *lenient]


def called(model: Any, x: Tensor) -> Tensor:
    """Run a model inside of a graph on a copy of the static input; the copy can be offloaded."""
    output: Tensor = model(x)
    return output


# CUDA graphs


@needs_cuda
@pytest.mark.parametrize("kind", ["linear", "mlp", "attention"])
def test_a_whole_step_in_one_graph(kind: str) -> None:
    model = make(kind, 8)
    rows = 2048
    with flash():
        want = expected(model, range(6), rows)
        handle = offload(model)
        graph = WholeStep(model, called, rows)
        for seed in range(6):
            assert graph.replay(seed).differences(want[seed]) == []
        for seed in range(3):  # eager steps between replays
            assert step(model, seed, rows).differences(want[seed]) == []
            assert graph.replay(seed + 1).differences(want[seed + 1]) == []
    statistics = handle.statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0
    assert statistics.reloaded_on_demand == 0


@needs_cuda
def test_a_graph_captured_while_passes_are_measured() -> None:
    model = make("mlp", 8)
    want = expected(model, range(3), 2048)
    handle = offload(model, fraction=None)
    graph = WholeStep(model, called, 2048)
    for seed in range(12):
        assert graph.replay(seed % 3).differences(want[seed % 3]) == []
        assert step(model, seed % 3, 2048).differences(want[seed % 3]) == []
    assert handle.statistics().bytes_offloaded > 0


@needs_cuda
def test_a_graph_keeps_the_drop() -> None:
    plain = WholeStep(make("linear"), called, ROWS)
    model = make("linear")
    offload(model, num_layers=6)
    offloading = WholeStep(model, called, ROWS)
    # A capture allocates a few bytes of its own.
    assert abs(plain.peak - offloading.peak - 6 * NBYTES) <= 512


@needs_cuda
@pytest.mark.parametrize("wrapped", [True, False], ids=["a module around it", "the model itself"])
def test_graphed_callables_take_an_offloaded_model(wrapped: bool) -> None:

    class Holder(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x.clone())

    model = make("mlp", 8)
    want = expected(model, range(5), 2048)
    handle = offload(model)
    module = Holder(model) if wrapped else model
    graphed = torch.cuda.make_graphed_callables(module, (make_input(model, 0, 2048),))
    for seed in range(5):
        output = graphed(make_input(model, seed, 2048))
        loss(output).backward()
        assert collect(model, output).differences(want[seed]) == []
    assert handle.statistics().tensors_offloaded > 0


@needs_cuda
@pytest.mark.parametrize("apart", [True, False], ids=["forward and backward", "the whole step"])
def test_a_plan_that_releases_in_backward_is_captured(apart: bool) -> None:
    """As plans for a budget may: a copy must not be in flight where the capture of the forward ends."""
    model = make("mlp", 8)
    want = expected(model, range(4), 2048)
    names = tuple(f"blocks.{k}" for k in range(8))
    calls = [(Event(When.FORWARD_END, k), Action(Do.OFFLOAD, k)) for k in range(5)]
    calls += [(Event(When.BACKWARD_START, 7), Action(Do.RELEASE, k)) for k in range(5)]
    calls += [(Event(When.BACKWARD_START, k + 1), Action(Do.RELOAD, k)) for k in range(5)]
    plan = GroupPlan(names, Plan.of(8, calls), (NBYTES,) * 8)
    handle = offload(model, fraction=None, plan=plan)
    if not apart:
        graph = WholeStep(model, called, 2048)
        for seed in range(4):
            assert graph.replay(seed).differences(want[seed]) == []
        return
    graphed = torch.cuda.make_graphed_callables(model, (make_input(model, 0, 2048),))
    for seed in range(4):
        output = graphed(make_input(model, seed, 2048))
        loss(output).backward()
        assert collect(model, output).differences(want[seed]) == []
    assert handle.statistics().tensors_offloaded > 0


@needs_cuda
def test_removing_the_handle_frees_the_memory_of_a_graph() -> None:
    model = make("linear", 8)
    clean()
    before = requested("current")
    handle = offload(model)
    graph = WholeStep(model, called, 2048)
    graph.replay(0)
    assert handle.statistics().host_bytes > 0
    torch.cuda.synchronize()
    del graph
    handle.remove()
    assert handle.statistics().host_bytes == 0
    clean()
    assert requested("current") - before < 2048 * WIDTH * 4  # less than one saved tensor


# Timeline


def recorded(model: nn.Module, **options: Any) -> Any:
    """Record the third step of a model and return its handle."""
    handle = offload(model, **options)
    for seed in range(2):
        run_step(model, seed)
    if CUDA:
        torch.cuda.synchronize()
    handle.reset_statistics()
    with handle.recording():
        run_step(model, 2)
    return handle


@pytest.mark.parametrize("options", [{}, {"num_layers": 10}, {"num_layers": 6, "max_inflight": 1}])
def test_the_timeline_adds_up(options: dict[str, Any]) -> None:
    handle = recorded(make("mlp"), **options)
    timeline, statistics = handle.timeline().timeline, handle.statistics()
    assert timeline.source == ("measured" if CUDA else "reference device")
    assert timeline.nbytes(Kind.D2H) == statistics.bytes_offloaded > 0
    assert timeline.nbytes(Kind.H2D) == statistics.bytes_reloaded > 0
    assert timeline.peak_bytes == statistics.peak_resident_bytes
    end = timeline.end
    compute = timeline.of(Kind.FORWARD, Kind.BACKWARD)
    assert sorted((span.kind.value, span.layer) for span in compute) == sorted(
        (kind, k) for kind in ("forward", "backward") for k in range(LAYERS)
    )
    # Compute is one stream: its spans do not overlap, and together they make most of the step.
    ordered = sorted(compute, key=lambda span: span.start)
    assert all(a.end <= b.start + 1e-4 for a, b in pairwise(ordered))
    assert 0.5 * end <= sum(span.seconds for span in compute) <= end * 1.001
    for kind in (Kind.D2H, Kind.H2D):
        copies = sorted(timeline.of(kind), key=lambda span: span.start)
        assert all(a.end <= b.start + 1e-4 for a, b in pairwise(copies))
        assert all(0 <= span.start <= span.end <= end * 1.001 for span in copies)
    for stall in timeline.of(Kind.STALL):
        assert 0 <= stall.start <= stall.end <= end * 1.001


@needs_cuda
def test_the_recorded_step_time_agrees_with_events() -> None:
    """Compare with a pair of events around the step; the timeline excludes the search for holders."""
    model = make("mlp")
    handle = offload(model)
    for seed in range(3):
        run_step(model, seed)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with handle.recording():
        start.record()
        run_step(model, 3)
        end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) * 1e-3
    assert 0.5 * seconds <= handle.timeline().timeline.end <= 1.05 * seconds


@needs_cuda
def test_a_recorded_step_changes_no_bit_and_does_not_synchronize() -> None:
    model = make("attention", 8)
    with flash():
        want = expected(model, range(4))
        handle = offload(model)
        for seed in range(3):
            assert step(model, seed).differences(want[seed]) == []
        torch.cuda.synchronize()
        with handle.recording(nvtx=True):
            torch.cuda.set_sync_debug_mode("error")
            try:
                output = model(make_input(model, 3, ROWS))
                loss(output).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert collect(model, output).differences(want[3]) == []
    assert handle.timeline().timeline.nbytes(Kind.D2H) > 0
    assert Net.__name__ in repr(handle)
