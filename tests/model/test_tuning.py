"""The measured default in virtual time: which passes measure, what is chosen, what it costs, and what is said."""

import logging

import pytest
import torch
from timed_device import Timed, TimedBlock, TimedModel, offload, peaks, seconds, settle, stage_of, stages, started, step
from torch import nn
from whole_model import measured, nothing_installed

import actoffload
from actoffload.engine.host_pool import GRANULE
from actoffload.tune.exchange import WINDOW

MIB = 2**20


def tight(memory: int | None = 16 * MIB, link: float = 1e7, **options) -> tuple:
    """Return a device with memory for half of a model, whose link copies a block while half of the next computes."""
    return started(link, 8, memory, **options)


FIRST = ["FIRST", "LEAN"]
CASES = {  # memory in MiB, rate of the link, whether groups may be recomputed: stages, offloaded, recomputed
    "memory is not known": (None, 1e7, "auto", FIRST, 0, 0),
    "fits": (100, 1e7, "auto", [*FIRST, "PLAN"], 0, 0),
    "fits, slow link": (100, 1e5, "auto", [*FIRST, "PLAN"], 0, 0),
    "fits, without replay": (100, 1e7, False, [*FIRST, "PLAN"], 0, 0),
    "copies are free": (16, 1e7, "auto", [*FIRST, "PLAN"], 6, 0),
    "copies are free, without replay": (16, 1e7, False, [*FIRST, "PLAN"], 6, 0),
    "copies are slow": (16, 1e5, "auto", [*FIRST, "PLAN"], 0, 5),
    "copies are slow, without replay": (16, 1e5, False, [*FIRST, "PLAN"], 5, 0),
    "nearly as a checkpoint": (8, 1e5, "auto", [*FIRST, "PLAN"], 0, 7),
}


@pytest.mark.parametrize("case", CASES)
def test_stages(case):
    memory, link, recompute, want, offloaded, recomputed = CASES[case]
    device, model, handle = tight(memory and memory * MIB, link, recompute=recompute)
    assert stages(handle, lambda: step(model), 8) == [*want, *[""] * (8 - len(want))]
    assert len(want) <= 5
    plan = handle.plan
    assert (len(plan.offloaded), len(plan.recomputed)) == (offloaded, recomputed)
    assert seconds(model, device) == pytest.approx(plan.seconds)
    assert device.peak() <= (device.memory or 2**40)
    (peak,) = peaks(model, device, 1)
    assert peak <= plan.peak_bytes <= 1.01 * peak
    assert not handle.settling
    assert handle.plan is plan
    assert device.synchronized <= 5


