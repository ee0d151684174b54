"""A memory budget on a device with virtual times: kept in every pass, used, refused where it is none."""

import warnings
from itertools import pairwise

import pytest
import torch
from timed_device import RotaryModel, Timed, TimedModel, offload, peaks, seconds, settle, started, step
from torch import nn
from virtual_time import Work

import actoffload
from actoffload._arguments import budget_bytes
from actoffload.tune.script import Stage

KIB, MIB = 2**10, 2**20


def budgets(link: float) -> tuple[int, list[int]]:
    """Return the peak without offloading, and ten budgets from the smallest on that the first pass keeps, too."""
    device = Timed(link, link, memory=2**40)
    model = TimedModel(device, 12)
    (without,) = peaks(model, device, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = offload(model, device, memory_budget=1024)
        first, *others = peaks(model, device, 12)
    assert max(others) <= handle.plan.peak_bytes <= 1.003 * max(others)
    assert first <= max(others) + MIB, "a proof takes one tensor more"
    handle.remove()
    return without, [first + (without - first) * k // 9 for k in range(10)]


@pytest.mark.parametrize("part", [1.03, 1.5, 2.0])
def test_a_compiled_group_is_within_the_budget_in_each_pass(part):
    """What it saves lies on the device in any pass, for a time where it runs again: that is the smallest peak here."""
    device = Timed(1e9, 1e9, memory=2**40)
    model = TimedModel(device, nbytes=4 * MIB)
    for block in model.blocks:
        block.forward = torch._dynamo.disable(block.forward)
        block.compile(backend="eager")
    budget = round(part * 4 * MIB)
    handle = offload(model, device, memory_budget=budget)
    assert max(peaks(model, device, 10)) <= budget
    assert not handle.settling
    assert seconds(model, device) <= 1.01 * 8 * 3.0, "copies are fast"


@pytest.mark.parametrize("paused", [2, 3])
def test_a_pause_of_the_host_in_one_pass_does_not_change_the_plan(paused):
    """A pass that takes longer than was simulated runs once more."""

    def plan(paused: int) -> str:
        device, model, handle = started(memory_budget=12 * MIB)
        for number in range(9):
            device.slow = lambda number=number: 3.0 if number == paused else 1.0
            step(model)
        assert not handle.settling
        return str(handle.plan.steps) + str(handle.plan.saves)

    assert plan(paused) == plan(-1)


@pytest.mark.parametrize("link", [3e5, 1e7])
def test_ten_budgets_are_never_exceeded_and_more_memory_is_never_slower(link):
    without, limits = budgets(link)
    times = []
    for limit in limits:
        device, model, handle = started(link, memory_budget=limit)
        assert max(peaks(model, device, 8)) <= limit, "in the first passes, too"
        assert not handle.settling
        times.append(seconds(model, device))
        assert handle.plan.peak_bytes <= limit
        assert handle.plan.seconds == pytest.approx(times[-1], rel=0.01)
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(times))
    assert times[-1] <= 36 * 1.01
    assert limits[0] < without / 3


class Repeating(TimedModel):
    """Runs its blocks twice, as ALBERT runs its layer many times."""

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize("part", [0.6, 0.75, 0.9])
def test_blocks_that_run_several_times_keep_the_budget(part):
    """They are not replayed by a plan, and what they then save is counted."""
    without = max(peaks(Repeating(device := Timed(1e7, 1e7, memory=2**40), 6), device, 1))
    device, model, handle = started(1e7, 6, kind=Repeating, memory_budget=round(part * without))
    found = peaks(model, device, 10)
    assert max(found) <= part * without
    assert not handle.settling
    assert found[-1] <= handle.plan.peak_bytes <= 1.003 * found[-1]


def test_what_makes_whole_passes_longer_counts_for_the_time_without_offloading_too():
    """A pass that is measured by group waits for copies; what else it does then takes time from compute later."""
    device, model, handle = started(3e5, 6, memory_budget=10 * MIB)
    for n in range(8):
        device.slow = lambda n=n: 1.0 if n < 2 else 1.1
        step(model)
    assert handle.plan.seconds == pytest.approx(seconds(model, device), rel=0.01)
    for plan in handle.plan, handle.frontier().plans[-1]:
        assert plan.baseline_seconds == pytest.approx(1.1 * 18, rel=0.03)


class Mistaken(Timed):
    """A device on which passes with a plan take more memory than was predicted, or less."""

    more = 0

    def allocated(self) -> tuple[int, int] | None:
        now, peak = super().allocated() or (0, 0)
        planned = self.handle._tracker.steering.stage is Stage.PLAN
        return now, peak + (self.more if planned else 0)


@pytest.mark.parametrize("recompute", [False, "auto"])
def test_a_plan_that_takes_more_memory_than_was_predicted_is_replaced(recompute):
    budget, times = 20 * MIB, {}
    for more in (-6 * MIB, 0, 4 * MIB):
        device = Mistaken(1e6, 1e6, memory=2**40)
        device.more = more
        model = TimedModel(device, 12)
        device.handle = handle = offload(model, device, memory_budget=budget, recompute=recompute)
        found = peaks(model, device, 12)
        assert not handle.settling
        assert found[-1] + more <= handle.plan.peak_bytes <= budget
        assert "above the limit of 20.0 MiB." in handle.plan.because, "the one that was given"
        times[more] = seconds(model, device)
        assert handle.plan.seconds == pytest.approx(times[more], rel=0.01)
        assert not more or "MiB" in handle.report().next_choice
        handle.remove()
    assert times[-6 * MIB] <= times[0] < times[4 * MIB]


@pytest.mark.parametrize("more", [0, 4 * MIB])
def test_a_pass_that_keeps_everything_and_takes_more_than_the_budget_is_followed_by_a_plan(more):
    device = Mistaken(1e6, 1e6, memory=2**40)
    device.more = more
    model = TimedModel(device, 12)
    (without,) = peaks(model, device, 1)
    device.handle = handle = offload(model, device, memory_budget=without + 2 * MIB)
    found = peaks(model, device, 8)
    assert not handle.settling
    assert found[-1] + more <= handle.plan.peak_bytes <= without + 2 * MIB
    if more:
        assert f"the peak would be {(without + more) / MIB:.1f} MiB, above the limit" in handle.plan.because
    else:
        assert handle.plan.because.startswith("Fits: ")


@pytest.mark.parametrize(("link", "count"), [(1e5, 4), (1e6, 8)])
def test_budgets_of_a_frontier_have_room_for_what_groups_share(link, count):
    """A plan that offloads few of the groups copies it with these, and the others keep it."""

    def run(budget: int) -> tuple[actoffload.OffloadHandle, int]:
        device = Timed(link, link, memory=2**40)
        model = RotaryModel(device, count, MIB, 2**19)
        handle = offload(model, device, memory_budget=budget, recompute=False)
        found = peaks(model, device, 24)
        assert not handle.settling
        return handle, max(found)

    with pytest.warns(UserWarning, match="smallest peak"):
        handle, _ = run(KIB)
    for plan in handle.frontier().plans:
        budget = plan.peak_bytes
        other, peak = run(budget)
        assert peak <= budget
        other.remove()


@pytest.mark.parametrize("memory", [20 * MIB, 2**40])
def test_a_budget_that_no_plan_reaches(memory):
    device, model, handle = started(count=8, memory=memory, memory_budget="1MiB")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step(model, times=12)
    (warning,) = found
    want = "memory_budget is 1.0 MiB, but the smallest peak that a plan reaches is 4.0 MiB: that plan is used."
    assert str(warning.message) == want
    assert "smallest peak" in handle.plan.because
    plan = handle.plan
    assert peaks(model, device, 24) == [4 * MIB] * 24
    assert handle.plan is plan, "it is not measured again and again"


def test_a_fraction_of_the_device():
    device, model, handle = started(count=8, memory=64 * MIB, memory_budget=0.25)
    device.memory_limit = lambda: 32 * MIB  # a fraction is not of what the process may use
    settle(model, handle)
    assert 8 * MIB < handle.plan.peak_bytes <= 16 * MIB
    assert budget_bytes(0.5, None) is None, "the memory of the device is not known"


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        (1024, 1024),
        ("24GiB", 24 * 2**30),
        (" 1.5 gb ", 1_500_000_000),
        ("3kB", 3000),
        ("7B", 7),
        ("2TiB", 2**41),
        (24e9, 24_000_000_000),
        (0.5, 500),
        (1.0, 1000),
    ],
)
def test_budgets_in_bytes(budget, nbytes):
    assert budget_bytes(budget, 1000) == nbytes


