"""The measured default on a device with little memory: no pass may exceed it where any plan fits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_device import Timed, TimedModel, offload, seconds, step

MIB = 2**20
BLOCK = 4 * MIB
REPLAY = ["auto", False]


def limited(mebibytes: float, link: float = 1e7, count: int = 12, **more) -> tuple[Timed, TimedModel]:
    device = Timed(link, link, memory=round(mebibytes * MIB))
    return device, TimedModel(device, count, **more)


@cache
def leanest(layers: str | None = "blocks", recompute: str | bool = False) -> int:
    """Return the peak of the plan that offloads everything, which the first passes need."""
    device, model = limited(2**20)
    offload(model, device, layers=layers, recompute=recompute)
    for _ in range(2):
        step(model)
    return device.created.peak


@pytest.mark.parametrize("recompute", REPLAY)
def test_the_first_passes_need_as_much_as_the_leanest_plan(recompute):
    device, model = limited(2**20)
    offload(model, device, fraction=1.0, recompute=bool(recompute))
    for _ in range(3):
        step(model)
    assert leanest("blocks", recompute) <= device.created.peak + MIB
    assert leanest(None, recompute) <= device.created.peak + BLOCK


@settings(max_examples=12)
@given(st.integers(10, 60), st.sampled_from([5e5, 2e6, 4e6, 1e7]), st.sampled_from(REPLAY))
def test_no_pass_exceeds_the_memory(mebibytes, link, recompute):
    device, model = limited(max(mebibytes, leanest() / MIB * 1.25), link)
    handle = offload(model, device, recompute=recompute)
    times = [seconds(model, device) for _ in range(8)]
    assert not handle.settling
    assert device.peak() <= device.memory
    assert handle.plan.peak_bytes <= device.memory
    assert times[-1] <= times[1] * 1.02, "no slower than the leanest plan"
    assert times[-1] == pytest.approx(handle.plan.seconds)


# Inputs of other sizes


@pytest.mark.parametrize("memory", [60, 80], ids=["offloaded", "fits"])
@pytest.mark.parametrize("recompute", REPLAY)
def test_larger_inputs_are_run_by_the_leanest_plan(memory, recompute):
    """Inputs twice as large: without offloading they need 96 MiB."""
    device, model = limited(memory, 1e6)
    handle = offload(model, device, recompute=recompute)
    for _ in range(8):
        step(model)
    plan, few = handle.plan, seconds(model, device)
    assert plan.peak_bytes <= 48.1 * MIB
    for elements in (8, 4, 8):
        assert (seconds(model, device, elements) > 2 * few) == (elements == 8)
    assert handle.plan is plan
    assert device.peak() <= memory * MIB


@pytest.mark.parametrize("sizes", [(1, 1, 1, 2, 4, 8, 4, 8), (1, 8), (8, 8, 1, 1, 8)], ids=str)
def test_smaller_inputs_first(sizes):
    device, model = limited(60, 1e6)
    handle = offload(model, device)
    for elements in (*sizes, *[8] * 12, 1, 2, 4, 8):
        step(model, elements)
    assert not handle.settling
    assert device.peak() <= 60 * MIB


# Other memory


def test_temporary_memory_between_the_borders_counts():
    """Half of the limit is needed for a moment in each block."""
    device, model = limited(45, 1e7)

    def hook(module, args):
        device.count(torch.empty(20 * MIB, dtype=torch.uint8))

    for block in model.blocks:
        block.register_forward_pre_hook(hook)
    handle = offload(model, device, recompute=False)
    for _ in range(8):
        step(model)
    assert device.peak() <= 45 * MIB
    assert handle.plan.offloaded
