"""Memory: the peak follows the plan, steady steps neither synchronize nor allocate, and nothing leaks."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import pytest
import torch
from gpu_harness import (
    CUDA,
    collect,
    driver_calls,
    flash,
    forward,
    lenient,
    loss,
    make_input,
    make_layers,
    needs_cuda,
    no_offload,
    offload,
    patched,
    step,
)
from torch import nn

from actoffload.measure import MemoryMeter
from actoffload.schedule import DefaultSchedule, LayerCost, Link, Plan, Saved, simulate

pytestmark = [pytest.mark.gpu, *lenient]

LAYERS, ROWS, WIDTH = 12, 8192 if CUDA else 512, 512  # 16 MiB per saved tensor
NBYTES = ROWS * WIDTH * 4


def planned_peak(plan: Plan) -> int:
    """Return the peak of resident bytes that `simulate` predicts for a plan."""
    costs = [LayerCost(1.0, 2.0, (Saved(NBYTES, saved_at=0.0),))] * LAYERS
    return simulate(plan, costs, Link(d2h=float("inf"), h2d=float("inf"))).peak_bytes


def peak(layers: nn.ModuleList, pair: tuple[Any, Any], seed: int) -> int:
    """Return the peak of one step in requested bytes, that is, without the rounding of the allocator."""
    with MemoryMeter() as meter:
        loss(forward(layers, make_input(layers, seed, ROWS, WIDTH), pair)).backward()
    layers.zero_grad(set_to_none=False)
    if CUDA:
        return torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return meter.peak_bytes


@pytest.mark.parametrize("num_layers", [1, 3, 6, 10])
def test_peak_follows_the_plan(num_layers: int) -> None:
    layers = make_layers("linear", LAYERS, WIDTH)
    pair = offload(num_layers, LAYERS)
    for _ in range(2):
        for arm in (no_offload(), pair):
            peak(layers, arm, 0)
    pair[0].reset_statistics()
    without = {peak(layers, no_offload(), seed) for seed in range(5)}
    offloaded = {peak(layers, pair, seed) for seed in range(5)}
    assert len(without) == len(offloaded) == 1, "the peak differs between runs"
    plan = DefaultSchedule(num_layers, LAYERS).plan()
    drop = planned_peak(Plan(LAYERS)) - planned_peak(plan)
    assert drop == num_layers * NBYTES
    assert without.pop() - offloaded.pop() == drop
    statistics = pair[0].statistics()
    assert statistics.peak_resident_bytes == planned_peak(plan)
    assert statistics.bytes_offloaded == 5 * num_layers * NBYTES


@needs_cuda
def test_allocated_peak_drops_by_the_offloaded_bytes() -> None:
    """Like the test above, by the allocated bytes, which include the rounding of the allocator."""
    layers = make_layers("linear", LAYERS, WIDTH)
    peaks = []
    for pair in (no_offload(), offload(6, LAYERS)):
        for seed in range(3):
            peak(layers, pair, seed)
        peaks.append(torch.cuda.max_memory_allocated())
    assert abs((peaks[0] - peaks[1]) / (6 * NBYTES) - 1) < 0.005


@needs_cuda
@pytest.mark.parametrize("kind", ["linear", "attention"])
@pytest.mark.parametrize("num_layers", [3, 10])
def test_steady_steps_neither_synchronize_nor_allocate(kind: str, num_layers: int) -> None:
    layers = make_layers(kind, LAYERS)
    pair = offload(num_layers, LAYERS)

    def run_step(seed: int) -> None:
        loss(forward(layers, make_input(layers, seed), pair)).backward()

    def forbidden(*args: Any) -> None:
        raise AssertionError("a step synchronized")

    with flash():
        for seed in range(2):
            run_step(seed)
    torch.cuda.synchronize()
    before = driver_calls()
    quiet = patched(torch.cuda, "synchronize", forbidden), patched(torch.accelerator, "synchronize", forbidden)
    with quiet[0], quiet[1], flash():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for seed in range(2, 8):
                run_step(seed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert driver_calls() == before


WAITING = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
ALLOCATING = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMallocHost", "cudaHostRegister"}


@needs_cuda
def test_the_profiler_sees_no_runtime_call_that_waits_or_allocates() -> None:
    """Check the CUDA runtime calls of a steady step in a profile, independently of the test above."""
    from torch.profiler import ProfilerActivity, profile, record_function

    layers = make_layers("mlp", LAYERS)
    pair = offload(6, LAYERS)
    for seed in range(3):
        loss(forward(layers, make_input(layers, seed), pair)).backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("steady step"):
            loss(forward(layers, make_input(layers, 3), pair)).backward()
        torch.cuda.synchronize()
    events = profiler.events()
    host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    whole = next(event for event in host if event.name == "steady step").time_range
    calls = Counter(
        event.name
        for event in host
        if event.name.startswith("cuda") and whole.start <= event.time_range.start <= whole.end
    )
    if not calls["cudaMemcpyAsync"]:
        pytest.skip("the profiler recorded no runtime calls on this machine")
    # Each of the 6 offloaded layers saves at least 2 tensors; each tensor is copied in both directions.
    assert calls["cudaMemcpyAsync"] >= 6 * 2 * 2
    assert not {name for name in calls if name in WAITING | ALLOCATING}


class PlannedError(Exception):
    pass


WAYS = ("whole", "whole", "inside", "between", "backward", "dropped", "left early", "retained", "no grad")


def attempt(layers: nn.ModuleList, pair: tuple[Any, Any], way: str, at: int, seed: int) -> None:
    """Run a step that completes, raises, or is abandoned as `way` says, at layer `at`."""
    context, sync = pair
    x = make_input(layers, seed, rows=512)
    if way == "no grad":
        with torch.no_grad():
            forward(layers, x, pair)
        return

    def explode(gradient: torch.Tensor) -> None:
        raise PlannedError

    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
            if way == "inside" and k == at:
                raise PlannedError
        x = sync(x)
        if k == at:
            if way == "between":
                raise PlannedError
            if way == "left early":
                return
            if way == "backward":
                x.register_hook(explode)
    value = loss(x)
    del x
    if way == "retained":
        value.backward(retain_graph=True)
    if way != "dropped":
        value.backward()


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_thousand_steps_with_random_aborts(kind: str) -> None:
    layers = make_layers(kind, 6)
    pair = offload(3, 6)
    expected = step(layers, 0, no_offload())
    for seed in range(3):
        attempt(layers, pair, "whole", 0, seed)
    source = random.Random(4)
    seen: Counter[str] = Counter()
    gc.collect()
    baseline = torch.cuda.memory_allocated() if CUDA else 0
    gc.disable()  # memory must be freed without the collector
    try:
        for k in range(1000 if CUDA else 60):
            way, at = source.choice(WAYS), source.randrange(6)
            try:
                attempt(layers, pair, way, at, k)
            except PlannedError:
                seen[f"{way}: exception"] += 1
            else:
                seen[way] += 1
        statistics = pair[0].statistics()
        held = torch.cuda.memory_allocated() if CUDA else 0
    finally:
        gc.enable()
    for way in ("inside", "between", "backward"):
        assert seen[f"{way}: exception"]
        assert not seen[way]
    assert statistics.resident_bytes == 0
    assert statistics.host_bytes_used == 0
    assert held == baseline
    for parameter in layers.parameters():
        parameter.grad = None
    assert step(layers, 0, pair).differences(expected) == []
    pair[0].close()
    assert pair[0].statistics().host_bytes == 0


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