@pytest.mark.parametrize("budget", [True, "24", "GiB", "-1GiB", "24 G", 0, -5, 24, 0.0, 1.5, float("nan"), [1], "0MiB"])
def test_what_is_no_budget(budget):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    with pytest.raises((TypeError, ValueError), match=r"memory_budget is .*; expected bytes, such as .*'24GiB', or a"):
        actoffload.offload(model, memory_budget=budget)


@pytest.mark.parametrize("by_hand", [{"num_layers": 2}, {"fraction": 0.5}, {"max_inflight": 1}, {"plan": "plan.json"}])
def test_a_budget_and_a_choice_by_hand(by_hand):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    with pytest.raises(ValueError, match="memory_budget is kept by measuring: leave out num_layers"):
        actoffload.offload(model, memory_budget="1GiB", **by_hand)


# The frontier


def test_the_frontier_of_a_measured_model():
    device = Timed(3e5, 3e5, memory=2**40)
    model = TimedModel(device, 8)
    (without,) = peaks(model, device, 1)
    handle = offload(model, device, memory_budget=16 * MIB)
    with pytest.raises(RuntimeError, match=r"not known yet: run steps until handle\.settling is False"):
        handle.frontier()
    settle(model, handle)
    found = handle.frontier()
    assert found.present is handle.plan or found.present == handle.plan
    of_peak, times = [plan.peak_bytes for plan in found.plans], [plan.seconds for plan in found.plans]
    assert of_peak == sorted(of_peak)
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times) >= 5
    assert times[-1] == pytest.approx(24)
    assert of_peak[0] < 9 * MIB
    assert 26 * MIB <= of_peak[-1] <= without
    assert found.plans[0].recomputed
    assert not found.plans[-1].recomputed
    reasons = [plan.because for plan in found.plans]  # no limit was given
    assert reasons[0] == "This is about the smallest peak that a plan reaches."
    assert set(reasons[1:-1]) == {"This is the fastest plan that was found with at most this peak."}
    assert reasons[-1] == "This plan offloads nothing."
    for plan in found.plans[::3]:  # what the data say is what these plans take
        other = TimedModel(device, 8)
        repeated = offload(other, device, layers=None, plan=plan)
        step(other)
        (peak,) = peaks(other, device, 1)
        assert 0.97 * plan.peak_bytes <= peak <= plan.peak_bytes
        assert seconds(other, device) == pytest.approx(plan.seconds, rel=0.01)
        repeated.remove()
    text = str(found)
    assert "x no offload" in text
    assert "present plan" in text
    assert len(text.splitlines()) == len(found.plans) + 3
    pytest.importorskip("matplotlib").use("agg")
    axes = found.plot()
    plans, present = axes.get_lines()
    assert len(plans.get_xdata()) == len(found.plans)
    assert present.get_xdata() == pytest.approx([handle.plan.peak_bytes / MIB])
    assert axes.get_xlabel() == "peak of device memory (MiB)"


class WithLoss(TimedModel):
    """Blocks, and a loss behind them that saves much: it is kept, and freed before backward comes to a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(super().forward(x), self.blocks[0].device, (1.0, 1.0), 24 * MIB)


@pytest.mark.parametrize("budget", [30 * MIB, 34 * MIB])
def test_what_a_loss_saves_counts_in_the_first_plan(budget):
    device = Timed(1e6, 1e6, memory=2**40)
    model = WithLoss(device, 12)
    handle = offload(model, device, memory_budget=budget)
    assert max(peaks(model, device, 10)) <= budget
    assert not handle.settling
