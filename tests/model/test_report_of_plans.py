"""Reports of models whose plan was measured or given: rows of groups as they run now, what is recomputed, and `R`."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from plan_calls import copied
from timed_device import Temporary, Timed, TimedModel, offload, small, stage_of, stages, started, step
from torch import nn

import actoffload
from actoffload._text import milliseconds, size
from actoffload.report import Report
from actoffload.schedule import Action, Do, Event, Plan, When

MIB = 2**20
BLOCK = 4 * MIB


def budgeted(link: float, budget: int, kind: type[TimedModel] = TimedModel, **more):
    """Return a model and its handle, after some steps with the plan that was measured."""
    _device, model, handle = started(link, kind=kind, memory_budget=budget, **more)
    step(model, times=18)
    assert not handle.settling
    return model, handle


# Measured


@pytest.mark.parametrize(("link", "offloads"), [(1e5, False), (1e6, True)])
def test_rows_are_those_of_groups_as_they_run_now(link, offloads):
    """In the pass before the plan every group was recomputed, and saved nothing."""
    model, handle = budgeted(link, 20 * MIB)
    plan, report = handle.plan, handle.report()
    assert bool(plan.offloaded) == offloads
    assert 0 < len(plan.recomputed) < 12
    for k, group in enumerate(report.groups):
        again = k in plan.recomputed
        assert group.recomputed == again
        assert group.bytes_saved + group.bytes_recomputed == BLOCK
        assert bool(group.bytes_recomputed) == again
        assert group.bytes_offloaded == (group.bytes_saved if k in plan.offloaded else 0)
    assert report.totals.bytes_recomputed == sum(plan.recomputed_nbytes)
    # What the plan is expected to cost.
    assert (report.peak_bytes, report.seconds) == (plan.peak_bytes, plan.seconds)
    assert report.baseline_peak_bytes == 12 * BLOCK
    assert str(report).startswith(f"Saves {size(report.baseline_peak_bytes - plan.peak_bytes)}: the peak is ")
    assert f" A pass takes {milliseconds(plan.seconds)} instead of " in report.gain
    with handle.recording():
        step(model)
    rows = [(group.bytes_saved, group.recomputed) for group in report.groups]
    assert [(group.bytes_saved, group.recomputed) for group in handle.report().groups] == rows


def test_rows_are_those_of_the_plan_where_whole_replay_was_tried_last():
    device, model, handle = small(1e6, memory=2 * MIB)
    device.slow = lambda: 1.0 if stage_of(handle) in ("FIRST", "LEAN") else 1.3
    tried = stages(handle, lambda: step(model), 8)
    assert tried == ["FIRST", "LEAN", "PLAN", "PLAN", "PLAN", "", "", ""]
    plan, report = handle.plan, handle.report()
    assert plan.offloaded == (0, 1, 2, 3, 4)
    assert not plan.recomputed
    assert [group.bytes_offloaded for group in report.groups] == [MIB] * 5 + [0]
    assert not any(group.recomputed for group in report.groups)


def test_groups_that_are_recomputed_in_any_case():
    """Only the first call of the first one is not."""
    _device, model, handle = started(1e9, 6, recompute=True)
    step(model, times=14)
    report = handle.report()
    assert not report.totals.offloaded
    assert all(group.recomputed and not group.bytes_saved for group in report.groups)
    assert all(group.bytes_recomputed == BLOCK for group in report.groups)


# Freed


class LargeBackward(TimedModel):
    """The backward of its last block needs memory for a time, as that of a loss does."""

    def __init__(self, device: Timed, count: int) -> None:
        super().__init__(device, count)
        forward = self.blocks[-1].forward
        self.blocks[-1].forward = lambda x: Temporary.apply(forward(x), device, 0, 2 * BLOCK)


def test_what_the_plan_frees_in_backward_is_not_expected_before():
    _model, handle = budgeted(1e6, 46 * MIB, LargeBackward, recompute=False)
    events = [handle.plan.find(Do.RELEASE, k) for k in handle.plan.offloaded]
    late = [event for event in events if event.when is When.BACKWARD_START]
    assert 0 < len(late) < len(events)
    report = handle.report()
    assert report.expected_bytes == report.dropped_bytes == (len(events) - len(late)) * BLOCK
    assert report.r == 1.0
    forward = f"{report.expected_bytes // MIB}.0 MiB"
    assert f"100.00 %, {forward} of {forward} that the plan frees in forward" in str(report)


# Given


class Mlp(nn.Module):
    """Saves its input, the outputs of its first product and of `gelu`: one, four and four times the bytes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


