"""Little host memory: the plan recomputes what it cannot offload, and a budget of device memory holds."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from timed_device import Timed, TimedModel, offload, seconds, step

import actoffload
from actoffload.engine.statistics import Reason

MIB = 2**20
ROOM = 12 * MIB
BUDGET = 20 * MIB


class Limited(Timed):
    """A device whose host has 12 MiB, of which it says how much is left, or not."""

    says = True
    taken = 0

    def host_room(self) -> int | None:
        return ROOM - self.taken if self.says else None

    def empty_host(self, nbytes: int) -> torch.Tensor:
        if self.taken + nbytes > ROOM:
            raise RuntimeError("CUDA error: out of memory")  # as cudaHostAlloc fails
        self.taken += nbytes
        slab = super().empty_host(nbytes)
        weakref.finalize(slab, self.free, nbytes)
        return slab

    def free(self, nbytes: int) -> None:
        self.taken -= nbytes


def refused(handle: actoffload.OffloadHandle) -> int:
    return handle.statistics().tensors_kept.get(Reason.HOST_FULL, 0)


@pytest.mark.parametrize("how", ["max_host_bytes", "available", "refused"])
@pytest.mark.parametrize("recompute", ["auto", False])
def test_the_plan_recomputes_what_the_host_has_no_room_for(how, recompute):
    device = (Timed if how == "max_host_bytes" else Limited)(1e7, 1e7, memory=2**40)
    device.says = how == "available"
    model = TimedModel(device, 12)
    limit = ROOM if how == "max_host_bytes" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = offload(model, device, memory_budget=BUDGET, max_host_bytes=limit, recompute=recompute)
        for _ in range(10):
            device.created.peak, device.highest = device.created.now, 0
            step(model)
            if recompute == "auto" and how != "refused":
                assert device.peak() <= BUDGET, "in the first passes, too"
        assert not handle.settling
    held, before = handle.statistics().host_bytes, refused(handle)
    taken = seconds(model, device)
    assert refused(handle) == before, "the plan asks for no more than there is"
    plan = handle.plan
    assert 0 < plan.offloaded_bytes <= ROOM
    assert held <= ROOM
    assert plan.seconds == pytest.approx(taken, rel=0.01)
    assert plan.peak_bytes >= device.peak()
    if recompute == "auto":
        assert plan.recomputed
        assert device.peak() <= BUDGET
        assert taken < 12 * 4.0, "faster than with replay of everything"
    else:
        assert f"the limit of {BUDGET / MIB:.1f} MiB" in plan.because
        assert "smallest peak" in plan.because


def test_nothing_is_copied_where_the_device_uses_the_memory_of_the_host():
    """As integrated GPUs do: what is offloaded there frees nothing."""
    device = Timed(1e7, 1e7, memory=2**40)
    device.host_room = lambda: 0
    model = TimedModel(device, 12)
    handle = offload(model, device, memory_budget=BUDGET)
    for _ in range(10):
        device.created.peak, device.highest = device.created.now, 0
        step(model)
    assert handle.statistics().bytes_offloaded == 0
    assert handle.statistics().host_bytes == 0
    assert not handle.plan.offloaded
    assert handle.plan.recomputed
    assert device.peak() <= BUDGET
