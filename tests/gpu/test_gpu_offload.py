"""`actoffload.offload` on a GPU: equal bits, a peak that follows the plan, streams, and no synchronization."""

import gc
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_harness import (
    BLOCKS,
    DEVICE,
    NBYTES,
    ROWS,
    WIDTH,
    flash,
    gpu,
    make,
    occupy,
    offload,
    peak,
    run_step,
    steady,
    step,
)
from helpers import no_synchronization
from torch import Tensor, nn
from whole_model import equal

from actoffload.measure import MemoryMeter
from actoffload.schedule import Kind, LayerCost, Link, Saved, simulate

pytestmark = gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "five blocks": {"num_layers": 5},
    "one at a time": {"num_layers": 6, "max_inflight": 1},
    "parts of blocks": {"layers": ["*.mlp", "*.qkv", "*.out"]},
    "blocks and parts": {"layers": ["blocks.*", "*.mlp"], "keep": ["*.norm2"]},
}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
RECOMPUTED: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": True, "num_layers": 6},
    "recomputed but attention": {"recompute": [ATTENTION], "num_layers": 6},
    "recomputed but products": {"recompute": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]},
    "recomputed and kept": {"recompute": True, "fraction": 0.0},
}
MEASURED = {"measured": {"fraction": None}}
ALL = {**OPTIONS, **RECOMPUTED, **MEASURED}


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("attention", how) for how in ALL), *((k, how) for k in ("linear", "mlp") for how in ("blocks", "measured"))],
)
def test_bit_by_bit(kind: str, how: str) -> None:
    """Also with shapes that change, and in the first steps that are measured and those after."""
    model, steps = make(kind), 4 if how not in MEASURED else 16
    rows = [512, 1024, 2048, 1024] if how not in MEASURED else [ROWS] * 4
    with flash() if kind == "attention" else nullcontext():
        want = [step(model, seed, rows[seed]) for seed in range(4)]
        handle = offload(model, **ALL[how])
        for k in range(steps):
            equal(step(model, k % 4, rows[k % 4]), want[k % 4])
        statistics = handle.statistics()
        assert (statistics.tensors_offloaded > 0) == (how != "recomputed and kept")
        assert how in MEASURED or statistics.reloaded_on_demand == 0
        assert statistics.resident_bytes == statistics.host_bytes_used == 0
        assert how not in RECOMPUTED or len(handle.plan.recomputed) == BLOCKS
        assert how not in MEASURED or handle.plan.because or handle.plan.offloaded
        handle.remove()
        equal(step(model, 0, rows[0]), want[0])


# Memory


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
            equal(step(model, 0, rows), want)
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


def test_the_peak_of_a_pass_is_seen_though_measuring_resets_it() -> None:
    model = make("linear", 12)
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


@pytest.mark.parametrize("num_layers", [1, 3, 6, 10])
def test_the_peak_drops_by_the_offloaded_bytes(num_layers: int) -> None:
    """All bytes that the plan has offloaded at the peak are gone: R is 100 %."""
    model = make("linear", 12)
    without = settled_peak(model)
    handle = offload(model, num_layers=num_layers)
    assert without - settled_peak(model) == num_layers * NBYTES
    report = handle.report()
    assert (report.expected_bytes, report.dropped_bytes) == (num_layers * NBYTES, num_layers * NBYTES)
    handle.reset_statistics()
    peak(model)
    statistics = handle.statistics()
    assert statistics.bytes_offloaded == num_layers * NBYTES
    assert 1.0 <= statistics.host_bytes / statistics.bytes_offloaded <= 1.05
    costs = [LayerCost(1.0, 2.0, (Saved(NBYTES, saved_at=0.0),))] * 12
    planned = simulate(handle.plan, costs, Link(d2h=float("inf"), h2d=float("inf")))
    # The stem saves its input, which is kept and not part of the plan.
    assert statistics.peak_resident_bytes == planned.peak_bytes + NBYTES


@pytest.mark.parametrize("how", OPTIONS)
def test_r_of_a_transformer(how: str) -> None:
    """The measured peak drops by at least 99.5 % of the bytes that the report expects."""
    model = make("attention")
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


@pytest.mark.parametrize("how", [*OPTIONS, "recomputed", "recomputed but products"])
def test_settled_steps_neither_synchronize_nor_allocate(how: str) -> None:
    model = make("attention")
    handle = offload(model, **ALL[how])
    with flash():
        for seed in range(4 if how in RECOMPUTED else 2):
            run_step(model, seed)
        with steady():
            for seed in range(6):
                run_step(model, seed)
                print(handle, handle.report() if how in OPTIONS else "")


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


@pytest.mark.parametrize("delay", [0, 2_000_000])
def test_blocks_that_use_a_stream_of_their_own(delay: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*[TwoStreams(WIDTH, None, 0) for _ in range(6)]).to(DEVICE)
    want = [step(model, seed) for seed in range(4)]
    for block in model:
        block.side, block.delay = torch.cuda.Stream(), delay
    handle = offload(model)
    for seed in range(4):
        equal(step(model, seed), want[seed])
    assert handle.statistics().tensors_offloaded > 0
    assert handle.statistics().resident_bytes == 0


# Timeline


@pytest.mark.parametrize("options", [{}, {"num_layers": 10}, {"num_layers": 6, "max_inflight": 1}])
def test_the_timeline_adds_up(options: dict[str, Any]) -> None:
    model = make("mlp", 12)
    handle = offload(model, **options)
    for seed in range(2):
        run_step(model, seed)
    torch.cuda.synchronize()
    handle.reset_statistics()
    with handle.recording(), no_synchronization():
        run_step(model, 2)
    timeline, statistics = handle.timeline(), handle.statistics()
    assert timeline.source == "measured"
    assert timeline.nbytes(Kind.D2H) == statistics.bytes_offloaded > 0
    assert timeline.nbytes(Kind.H2D) == statistics.bytes_reloaded > 0
    assert timeline.peak_bytes == statistics.peak_resident_bytes
    end = timeline.end
    compute = timeline.of(Kind.FORWARD, Kind.BACKWARD)
    assert sorted((span.kind.value, span.layer) for span in compute) == sorted(
        (kind, k) for kind in ("forward", "backward") for k in range(12)
    )
    # Compute is one stream, and so are the copies of a direction: their spans do not overlap.
    for spans in (compute, timeline.of(Kind.D2H), timeline.of(Kind.H2D)):
        ordered = sorted(spans, key=lambda span: span.start)
        assert all(a.end <= b.start + 1e-4 for a, b in pairwise(ordered))
    assert 0.5 * end <= sum(span.seconds for span in compute) <= end * 1.001
    for span in timeline.of(Kind.D2H, Kind.H2D, Kind.STALL):
        assert 0 <= span.start <= span.end <= end * 1.001
