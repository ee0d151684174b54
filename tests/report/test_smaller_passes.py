"""Reports after a smaller batch: their numbers belong together, and they give no advice on bytes."""

from __future__ import annotations

import pytest
import torch
from helpers import forward, make
from torch import nn
from whole_model import WIDTH, Waves

import actoffload

WARNED = "There is no advice on bytes, because this pass saved 0 bytes that can be offloaded, and the largest one"
MIB = 2**20
ROWS = MIB // WIDTH // 4  # of one MiB


def run(model: nn.Module, *rows: int) -> None:
    for number in rows:
        model(torch.randn(number, WIDTH)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"layers": "blocks"}])
def test_a_smaller_batch_gives_no_advice_on_bytes(options):
    model = Waves(6)
    handle = actoffload.offload(model, **options)
    run(model, ROWS, ROWS, ROWS // 8)
    report = handle.report()
    assert report.small
    assert (report.totals.bytes_saved, report.largest_bytes) == (0, 12 * MIB)
    assert report.peak_resident_bytes > 0
    assert "MiB on the device, of what can be offloaded; the highest of 3 passes" in str(report)
    (advice,) = report.advice
    assert advice.startswith(f"{WARNED} 12.0 MiB: report a larger pass")
    assert not advice.change
    assert sum(handle.plan.nbytes) == 12 * MIB, "the plan has the bytes of the larger pass"


def test_the_latest_full_pass_can_be_reported():
    model = Waves(6)
    handle = actoffload.offload(model)
    run(model, 2 * ROWS)
    before = handle.report()
    run(model, ROWS // 8)
    report = handle.report(full=True)
    assert not report.small
    assert report.groups == before.groups
    assert report.advice == before.advice
    assert "the highest of" not in str(report)
    run(model, ROWS)  # half as much counts as full
    assert handle.report(full=True).totals.bytes_saved == handle.report().totals.bytes_saved == 12 * MIB
    assert "the highest of 3 passes" in str(handle.report())
    run(model, ROWS // 8)
    full = handle.report(full=True)
    assert full.totals.bytes_saved == 12 * MIB
    assert "the highest of 4 passes" in str(full), "the first pass was larger"


def test_a_reset_begins_to_compare_anew():
    model = Waves(6)
    handle = actoffload.offload(model, min_bytes=0)
    run(model, ROWS)
    handle.reset_statistics()
    run(model, ROWS // 8)
    assert not handle.report().small
    assert handle.report(full=True).totals.bytes_saved == 12 * MIB // 8


def test_passes_that_are_recomputed_differently_are_not_compared():
    model = Waves(6)
    handle = actoffload.offload(model, num_layers=0, recompute=True, min_bytes=0)
    run(model, ROWS, ROWS)
    report = handle.report()
    assert report.totals.recomputed
    assert not report.small


@pytest.mark.usefixtures("offload_small_tensors")
def test_a_context_compares_its_passes_too():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    context, sync = make(2, 4)
    for rows in (512, 64):
        forward(layers, torch.randn(rows, WIDTH) * 1.0, context, sync).sum().backward()
    assert context.report().small
    assert "There is no advice on bytes" in context.report().advice[0]
    context.reset_statistics()
    forward(layers, torch.randn(64, WIDTH) * 1.0, context, sync).sum().backward()
    assert not context.report().small
