"""The measured default in virtual time: which passes measure, what is chosen, what it costs, and what is said."""

from __future__ import annotations

import logging

import pytest
import torch
from timed_device import Timed, TimedBlock, TimedModel, offload, seconds, stages, step
from torch import nn

import actoffload
from actoffload._torch.autograd import saved_tensor_hooks
from actoffload.model.tuning.lockstep import WINDOW
from actoffload.planner import GroupPlan
from actoffload.schedule.plan import Plan

MIB = 2**20
BOTH = ["blocks", None]  # layers: the groups are given, or found in a first pass of its own
ALL = ["FIRST", "LEAN", "MEMORY", "BARE", "PLAN", "PLAN", "PLAN", "WARM", "NONE"]


def fast(**more) -> tuple[Timed, TimedModel]:
    """Return a device whose link copies a block while half of the next computes, and a model of 8 blocks."""
    device = Timed(1e7, 1e7, **more)
    return device, TimedModel(device)


@pytest.mark.parametrize("layers", BOTH)
def test_stages(layers):
    device, model = fast()
    handle = offload(model, device, layers=layers)
    seen = stages(handle, lambda: step(model), 12)
    assert seen[:9] == (ALL if layers else ["LEAN", *ALL[1:]]), "the first pass searches the groups, or warms up"
    assert seen[9:] == [""] * 3


def test_stages_where_nothing_is_free():
    device = Timed(1e5, 1e5, memory=2**40)
    handle = offload(model := TimedModel(device), device)
    assert stages(handle, lambda: step(model), 7) == [*ALL[:4], "WARM", "NONE", ""]
    assert handle.plan.seconds == handle.plan.baseline_seconds == pytest.approx(24)
    assert device.synchronized <= 2


@pytest.mark.parametrize("layers", BOTH)
@pytest.mark.parametrize("count", [3, 16])
@pytest.mark.parametrize("link", [1e5, 4e5, 1e6, 1.3e6, 2e6, 1e7])
def test_from_the_tenth_pass_on_a_pass_costs_nothing(layers, count, link):
    device = Timed(link, link)
    model = TimedModel(device, count)
    without = seconds(model, device)
    handle = offload(model, device, layers=layers)
    times = [seconds(model, device) for _ in range(14)]
    assert max(times[9:]) <= 1.01 * without
    assert handle.report().because or handle.plan.offloaded
    assert handle.plan.seconds == pytest.approx(times[-1], rel=0.01)
    assert device.synchronized <= 2


@pytest.mark.parametrize(("link", "offloaded"), [(1e7, 6), (2e6, 3), (1e5, 0)])
def test_what_travels_for_free_is_offloaded(link, offloaded):
    device = Timed(link, link)
    model = TimedModel(device)
    handle = offload(model, device)
    for _ in range(10):
        step(model)
    handle.reset_statistics()
    step(model)
    assert handle.plan.offloaded == tuple(range(offloaded))
    statistics = handle.statistics()
    assert statistics.bytes_offloaded == offloaded * 4 * MIB
    assert statistics.reloaded_on_demand == 0
    assert offloaded * 4 * MIB <= statistics.host_bytes <= 1.05 * offloaded * 4 * MIB, "the first passes needed more"


def test_of_equally_fast_plans_the_one_with_the_smallest_peak():
    peaks = []
    for link in (5e5, 1e6, 2e6, 1e7):
        device = Timed(link, link, memory=2**40)
        model = TimedModel(device)
        handle = offload(model, device)
        for _ in range(10):
            step(model)
        device.created.peak = 0
        step(model)
        peaks.append(device.created.peak)
        assert handle.plan.peak_bytes == pytest.approx(device.created.peak, rel=0.03)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 2 * peaks[-1]
    assert peaks[-1] <= 3 * 4 * MIB


