"""What is recomputed where memory is not enough, in virtual time."""

import re

import pytest
import torch
from plan_calls import copied
from timed_device import TimedModel, peaks, seconds, settle, stages, started, step
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from virtual_time import Work
from whole_model import Waves, measured

import actoffload
from actoffload.schedule import Plan

MIB = 2**20


@pytest.mark.parametrize("budget", [12 * MIB + 2**16, 30 * MIB])
@pytest.mark.parametrize("link", [3e5, 1e6])
def test_recomputation_is_faster_than_offloading_alone_within_the_same_budget(link, budget):
    times = {}
    for recompute in (False, "auto"):
        device, model, handle = started(link, memory_budget=budget, recompute=recompute)
        assert max(peaks(model, device, 8)) <= budget, "in the first passes, too"
        times[recompute] = seconds(model, device)
        assert handle.plan.seconds == pytest.approx(times[recompute], rel=0.01)
        assert handle.plan.peak_bytes <= budget
        assert bool(handle.plan.recomputed) == (recompute == "auto")
        said = "Recomputing every group, about what checkpointing does, takes at least 48000.00 ms a pass."
        assert (said in str(handle.plan)) == (said in str(handle.report())) == (recompute == "auto")
    assert times["auto"] < times[False]
    assert times["auto"] <= 4 * 12 * 1.01  # of which recomputation of all groups takes a quarter


def test_whole_replay_is_tried_where_the_plan_is_slower_than_predicted_and_the_faster_is_kept():
    device, model, handle = started(1e5, memory_budget=12 * MIB)
    planned = False
    device.slow = lambda: 1.5 if planned else 1.0
    seen = []
    for n in range(9):
        planned = n in (2, 3)
        seen += stages(handle, lambda: step(model), 1)
    assert seen == ["FIRST", "LEAN", "PLAN", "PLAN", "PLAN", "", "", "", ""]
    assert set(handle.plan.saves) <= {None, ()}, "all that is replayed is replayed as a whole"
    assert handle.plan.seconds == pytest.approx(seconds(model, device), rel=0.01)
    # What the slow plan took says nothing of a pass without it: one with whole replay takes 48 s, and 12 s of it again.
    assert handle.plan.recompute_seconds == pytest.approx(12.0, rel=0.01)
    assert handle.plan.baseline_seconds == pytest.approx(36.0, rel=0.01)
    assert "Every group is recomputed: a pass takes 48000" in handle.plan.because
    assert max(peaks(model, device, 2)) <= handle.plan.peak_bytes <= 12 * MIB


def test_the_host_memory_of_a_plan_stays_while_whole_replay_is_tried():
    device, model, handle = started(1e6, memory_budget=17 * MIB)
    planned, taken, empty_host = False, [], device.empty_host
    device.slow = lambda: 2.0 if planned else 1.0
    device.empty_host = lambda nbytes: (taken.append(len(seen)), empty_host(nbytes))[1]
    seen: list[str] = []
    for n in range(9):
        planned = n in (2, 3, 4)
        seen += stages(handle, lambda: step(model), 1)
    assert seen == ["FIRST", "LEAN", "PLAN", "PLAN", "PLAN", "", "", "", ""]
    assert "a pass." in handle.plan.because
    assert handle.plan.offloaded
    assert max(taken) == 2
    assert handle.statistics().host_bytes <= 1.05 * handle.plan.offloaded_bytes


@pytest.mark.parametrize("budget", [None, 20 * MIB])
@pytest.mark.parametrize(
    "recompute",
    [True, [torch.ops.aten.mul.Tensor], lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE],
    ids=["true", "operators", "function"],
)
def test_a_policy_of_the_program_is_followed_with_and_without_a_budget(recompute, budget):
    device, model, handle = started(3e5, memory_budget=budget, recompute=recompute)
    found = peaks(model, device, 8)
    assert not handle.settling
    assert handle.plan.recomputed == tuple(range(12))
    assert "\n  12 of 12 groups are recomputed\n" in str(handle)
    assert budget is None or max(found) <= budget


class Stemmed(TimedModel):
    """A model that computes for 5 s before its blocks, and for 7 s behind their backward."""

    def forward(self, x):
        return super().forward(Work.apply(x, self.blocks[0].device, (5.0, 7.0), 64))


def test_what_is_computed_outside_of_the_groups_counts_with_and_without_offloading():
    device, model, handle = started(3e5, 6, kind=Stemmed, memory_budget=10 * MIB)
    settle(model, handle)
    assert handle.plan.seconds == pytest.approx(seconds(model, device), rel=0.01)
    assert handle.plan.baseline_seconds == pytest.approx(30, rel=0.01)
    assert handle.frontier().plans[-1].seconds == pytest.approx(30, rel=0.01)


@pytest.mark.parametrize("layers", ["blocks", None])
def test_new_host_memory_does_not_count_as_compute(layers):
    device, model, handle = started(3e5, memory_budget=20 * MIB, layers=layers)
    device.pinning = 1e-5
    step(model, times=13)
    assert handle.plan.recomputed
    assert handle.plan.baseline_seconds == pytest.approx(36, rel=0.01)
    assert handle.plan.seconds == pytest.approx(seconds(model, device), rel=0.01)


@pytest.mark.parametrize("budget", [None, 24 * MIB])
def test_the_next_choice_of_the_report_is_true(budget):
    """What it says is done: a smaller peak, at no more than the cost that was given."""
    device, model, handle = started(6e5, memory_budget=budget)
    step(model, times=14)
    choice = handle.report().next_choice
    cost, given = re.fullmatch(r'A peak .* at most (.*) x the time .*: memory_budget="(.*)"\.', choice).groups()
    before = handle.plan.peak_bytes
    handle.remove()
    device, other, handle = started(6e5, memory_budget=given)
    assert max(peaks(other, device, 14)) <= 0.9 * before + MIB
    assert seconds(other, device) <= 36 * float(cost) * 1.01


class Rotating(Waves):
    """Blocks that all save the same angles."""

    def forward(self, x):
        angles = torch.linspace(0.0, 1.0, x.numel()).view(x.shape)
        for block in self.blocks:
            x = block(x, angles)
        return x


class Rotation(nn.Linear):
    def forward(self, x, angles):
        return x + torch.tanh(super().forward(x)) * angles


def test_what_a_recomputed_group_keeps_for_all_others_is_not_copied():
    """A copy from another group would free nothing, and its reload would take the same memory again."""
    model, x = Rotating(4, lambda: Rotation(64, 64)), torch.randn(256, 64)
    names = tuple(f"blocks.{k}" for k in range(4))
    offloaded = {}
    for saves in ((), None):
        plan = Plan.of(4, copied({1: (2, 2)}), names=names, nbytes=(x.nbytes,) * 4, saves=(saves, None, None, None))
        handle = actoffload.offload(model, plan=plan, min_bytes=64)
        for _ in range(3):  # watched; followed as a whole; then the groups alone
            statistics = measured(handle, lambda: model(x).sum().backward())
        offloaded[saves] = statistics.bytes_offloaded
        handle.remove()
    assert offloaded[None] - offloaded[()] == x.nbytes