ROWS = torch.randn(128, 64)
UNIT = ROWS.nbytes
NAMES = tuple("012345")


def given(*, released: Event, steps: int = 3, **more) -> Report:
    """Return the report of a model whose second group is offloaded by a plan, and whose next two are recomputed."""
    model = nn.Sequential(*[Mlp() for _ in NAMES])
    calls = [
        (Event(When.FORWARD_START, 1), Action(Do.OFFLOAD, 1)),
        (released, Action(Do.RELEASE, 1)),
        (Event(When.BACKWARD_START, 2), Action(Do.RELOAD, 1)),
    ]
    nbytes = (9 * UNIT, 9 * UNIT, UNIT, 5 * UNIT, 9 * UNIT, 9 * UNIT)
    less = (0, 0, 8 * UNIT, 4 * UNIT, 0, 0)
    saves = (None, None, (), ("aten.addmm.default#0",), None, None)
    plan = Plan.of(6, calls, names=NAMES, nbytes=nbytes, recomputed_nbytes=less, saves=saves, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = actoffload.offload(model, plan=plan, min_bytes=64)
    for _ in range(steps):
        model(ROWS * 1.0).sum().backward()
    report = handle.report()
    handle.remove()
    return report


def saved(report: Report) -> Sequence[tuple[int, int]]:
    return [(group.bytes_saved // UNIT, group.bytes_recomputed // UNIT) for group in report.groups]


IN_FORWARD, IN_BACKWARD = Event(When.FORWARD_END, 3), Event(When.BACKWARD_START, 4)


def test_a_plan_that_was_given_has_rows_of_later_steps():
    report = given(released=IN_FORWARD)
    assert saved(report) == [(9, 0), (9, 0), (1, 8), (5, 4), (9, 0), (9, 0)]
    assert [group.offloaded for group in report.groups] == [k == 1 for k in range(6)]
    assert report.coverage == pytest.approx(1.0)
    assert saved(given(released=IN_FORWARD, steps=1))[2] == (1, 8), "what the first call made again was dropped"


@pytest.mark.parametrize("released", [IN_FORWARD, IN_BACKWARD])
def test_a_plan_that_frees_in_forward_or_in_backward(released):
    report = given(released=released)
    assert report.expected_bytes == report.dropped_bytes == (9 * UNIT if released is IN_FORWARD else 0)
    assert report.r == (1.0 if released is IN_FORWARD else None)


def test_expected_times_are_not_shown_where_they_are_of_another_device():
    report = given(released=IN_FORWARD, seconds=1.0, baseline_seconds=0.9)
    assert report.seconds == 1.0
    assert "A pass takes" not in str(report)


def test_a_step_with_a_plan_that_was_given_is_recorded():
    """Also when groups alone are followed."""
    device = Timed(1e6, 1e6, memory=2**40)
    model = TimedModel(device)
    plan = Plan.of(8, copied({0: (5, 2)}), names=tuple(f"blocks.{k}" for k in range(8)), nbytes=(BLOCK,) * 8)
    handle = offload(model, device, layers=None, plan=plan)
    step(model, times=3)
    with handle.recording():
        step(model)
    assert handle.report().step_seconds == pytest.approx(24.0)