class Watching(nn.Module):
    """A block that notes whether saved-tensor hooks are installed in it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.seen = block, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(saved_tensor_hooks() is not None)
        return self.block(x)


@pytest.mark.parametrize(("link", "hooked"), [(1e5, 0), (1e7, 6)])
def test_saved_tensor_hooks_only_where_tensors_are_offloaded(link, hooked):
    device = Timed(link, link)
    model = TimedModel(device)
    model.blocks = nn.ModuleList(map(Watching, model.blocks))
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    assert all(block.seen[0] and block.seen[1] for block in model.blocks), "the first passes offload everything"
    assert not any(block.seen[2] or block.seen[3] for block in model.blocks), "the next two offload nothing"
    assert [block.seen[-1] for block in model.blocks] == [k < hooked for k in range(8)]
    with handle.recording():
        step(model)
    assert all(block.seen[-1] for block in model.blocks), "a recorded step is followed as a whole"
    step(model)
    assert [block.seen[-1] for block in model.blocks] == [k < hooked for k in range(8)]


def test_nothing_is_free_and_the_report_says_so():
    device = Timed(1e5, 1e5)
    model = TimedModel(device)
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    report = handle.report()
    because = "Nothing is offloaded, because no copy fits beside the compute."
    assert handle.plan.because == report.because == because
    assert report.advice == (because,)
    assert report.coverage == 1.0
    assert [(group.offloaded, group.bytes_saved, group.bytes_offloaded) for group in report.groups] == [
        (False, 4 * MIB, 0)
    ] * 8
    assert not report.expected_bytes
    assert not report.held
    assert "at the peak" not in str(report), "saved activations are not followed, so their peak is not known"


def test_report_of_a_plan_in_the_steady_state():
    device, model = fast()
    handle = offload(model, device)
    for _ in range(10 + WINDOW):
        step(model)
    report = handle.report()
    assert [group.offloaded for group in report.groups] == [k < 6 for k in range(8)]
    assert [group.bytes_saved for group in report.groups] == [4 * MIB] * 8
    assert [group.bytes_offloaded for group in report.groups] == [4 * MIB * (k < 6) for k in range(8)]
    assert report.coverage == 1.0
    assert report.measured_passes == (4, 9)
    assert report.slowdown == 1.0
    assert report.pass_seconds_with == pytest.approx(24.0)
    assert report.r == 1.0
    assert report.advice[0].startswith("Nothing to change: 24.0 MiB of 32.0 MiB")


def test_one_log_line(caplog):
    device, model = fast()
    offload(model, device)
    with caplog.at_level(logging.INFO, "actoffload"):
        for _ in range(30):
            step(model)
    (line,) = (record.getMessage() for record in caplog.records)
    for part in ("6 of 8 groups of TimedModel are offloaded (24.0 MiB)", "passes 1 to 9", "24000.00 ms", "planned in"):
        assert part in line


# Until when


@pytest.mark.parametrize("layers", BOTH)
@pytest.mark.parametrize(("link", "steps"), [(1e7, 10), (1e5, 7)])
def test_steps_are_run_until_the_plan_is_final(link, steps, layers):
    device = Timed(link, link)
    handle = offload(model := TimedModel(device), device, layers=layers)
    count = 0
    while handle.settling:
        step(model)
        count += 1
    assert count == steps
    plan = handle.plan
    for _ in range(2 * WINDOW):
        step(model)
        assert not handle.settling
    assert handle.plan is plan


@pytest.mark.parametrize("layers", BOTH)
@pytest.mark.parametrize("by_hand", [{"num_layers": 2}, {"fraction": 0.5}, {"max_inflight": 1}])
def test_a_choice_by_hand_is_final(layers, by_hand):
    device, model = fast()
    handle = offload(model, device, layers=layers, **by_hand)
    assert not handle.settling
    step(model)
    assert not handle.settling


@pytest.mark.parametrize("layers", BOTH)
def test_the_plan_is_final_where_nothing_is_measured(layers):
    model = TimedModel(Timed())
    handle = offload(model, actoffload.device.ReferenceDevice(), layers=layers)
    assert not handle.settling
    step(model)
    assert not handle.settling


@pytest.mark.parametrize("passes", [0, 4])
def test_what_ends_measuring(passes):
    device, model = fast()
    handle = offload(model, device)
    for _ in range(passes):
        step(model)
    assert handle.settling
    with handle.paused():
        assert not handle.settling
    assert handle.settling
    handle.remove()
    assert not handle.settling


# Before there is a plan


def test_the_plan_of_the_first_steps():
    device, model = fast()
    handle = offload(model, device)
    assert "first steps" in handle.plan.because
    step(model)
    assert "first steps" in str(handle)
    assert handle.plan.nbytes == (4 * MIB,) * 8
    assert handle.plan.offloaded == tuple(range(6))


def test_a_number_switches_measuring_off():
    device = Timed(1e5, 1e5)
    model = TimedModel(device)
    handle = offload(model, device, num_layers=2)
    for _ in range(12):
        step(model)
    assert handle.plan.offloaded == (0, 1)
    assert device.synchronized == 0


def test_the_reference_device_measures_nothing():
    device = actoffload.device.ReferenceDevice(1e5, 1e5)
    model = TimedModel(Timed())
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    assert handle.plan.offloaded == tuple(range(6))
    assert "without an accelerator" in handle.plan.because


# A saved plan


@pytest.mark.parametrize("link", [1e6, 2e6, 1e7])
def test_a_saved_plan_repeats_copies_and_peak(tmp_path, link):
    device = Timed(link, link, memory=2**40)
    model = TimedModel(device)
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    handle.plan.save(tmp_path / "plan.json")

    def one() -> tuple[int, int, float]:
        handle.reset_statistics()
        device.created.peak = 0
        took = seconds(model, device)
        return handle.statistics().bytes_offloaded, device.created.peak, pytest.approx(took)

    want = one()
    text = str(handle.plan)
    handle.remove()
    for plan in (tmp_path / "plan.json", str(tmp_path / "plan.json"), GroupPlan.load(tmp_path / "plan.json")):
        handle = offload(model, device, layers=None, plan=plan)
        assert not handle.settling
        assert [one() for _ in range(3)] == [want] * 3
        assert str(handle.plan) == text
        handle.remove()


def test_a_saved_plan_with_other_groups(tmp_path):
    device, model = fast()
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    handle.plan.save(tmp_path / "plan.json")
    handle.remove()
    handle = offload(model, device, layers=None, plan=tmp_path / "plan.json")
    model.skipped = {1, 7}
    for _ in range(3):
        handle.reset_statistics()
        step(model)
    assert handle.plan.names == tuple(f"blocks.{k}" for k in (0, 2, 3, 4, 5, 6))
    assert handle.statistics().bytes_offloaded == 5 * 4 * MIB
    assert handle.plan.nbytes == (4 * MIB,) * 6


@pytest.mark.parametrize("more", [{"num_layers": 1}, {"fraction": 0.5}, {"max_inflight": 1}, {"layers": "blocks"}])
def test_a_plan_and_something_else(more):
    _, model = fast()
    plan = GroupPlan(("blocks.0", "blocks.1"), Plan(2), (0, 0))
    with pytest.raises(
        ValueError, match=r"^plan says what is offloaded: leave out layers, num_layers, fraction and max"
    ):
        actoffload.offload(model, plan=plan, **more)
    assert actoffload.OffloadHandle.of(model) is None


def test_a_plan_of_another_model(tmp_path):
    _, model = fast()
    plan = GroupPlan(("blocks.0", "blocks.9"), Plan(2), (0, 0))
    with pytest.raises(ValueError, match=r"blocks\.9"):
        actoffload.offload(model, plan=plan)
    with pytest.raises(FileNotFoundError):
        actoffload.offload(model, plan=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bad.json is no plan that this version of actoffload can read"):
        actoffload.offload(model, plan=tmp_path / "bad.json")
    assert actoffload.OffloadHandle.of(model) is None


def test_plans_print_bytes(tmp_path):
    """On the reference device too, where nothing is measured."""
    model = TimedModel(Timed())
    handle = offload(model, actoffload.device.ReferenceDevice())
    for _ in range(2):
        step(model)
    assert "blocks.0 ... 5         6        -     24.0 MiB" in str(handle.plan)
    handle.plan.save(tmp_path / "plan.json")
    handle.remove()
    handle = offload(model, actoffload.device.ReferenceDevice(), layers=None, plan=tmp_path / "plan.json")
    assert "blocks.0 ... 5         6        -     24.0 MiB" in str(handle.plan)
    step(model)
    assert handle.statistics().bytes_offloaded == 24 * MIB


def test_a_saved_plan_of_groups_in_parts(tmp_path):
    """A group around others has parts; its plan names them."""
    device = Timed(1e7, 1e7)
    model = nn.Sequential(*(TimedModel(device, 2) for _ in range(3)))
    handle = offload(model, device, layers=["0", "1", "2", "*.blocks.*"])
    for _ in range(12):
        step(model)
    handle.reset_statistics()
    step(model)
    copied, plan = handle.statistics().bytes_offloaded, handle.plan
    assert copied == plan.offloaded_bytes > 0
    plan.save(tmp_path / "plan.json")
    handle.remove()
    handle = offload(model, device, layers=None, plan=tmp_path / "plan.json")
    for _ in range(3):
        handle.reset_statistics()
        step(model)
    assert handle.statistics().bytes_offloaded == copied


@pytest.mark.parametrize("passes", [(1,), (2,), (3,), (0, 1), tuple(range(1, 6))], ids=str)
def test_passes_that_call_no_group(passes):
    """The model may take another branch in some of the first passes."""
    device = Timed(1e7, 1e7)
    blocks = TimedModel(device)
    model = nn.ModuleDict({"first": TimedBlock(device, 1.0, 1.0, 64), "blocks": blocks})
    model.forward = lambda x: blocks(model["first"](x))
    handle = offload(model, device, layers="blocks.blocks")
    for number in range(20):
        blocks.skipped = set(range(8)) if number in passes else set()
        step(model)
    assert not handle.settling
    assert handle.plan.because or handle.plan.offloaded


@pytest.mark.parametrize("number", range(8))
def test_a_pass_with_empty_inputs(number):
    device = Timed(1e7, 1e7)
    model = TimedModel(device)
    handle = offload(model, device)
    for k in range(20):
        step(model, 0 if k == number else 4)
    assert not handle.settling
