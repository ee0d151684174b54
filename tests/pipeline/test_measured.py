"""A device whose virtual times count: costs are measured, and a step with the plan takes as long as it says."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pipeline_programs import NAMES, SPLIT, Skipping, Stopping, make
from timed_device import Timed, TimedBlock
from torch import Tensor, nn

from actoffload import PipelineHandle, offload
from actoffload._torch.tensors import saved_tensor_hooks
from actoffload.device import use

KIB = 2**10
MICROBATCHES, BLOCKS, SAVED = 6, 4, 4 * KIB
MEASURED = 2  # steps


pytestmark = pytest.mark.usefixtures("one_process")


def timed(device: Timed) -> nn.Module:
    """Return the blocks of a stage."""
    return nn.Sequential(*(TimedBlock(device, 1.0, 2.0, SAVED) for _ in range(BLOCKS)))


def compiled(device: Timed) -> nn.Module:
    """Return the blocks of a stage, which are compiled one by one."""
    blocks: Any = timed(device)
    for block in blocks:
        block.forward = torch._dynamo.disable(block.forward)  # it has time only as plain Python
        block.compile(backend="eager")
    return blocks


def skipping(device: Timed) -> nn.Module:
    """Return the blocks of a stage, of which some may be skipped."""
    return Skipping(*timed(device))


def offloaded(
    name: str, link: float, stage: Callable[[Timed], Any] = timed, memory: int | None = 2**20, **arguments: Any
) -> tuple[Any, list[Any], Timed, PipelineHandle]:
    """Return a schedule that is offloaded, the modules of its stages, its device and its handle."""
    device = Timed(link, link, memory=memory)
    schedule, modules = make(name, MICROBATCHES, module=lambda number: stage(device))
    with use(device):
        return schedule, modules, device, offload(schedule, min_bytes=64, **arguments)


def step(schedule: Any, device: Timed) -> float:
    """Run a step; return its virtual seconds."""
    begun, x = device.main.now, torch.ones(4 * MICROBATCHES)
    schedule.step(x, target=x)
    return device.main.now - begun


def run(name: str, link: float, steps: int, **arguments: Any) -> tuple[PipelineHandle, list[tuple[float, int]], Timed]:
    """Return the handle, and the virtual seconds and the peak of saved bytes of each step."""
    schedule, _, device, handle = offloaded(name, link, **arguments)
    found = []
    for _ in range(steps):
        handle.reset_statistics()
        found.append((step(schedule, device), handle.report().peak_resident_bytes))
    return handle, found, device


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("memory", "because"), [(None, "the memory of the device is not known"), (2**20, "Fits: ")], ids=["unknown", "fits"]
)
def test_nothing_is_offloaded_where_everything_fits(name, memory, because):
    """The third and fourth step keep everything; from then on no group is followed."""
    hooks: list[bool] = []

    class Watched(TimedBlock):
        def forward(self, x: Tensor) -> Tensor:
            hooks.append(saved_tensor_hooks() is not None)
            return super().forward(x)

    def stage(device: Timed) -> nn.Module:
        return nn.Sequential(*(Watched(device, 1.0, 2.0, SAVED) for _ in range(BLOCKS)))

    schedule, _, device, handle = offloaded(name, SAVED / 8, stage, memory)
    for _ in range(MEASURED + 2):
        assert handle.settling
        seconds = step(schedule, device)
    del hooks[:]
    assert step(schedule, device) == seconds
    assert hooks
    assert not any(hooks)
    plan = handle.plan
    assert not handle.settling
    assert not plan.offloaded
    assert not plan.saves
    assert because in plan.because
    assert plan.seconds == plan.baseline_seconds == pytest.approx(seconds)
    assert handle.report().peak_resident_bytes == plan.saved_peak_bytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("link", [SAVED / 8, 2.0 * SAVED], ids=["slow", "fast"])
def test_what_there_is_time_to_copy_costs_nothing(name, link):
    """A group takes eight times as long to copy as to compute, or half as long."""
    nothing = run(name, link, MEASURED + 2)[1][-1]
    handle, steps, device = run(name, link, MEASURED + 3, fraction=1.0)
    plan = handle.plan
    for seconds, peak in steps[MEASURED:]:
        assert seconds == plan.seconds <= 1.002 * nothing[0]
        assert peak == plan.saved_peak_bytes
    assert plan.baseline_seconds == nothing[0]
    assert link < SAVED or plan.saved_peak_bytes < nothing[1]
    assert handle.statistics().reloaded_on_demand == 0
    assert device.synchronized <= 3


def test_a_memory_budget():
    """A budget below what is free costs time, as much as the plan says."""
    budget = 9 * SAVED // 2
    handle, steps, _ = run("ScheduleGPipe", SAVED / 2, MEASURED + 3, memory_budget=budget, recompute=False)
    plan = handle.plan
    assert plan.peak_bytes <= budget
    assert plan.seconds is not None
    assert plan.seconds > (plan.baseline_seconds or 0)
    for seconds, peak in steps[MEASURED:]:
        assert seconds == pytest.approx(plan.seconds, rel=0.01)  # a copy begins when the next tensor is saved
        assert peak <= budget
    # Nothing was offloaded to measure times in a step that would not have been within the budget.
    assert all(peak <= budget for _, peak in steps)


def test_fewer_copies_at_a_time():
    """A group takes twice as long to copy as to compute, so the next one would be copied beside it."""
    counts = []
    for cap in (1, 2, None):
        handle, _, _ = run("ScheduleGPipe", SAVED / 2, MEASURED + 2, fraction=1.0, max_inflight=cap)
        assert handle.statistics().bytes_offloaded == handle.plan.offloaded_bytes
        counts.append(len(handle.plan.offloaded))
        handle.remove()
    assert 0 < counts[0] < counts[1] < counts[2]


def test_the_decision_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="actoffload"):
        run("Schedule1F1B", 2.0 * SAVED, MEASURED + 3, memory_budget=6 * SAVED)[0].remove()
    (record,) = caplog.records
    assert "rank 0\nstage" in record.getMessage()


# The backward of the inputs of a stage frees nothing, so a microbatch of a stage is the least.
@pytest.mark.parametrize(
    ("name", "part", "stage"),
    [
        ("ScheduleGPipe", 0.3, timed),
        ("ScheduleInterleaved1F1B", 0.3, timed),
        (SPLIT[1], 0.8, timed),
        ("ScheduleGPipe", 0.3, compiled),
        ("ScheduleInterleaved1F1B", 0.3, compiled),
    ],
)
def test_recomputed_where_offloading_costs_time(name, part, stage):
    """The link is slow; a recomputed group takes half as long again, and saves next to nothing."""
    handle, steps, _ = run(name, SAVED / 16, MEASURED + 2, stage=stage, fraction=1.0)
    assert handle.plan.peak_bytes is not None
    budget = round(handle.plan.peak_bytes * part)
    handle.remove()
    times = {}
    for recompute in (False, "auto"):
        handle, steps, _ = run(name, SAVED / 16, 9, stage=stage, memory_budget=budget, recompute=recompute)
        plan = handle.plan
        assert plan.peak_bytes is not None
        assert bool(plan.saves) == (recompute == "auto")
        times[recompute] = steps[-1][0]
        assert plan.seconds == pytest.approx(times[recompute], rel=0.01)
        assert all(peak <= budget for _, peak in steps)
        assert handle.statistics().reloaded_on_demand == 0
        handle.remove()
    assert times["auto"] < times[False]


@pytest.mark.parametrize(("name", "budget"), [("ScheduleGPipe", 12 * SAVED), (SPLIT[1], 6 * SAVED)])
def test_groups_that_save_more_are_recomputed_by_one_new_plan(name, budget):
    """The ways to run a group stay those that were measured, with more bytes."""
    schedule, modules, device, handle = offloaded(name, SAVED / 4, memory_budget=budget)
    blocks: list[Any] = [block for stage in modules for block in stage.children()]
    plans, peaks = [], []
    for number in range(16):
        if number in (10, 13):
            for block in blocks:
                block.nbytes = block.nbytes * 5 // 4
        handle.reset_statistics()
        step(schedule, device)
        plans.append(handle.plan)
        peaks.append(handle.report().peak_resident_bytes)
    first, second, third = (plans[number] for number in (9, 11, 14))
    # A step shows that groups that are offloaded have grown, the next one shows those that are kept.
    assert plans == [*plans[:9], first, first, second, second, second, third, third]
    for plan, peak in ((first, peaks[9]), (second, peaks[12]), (third, peaks[15])):
        assert plan.saves
        assert peak <= plan.peak_bytes <= budget
    assert first != second != third


@pytest.mark.parametrize("first", range(1, 10))
@pytest.mark.parametrize(("recompute", "times"), [("auto", 1), (False, 2)], ids=["auto, once", "offloaded, twice"])
def test_steps_that_skip_a_group(first, times, recompute):
    """While steps are measured, while a plan is tried, and later."""
    schedule, modules, device, handle = offloaded(
        "ScheduleGPipe", SAVED / 8, skipping, memory_budget=10 * SAVED, recompute=recompute
    )
    for number in range(24):
        for each in modules:
            each.skipped = {1} if first <= number < first + times else set()
        handle.reset_statistics()
        step(schedule, device)
        report = handle.report()
        assert report.totals.calls in (MICROBATCHES * BLOCKS, MICROBATCHES * (BLOCKS - 1))
    assert not handle.settling
    assert handle.plan.offloaded or handle.plan.saves
    assert report.peak_resident_bytes <= 10 * SAVED


@pytest.mark.parametrize("first", range(1, 6))
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_a_stage_that_runs_none_of_its_groups(name, first):
    schedule, modules, device, handle = offloaded(name, SAVED, skipping, layers="?")
    for number in range(14):
        modules[1].skipped = set(range(BLOCKS)) if number == first else set()
        step(schedule, device)
    assert not handle.settling
    assert handle.report().totals.calls == 2 * MICROBATCHES * BLOCKS


def test_exceptions_while_steps_are_measured():
    """They are measured later then."""

    def stage(device: Timed) -> nn.Module:
        return Stopping(*timed(device))

    schedule, (blocks,), device, handle = offloaded("ScheduleGPipe", SAVED / 16, stage, memory_budget=8 * SAVED)
    for number in range(1, 16):
        stops = number in (2, 3, 4)
        blocks.after = 1 if stops else -1
        with pytest.raises(RuntimeError, match="failed to run forward") if stops else nullcontext():
            step(schedule, device)
    assert not handle.settling
    assert handle.plan.saves
    assert handle.report().peak_resident_bytes <= 8 * SAVED


def test_a_new_plan_that_cannot_be_made(monkeypatch):
    """The other ranks wait for this one, so it goes on with the plan that it has."""

    def refuse(*arguments: object) -> None:
        raise ValueError("no plan")

    schedule, modules, device, handle = offloaded("ScheduleGPipe", SAVED / 2, skipping, fraction=1.0)

    def steps(count: int) -> None:
        for _ in range(count):
            step(schedule, device)

    steps(10)
    before = handle.plan
    assert before is not None
    assert not handle.settling
    monkeypatch.setattr("actoffload.pipeline.first_steps.plans_of", refuse)
    modules[0].skipped = {1}
    with pytest.warns(
        UserWarning, match=r"The plan stays as it is, although this rank now runs something else: no plan"
    ):
        steps(3)
    assert handle.plan is before
    monkeypatch.undo()
    steps(1)
    assert handle.plan is not before


@pytest.mark.parametrize("link", [SAVED / 4, 2 * SAVED], ids=["a plan that costs time", "one that should be free"])
def test_whole_replay_is_tried_and_kept_where_it_is_faster(link):
    """Compute takes half as long again in steps that copy, which no measured group shows."""
    schedule, _, device, handle = offloaded("ScheduleGPipe", link, memory_budget=(6 if link < SAVED else 10) * SAVED)
    device.slow = lambda: 1.5 if handle.plan is not None and handle.plan.offloaded else 1.0
    tried, seconds = [], []
    for _ in range(20):
        seconds.append(step(schedule, device))
        tried.append(handle.plan is not None and bool(handle.plan.offloaded))
        if not handle.settling:
            break
    step(schedule, device)
    assert len(seconds) == 5 + 1  # two that replay everything, two of the plan, one of whole replay; then one is kept
    assert any(tried)
    assert not handle.plan.offloaded
    assert handle.plan.saves == (None, (), (), ())  # the first group saves nothing
    assert handle.plan.because.startswith("Every group is recomputed: a step takes")
    assert handle.plan.seconds == pytest.approx(seconds[-1])
    assert handle.plan.peak_bytes <= 10 * SAVED


def test_a_device_that_is_too_small():
    """Without a budget the memory of the device is one."""
    handle, steps, _ = run("ScheduleGPipe", SAVED / 2, MEASURED + 2, memory=12 * SAVED, recompute=False)
    assert handle.plan.peak_bytes <= 12 * SAVED * 0.97
    assert all(peak <= 12 * SAVED for _, peak in steps)
