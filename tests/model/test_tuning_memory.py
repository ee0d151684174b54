"""The measured default on a device with little memory: no pass may exceed it where any plan fits."""

from __future__ import annotations

import logging
import re
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_device import Timed, TimedModel, seconds, stages, step
from timed_device import offload as offload_or_recompute

offload = partial(offload_or_recompute, recompute=False)

MIB = 2**20
BLOCK = 4 * MIB


def limited(limit: int, link: float = 1e7, count: int = 12, **more) -> tuple[Timed, TimedModel]:
    device = Timed(link, link, memory=limit)
    return device, TimedModel(device, count, **more)


@cache
def leanest(layers: str | None = "blocks") -> int:
    """Return the peak of the plan that offloads everything, which the first passes need."""
    device, model = limited(2**40)
    handle = offload(model, device, layers=layers)
    for _ in range(2):
        step(model)
    assert handle.statistics().bytes_offloaded
    return device.created.peak


def test_the_first_passes_need_as_much_as_the_leanest_plan():
    device, model = limited(2**40)
    offload(model, device, fraction=1.0)
    for _ in range(3):
        step(model)
    assert leanest() <= device.created.peak
    assert leanest(None) <= device.created.peak + BLOCK


@pytest.mark.parametrize("layers", ["blocks", None])
@pytest.mark.parametrize("link", [5e5, 2e6, 1e7])
def test_passes_without_offloading_are_skipped_if_they_do_not_fit(layers, link, caplog):
    limit = 40 * MIB
    device, model = limited(limit, link)
    handle = offload(model, device, layers=layers)
    with caplog.at_level(logging.INFO, "actoffload"):
        seen = stages(handle, lambda: step(model), 12)
    assert "BARE" not in seen
    assert "NONE" not in seen
    assert seen[7] == ""
    assert device.created.peak <= limit
    assert handle.plan.peak_bytes <= limit
    (line,) = (record.getMessage() for record in caplog.records)
    costs = re.search(r"Without offloading the peak would be 4[89].0 MiB, above the limit of 36.0 MiB.", line)
    assert bool(costs) == (link == 5e5), "what is free needs no reason"


@settings(max_examples=12)
@given(st.integers(10, 60), st.sampled_from([5e5, 2e6, 4e6, 1e7]))
def test_no_pass_exceeds_the_memory(mebibytes, link):
    limit = max(mebibytes * MIB, leanest() * 100 // 97 + 1)
    device, model = limited(limit, link)
    handle = offload(model, device)
    times = [seconds(model, device) for _ in range(12)]
    assert device.created.peak <= limit
    assert handle.plan.peak_bytes <= limit
    assert times[-1] <= times[0] * 1.02, "no slower than the leanest plan"


def test_the_plan_that_fits_uses_the_memory_that_there_is():
    """More memory, fewer copies."""
    copied = []
    for limit in (20, 30, 40, 60):
        device, model = limited(limit * MIB, 5e5)
        handle = offload(model, device)
        for _ in range(12):
            step(model)
        copied.append(handle.plan.offloaded_bytes)
    assert copied == sorted(copied, reverse=True)
    assert copied[0] > 3 * copied[-1]


def test_larger_inputs_are_run_by_the_leanest_plan():
    """Inputs twice as large: without offloading they need 96 MiB."""
    device, model = limited(60 * MIB, 1e6)
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    few = handle.plan.offloaded_bytes
    for elements in (8, 4, 8):
        handle.reset_statistics()
        step(model, elements)
        assert handle.statistics().bytes_offloaded == (few if elements == 4 else 11 * 2 * BLOCK)
    assert device.created.peak <= 60 * MIB


def test_larger_inputs_while_measuring():
    device, model = limited(60 * MIB, 1e6)
    handle = offload(model, device)
    sizes = iter([4, 4, 8, 4, 8, 4, 8, 8, 4, 4, 4, 8])
    seen = stages(handle, lambda: step(model, next(sizes)), 12)
    assert device.created.peak <= 60 * MIB
    assert "BARE" in seen


def test_smaller_inputs_first():
    device, model = limited(60 * MIB, 1e6)
    handle = offload(model, device)
    sizes = [1, 1, 1, 2, 4, 8, 4, 8, 8, 1, 2, 4, 8, 8, 8]
    for elements in sizes:
        step(model, elements)
    assert device.created.peak <= 60 * MIB
    assert handle.statistics().bytes_offloaded


def test_larger_inputs_that_may_not_fit_are_not_waited_for():
    """The first passes were much smaller than all that follow, with which the first steps begin anew."""
    device, model = limited(60 * MIB, 1e6)
    handle = offload(model, device)
    for _ in range(2):
        step(model, 1)
    steps = 0
    while handle.settling:
        step(model, 8)
        steps += 1
        assert steps < 20
    assert handle._tracker.steering._first.stage is None
    assert 40 * MIB < handle.plan.peak_bytes <= 60 * MIB


def test_several_forwards_before_one_backward_need_memory_together():
    device, model = limited(70 * MIB, 1e7)  # one pass without offloading needs 48 MiB, two need 96
    offload(model, device)
    for _ in range(12):
        outputs = [model(torch.zeros(4, requires_grad=True)) for _ in range(2)]
        sum(outputs).sum().backward()
        del outputs
    assert device.created.peak <= 70 * MIB


def test_temporary_memory_between_the_borders_counts():
    """Half of the limit is needed for a moment in each block."""
    device, model = limited(45 * MIB, 1e7)
    extra = 20 * MIB

    def hook(module, args):
        device.count(torch.empty(extra, dtype=torch.uint8))

    for block in model.blocks:
        block.register_forward_pre_hook(partial(hook))
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    assert device.created.peak <= 45 * MIB
    assert handle.plan.offloaded