def test_the_host_memory_of_a_plan_is_pinned_before_its_first_pass():
    device, model, handle = tight(min_bytes=16)  # also the inputs of blocks, in the passes before
    pinned, begun, take = [], [], device.empty_host
    model.blocks[0].register_forward_pre_hook(lambda *_: begun.append(stage_of(handle)))

    def empty_host(nbytes: int) -> torch.Tensor:
        pinned.append((len(begun), nbytes))
        return take(nbytes)

    device.empty_host = empty_host
    assert stages(handle, lambda: step(model), 6) == [*FIRST, "PLAN", "", "", ""]
    passes = begun.index("PLAN")
    assert [nbytes // MIB for before, nbytes in pinned if before < passes] == [64], "not known yet"
    assert len([nbytes for before, nbytes in pinned if before == passes]) == 1
    assert sum(nbytes for before, nbytes in pinned if before > passes) <= GRANULE  # what gaps of slabs leave unused
    assert handle.plan.offloaded_bytes <= handle.statistics().host_bytes <= handle.plan.offloaded_bytes + 2 * MIB


@pytest.mark.parametrize("recompute", [False, "auto"])
@pytest.mark.parametrize(
    ("memory", "because"), [(None, "the memory of the device is not known"), (100 * MIB, "Fits: 32.0 MiB of ")]
)
def test_nothing_is_installed_where_the_model_fits(memory, because, recompute):
    device, model, handle = tight(memory, recompute=recompute)
    settle(model, handle)
    count = device.recorded
    handle.reset_statistics()
    assert seconds(model, device) == pytest.approx(24.0)
    statistics, report = handle.statistics(), handle.report()
    assert device.recorded == count
    assert statistics.bytes_offloaded == statistics.host_bytes == 0
    assert because in handle.plan.because
    assert handle.plan.peak_bytes == 32 * MIB
    assert report.because == handle.plan.because
    assert report.advice == ("Nothing to change.",)
    assert not any(group.offloaded or group.recomputed for group in report.groups)
    assert [group.bytes_saved for group in report.groups] == [4 * MIB] * 8
    assert report.coverage == 1.0
    assert not report.expected_bytes
    assert not report.held
    nothing_installed(model)


def test_report_of_a_plan_in_the_steady_state():
    _device, model, handle = tight()
    step(model, times=6 + WINDOW)
    statistics, report = measured(handle, lambda: step(model)), handle.report()
    assert statistics.bytes_offloaded == 24 * MIB
    assert statistics.reloaded_on_demand == 0
    assert 24 * MIB <= statistics.host_bytes <= 1.05 * 24 * MIB, "the first passes needed more"
    assert [group.offloaded for group in report.groups] == [k < 6 for k in range(8)]
    assert [group.bytes_saved for group in report.groups] == [4 * MIB] * 8
    assert [group.bytes_offloaded for group in report.groups] == [4 * MIB * (k < 6) for k in range(8)]
    assert report.coverage == report.r == 1.0
    assert report.advice == ("Nothing to change.",)


@pytest.mark.parametrize(
    ("memory", "parts"),
    [
        (16 * MIB, ("6 of 8 groups of TimedModel are offloaded (24.0 MiB)", "passes 1 to 3")),
        (100 * MIB, ("0 of 8 groups", "passes 1 to 3", "Fits:")),
    ],
)
def test_one_log_line(caplog, memory, parts):
    _device, model, _handle = tight(memory)
    with caplog.at_level(logging.INFO, "actoffload"):
        step(model, times=30)
    (line,) = (record.getMessage() for record in caplog.records)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("at", range(1, 6))
def test_a_block_that_is_deleted_while_passes_are_measured(at):
    device, model, handle = tight()
    step(model, times=at)
    settled = not handle.settling
    model.blocks[2] = nn.Identity()
    with pytest.warns(UserWarning, match=r"'blocks\.2' has been replaced or deleted"):
        step(model)
    settle(model, handle)
    assert settled or "blocks.2" not in handle.plan.names
    assert device.peak() <= device.memory


# Until when


@pytest.mark.parametrize("by_hand", [{"num_layers": 2}, {"fraction": 0.5}, {"max_inflight": 1}])
def test_a_choice_by_hand_is_final(by_hand):
    device, model, handle = tight(**by_hand)
    for _ in range(3):
        assert not handle.settling
        step(model)
    assert handle.plan.offloaded
    assert device.synchronized == 0


def test_the_reference_device_measures_nothing():
    model = TimedModel(Timed())
    handle = offload(model, actoffload.device.ReferenceDevice(1e5, 1e5))
    for _ in range(3):
        assert not handle.settling
        step(model)
    assert handle.plan.offloaded == tuple(range(6))
    assert "without an accelerator" in handle.plan.because


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_what_ends_measuring(passes):
    _device, model, handle = tight()
    step(model, times=passes)
    assert handle.settling
    if passes < 3:  # no plan is tried yet
        assert "first steps" in handle.plan.because
        assert "first steps" in str(handle)
        assert handle.plan.offloaded == tuple(range(6))
    with handle.paused():
        assert not handle.settling
    assert handle.settling
    handle.remove()
    assert not handle.settling


# A saved plan


def test_a_saved_plan_of_groups_in_parts(tmp_path):
    """A group around others has parts; its plan names them."""
    device = Timed(1e7, 1e7, memory=16 * MIB)
    model = nn.Sequential(*(TimedModel(device, 2) for _ in range(3)))
    handle = offload(model, device, layers=["0", "1", "2", "*.blocks.*"], recompute=False)
    settle(model, handle)
    copied, plan = measured(handle, lambda: step(model)).bytes_offloaded, handle.plan
    assert copied == plan.offloaded_bytes > 0
    plan.save(tmp_path / "plan.json")
    handle.remove()
    handle = offload(model, device, layers=None, plan=tmp_path / "plan.json")
    step(model, times=2)
    assert measured(handle, lambda: step(model)).bytes_offloaded == copied


@pytest.mark.parametrize("passes", [(0,), (1,), (1, 2, 3, 4, 5), range(20)], ids=str)
def test_passes_that_call_no_group(passes):
    """The model may take another branch in some of the first passes."""
    device = Timed(1e7, 1e7, memory=16 * MIB)
    blocks = TimedModel(device)
    model = nn.ModuleDict({"first": TimedBlock(device, 1.0, 1.0, 64), "blocks": blocks})
    model.forward = lambda x: blocks(model["first"](x))
    handle = offload(model, device, layers="blocks.blocks")
    for number in range(20):
        blocks.skipped = set(range(8)) if number in passes else set()
        step(model)
    assert not handle.settling
    assert device.peak() <= 16 * MIB


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_pass_with_empty_inputs(number):
    device, model, handle = tight()
    for k in range(12):
        step(model, 0 if k == number else 4)
    assert not handle.settling
    assert device.peak() <= 16 * MIB
    assert handle.plan.offloaded
