"""`actoffload.offload` on a GPU: equal bits, a peak that follows the plan, and no synchronization."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_harness import CUDA, DEVICE, WIDTH, flash, lenient, needs_cuda, occupy, steady
from offload_harness import LAYERS, NBYTES, expected, make, offload, peak, run_step, step
from torch import Tensor, nn

from actoffload.measure import MemoryMeter
from actoffload.schedule import LayerCost, Link, Plan, Saved, simulate

pytestmark = [pytest.mark.gpu, *lenient]

OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "five blocks": {"num_layers": 5},
    "one at a time": {"num_layers": 6, "max_inflight": 1},
    "parts of blocks": {"layers": ["*.mlp", "*.qkv", "*.out"]},
    "blocks and parts": {"layers": ["blocks.*", "*.mlp"], "keep": ["*.norm2"]},
}


@pytest.mark.parametrize("how", OPTIONS)
def test_a_transformer_with_flash_attention_bit_by_bit(how: str) -> None:
    model = make("attention", 8)
    with flash():
        want = expected(model, range(5))
        handle = offload(model, **OPTIONS[how])
        for seed in range(5):
            assert step(model, seed).differences(want[seed]) == []
    statistics = handle.statistics()
    assert statistics.tensors_offloaded > 0
    assert statistics.reloaded_on_demand == 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0
    handle.remove()
    with flash():
        assert step(model, 0).differences(want[0]) == []


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_other_blocks_bit_by_bit_with_shapes_that_change(kind: str) -> None:
    model = make(kind, 8)
    rows = [512, 1024, 2048, 1024] if CUDA else [512, 600, 512, 700]
    want = [step(model, seed, n) for seed, n in enumerate(rows)]
    handle = offload(model)
    for seed, n in enumerate(rows):
        assert step(model, seed, n).differences(want[seed]) == []
    statistics = handle.statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0
    assert statistics.reloaded_on_demand == 0


@pytest.mark.parametrize("kind", ["linear", "mlp", "attention"])
def test_the_first_steps_that_are_measured_and_those_after_bit_by_bit(kind: str) -> None:
    model = make(kind, 8)
    with flash() if kind == "attention" else nullcontext():
        want = expected(model, range(4))
        handle = offload(model, fraction=None)
        for seed in range(16):
            assert step(model, seed % 4).differences(want[seed % 4]) == []
    statistics = handle.statistics()
    assert statistics.tensors_offloaded > 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0
    assert handle.plan.because or handle.plan.offloaded


@needs_cuda
def test_a_model_that_does_not_fit_trains_from_the_first_step_on() -> None:
    model, rows = make("mlp", 12), 65536
    want = step(model, 0, rows)
    torch.cuda.reset_peak_memory_stats()
    step(model, 0, rows)
    limit = 0.6 * torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            run_step(model, 0, rows)
        model.zero_grad()
        handle = offload(model, fraction=None)
        for number in range(8):
            assert handle.settling or number > 3
            assert step(model, 0, rows).differences(want) == []
        assert not handle.settling
        assert handle.plan.peak_bytes <= limit
        handle.remove()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def settled_peak(model: nn.Module) -> int:
    """Return the peak of a step after two warm-up steps; require the same peak for three seeds."""
    for seed in range(2):
        peak(model, seed)
    peaks = {peak(model, seed) for seed in range(3)}
    assert len(peaks) == 1, "the peak differs between runs"
    return peaks.pop()


# Memory


@needs_cuda
def test_the_peak_of_a_pass_is_seen_though_measuring_resets_it() -> None:
    model = make("linear")
    settled_peak(model)

    def allocated() -> int:
        with MemoryMeter() as meter:
            run_step(model, 0)
        return meter.peak_bytes

    gc.collect()
    handle = offload(model, fraction=None)
    passes = [allocated() for _ in range(4)]
    handle.remove()
    without = allocated()
    assert passes[2] == passes[3] == without  # of which the first reads memory
    assert passes[1] < without


def planned_peak(plan: Plan) -> int:
    """Return the peak of resident bytes that `simulate` predicts for a plan."""
    costs = [LayerCost(1.0, 2.0, (Saved(NBYTES, saved_at=0.0),))] * LAYERS
    return simulate(plan, costs, Link(d2h=float("inf"), h2d=float("inf"))).peak_bytes


@pytest.mark.parametrize("num_layers", [1, 3, 6, 10])
def test_the_peak_drops_by_the_offloaded_bytes(num_layers: int) -> None:
    """All bytes that the plan has offloaded at the peak are gone: R is 100 %."""
    model = make("linear")
    without = settled_peak(model)
    handle = offload(model, num_layers=num_layers)
    with_offload = settled_peak(model)
    assert without - with_offload == num_layers * NBYTES
    report = handle.report()
    assert (report.expected_bytes, report.dropped_bytes) == (num_layers * NBYTES, num_layers * NBYTES)
    handle.reset_statistics()
    peak(model)
    statistics = handle.statistics()
    assert statistics.bytes_offloaded == num_layers * NBYTES
    # The stem saves its input, which is kept and not part of the plan.
    assert statistics.peak_resident_bytes == planned_peak(handle.plan.plan) + NBYTES


@needs_cuda
@pytest.mark.parametrize("how", OPTIONS)
def test_r_of_a_transformer(how: str) -> None:
    """The measured peak drops by at least 99.5 % of the bytes that the report expects."""
    model = make("attention", 8)
    with flash():
        without = settled_peak(model)
        handle = offload(model, **OPTIONS[how])
        with_offload = settled_peak(model)
    report = handle.report()
    assert report.r == 1.0
    assert report.expected_bytes > 0
    # The first backward adds its workspace to the peak, the same with and without offloading.
    assert (without - with_offload) / report.expected_bytes >= 0.995


# Synchronization and allocation


@needs_cuda
@pytest.mark.parametrize("how", OPTIONS)
def test_steps_from_the_third_on_neither_synchronize_nor_allocate(how: str) -> None:
    model = make("attention", 8)
    handle = offload(model, **OPTIONS[how])
    with flash():
        for seed in range(2):
            run_step(model, seed)
        with steady():
            for seed in range(2, 8):
                run_step(model, seed)
                print(handle, handle.report())


WAITING = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
ALLOCATING = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMallocHost", "cudaHostRegister"}


@needs_cuda
def test_the_profiler_sees_no_runtime_call_that_waits_or_allocates() -> None:
    """Check the CUDA runtime calls of a steady step in a profile, independently of the test above."""
    from torch.profiler import ProfilerActivity, profile, record_function

    model = make("mlp")
    offload(model, num_layers=6)
    for seed in range(3):
        run_step(model, seed)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("steady step"):
            run_step(model, 3)
        torch.cuda.synchronize()
    host = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    whole = next(event for event in host if event.name == "steady step").time_range
    calls = Counter(
        event.name
        for event in host
        if event.name.startswith("cuda") and whole.start <= event.time_range.start <= whole.end
    )
    if not calls["cudaMemcpyAsync"]:
        pytest.skip("the profiler recorded no runtime calls on this machine")
    assert calls["cudaMemcpyAsync"] >= 6 * 2 * 2
    assert not {name for name in calls if name in WAITING | ALLOCATING}


# Streams


class TwoStreams(nn.Module):
    """A layer that computes, and saves tensors, partly on a side stream."""

    def __init__(self, width: int, side: Any, delay: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.side, self.delay = side, delay

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        if self.side is None:
            return x + self.two(F.gelu(hidden)) + hidden.sin()
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            occupy(self.delay)
            branch = self.two(F.gelu(hidden))
        hidden.record_stream(self.side)
        direct = hidden.sin()
        main.wait_stream(self.side)
        branch.record_stream(main)
        return x + branch + direct


@needs_cuda
def test_steps_on_two_streams_in_turns() -> None:
    model = make("mlp", 6)
    want = expected(model, range(4))
    torch.cuda.synchronize()
    handle = offload(model, num_layers=3)
    side = torch.cuda.Stream()
    for seed in range(4):
        with torch.cuda.stream(side if seed % 2 else torch.cuda.default_stream()):
            result = step(model, seed)
        torch.cuda.synchronize()
        assert result.differences(want[seed]) == []
    assert handle.statistics().resident_bytes == 0


@needs_cuda
@pytest.mark.parametrize("delay", [0, 2_000_000])
def test_blocks_that_use_a_stream_of_their_own(delay: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*[TwoStreams(WIDTH, None, 0) for _ in range(6)]).to(DEVICE)
    want = expected(model, range(4))
    for block in model:
        block.side, block.delay = torch.cuda.Stream(), delay
    handle = offload(model)
    for seed in range(4):
        assert step(model, seed).differences(want[seed]) == []
    assert handle.statistics().tensors_offloaded > 0
    assert handle.statistics().resident_bytes == 0
