"""All schedules with one rank, which has two stages where the schedule takes several."""

from typing import Any

import pytest
import torch
from helpers import same_bits
from pipeline_programs import MIN_BYTES, NAMES, SINGLE, SPLIT, STEPS, compare, make, train

from actoffload import OffloadHandle, offload

pytestmark = pytest.mark.usefixtures("one_process")


def check(seen: dict[str, Any]) -> None:
    """Check gradients, and that from the second step on the plan is carried out to the byte."""
    assert seen["same"]
    assert seen["steps"][0]["expected"] is None
    for step in seen["steps"][1:]:
        assert step["peak"] == step["expected"] > 0
        assert step["on_demand"] == 0
        assert step["offloaded"] == seen["plan_bytes"]
    for step in seen["steps"]:
        assert step["resident"] == step["host_used"] == 0
    assert seen["host_bytes"] == 0
    assert seen["removed"]


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule(name):
    seen = compare(name)
    check(seen)
    assert seen["plan_bytes"] > 0
    assert seen["steps"][0]["offloaded"] > seen["saved"]  # everything, also when metadata is inferred
    assert seen["ranks"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_alone(name):
    want = train(*make(name))
    schedule, modules = make(name)
    handles = [offload(module, min_bytes=MIN_BYTES) for module in modules]
    got = train(schedule, modules)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    for handle in handles:
        statistics = handle.statistics()
        assert statistics.bytes_offloaded > 0
        assert statistics.reloaded_on_demand == 0 or name not in SINGLE
        assert statistics.resident_bytes == statistics.host_bytes_used == 0
        assert statistics.passes == 4 * STEPS + 1  # a pass for each microbatch, and one for the inferred metadata
        assert isinstance(handle, OffloadHandle)
        handle.remove()


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B", *SPLIT])
@pytest.mark.parametrize("recompute", [True, [torch.ops.aten.addmm.default]], ids=["worth saving", "linears"])
def test_recomputed(name, recompute):
    seen = compare(name, recompute=recompute)
    assert seen["same"]
    assert all(step["resident"] == step["host_used"] == 0 for step in seen["steps"])
    assert all(step["on_demand"] == 0 for step in seen["steps"][1:])
    assert seen["saved"] < compare(name)["saved"]
