"""The measured default with little memory, which no pass exceeds, and where costs or memory change."""

import random

import pytest
import torch
from timed_device import Timed, TimedModel, offload, seconds, small, stage_of, stages, started, step

from actoffload.tune.exchange import WINDOW

MIB = 2**20


def limited(mebibytes: float, link: float = 1e7, count: int = 12, **options) -> tuple:
    return started(link, count, round(mebibytes * MIB), **options)


def test_cached_memory_is_released_before_other_sizes_are_allocated():
    """In the first pass with a plan."""
    device, model, handle = limited(20, 1e5)
    released, found = [], []
    device.release_device = lambda: released.append(len(found))
    for _ in range(8):
        step(model)
        found.append(stage_of(handle))
    assert found[:3] == ["FIRST", "LEAN", "PLAN"]
    assert released == [2]


SCRIPT = ["FIRST", "LEAN", "PLAN", "PLAN"]


def again(seen: list[str]) -> int:
    """Return how many times the script ran."""
    return sum(now == "FIRST" and before != "FIRST" for before, now in zip(["", *seen], seen, strict=False))


# Times


@pytest.mark.parametrize("change", [lambda _: 2.0, lambda k: 1.0 + k % 2, lambda k: random.Random(k).uniform(0.8, 1.2)])
def test_times_that_change_change_no_plan(change):
    device, model, handle = small()
    stages(handle, lambda: step(model), 6)
    plan, calls = handle.plan, iter(range(10**9))
    device.slow = lambda: change(next(calls))
    assert stages(handle, lambda: step(model), 30) == [""] * 30
    assert handle.plan is plan


class Contended(Timed):
    """Copies slow compute down: by so many seconds for each copied byte."""

    cost = 0.0

    def to_host(self, pairs, stream):
        super().to_host(pairs, stream)
        self.main.now += self.cost * sum(host.nbytes for host, _ in pairs)


@pytest.mark.parametrize("cost", [0.0, 0.5, 5.0, 50.0])
def test_the_faster_of_two_plans_is_kept_if_copies_slow_compute_down(cost):
    """At most as long as replay of everything, which is known to work."""
    device = Contended(1e7, 1e7, memory=8 * MIB)
    device.cost = cost / (28 * MIB)
    model = TimedModel(device)
    handle = offload(model, device)
    seen = stages(handle, lambda: step(model), 8)
    assert seen[6:] == [""] * 2
    took = seconds(model, device)
    assert took == pytest.approx(handle.plan.seconds)
    assert took <= 1.03 * min(32.0, 25.5 + cost)
    assert bool(handle.plan.recomputed) == (took > 30)


# Inputs


def test_variable_lengths():
    device, model, handle = limited(32, count=8)
    source, steps = random.Random(0), 0
    while handle.settling:
        step(model, source.choice([2, 4, 8]))
        steps += 1
        assert steps <= 25
    seen = stages(handle, lambda: step(model, source.choice([2, 4, 8])), 5 * WINDOW)
    assert again(seen) <= 1
    assert not handle.settling
    assert device.peak() <= 32 * MIB


def test_lengths_that_alternate_between_training_and_evaluation():
    _device, model, handle = small()
    stages(handle, lambda: step(model), 6)
    plan = handle.plan
    for _ in range(4):
        assert stages(handle, lambda: step(model), 10) == [""] * 10
        for _ in range(10):
            model(torch.zeros(16, requires_grad=True))  # with a graph, without a backward
    assert handle.plan == plan
    assert plan.offloaded


def test_batches_that_are_larger_than_those_that_were_measured():
    """A plan is made for them; where a quarter of the batches is larger, none is."""
    device, model, handle = limited(32, count=8)
    stages(handle, lambda: step(model, 2), 6)
    sizes = iter([8, 2, 2, 2] * 100)
    assert again(stages(handle, lambda: step(model, next(sizes)), 10 * WINDOW)) == 0
    leanest = seconds(model, device, 8)
    seen = stages(handle, lambda: step(model, 8), 5 * WINDOW)
    assert again(seen) == 1
    assert seen[-1] == ""
    assert seconds(model, device, 8) < 0.97 * leanest
    assert device.peak() <= device.memory


# Memory


def test_an_out_of_memory_error_makes_the_next_plan_leaner():
    device, model, handle = small(recompute=False, link=1e5)
    stages(handle, lambda: step(model), 6)
    peaks = [handle.plan.peak_bytes]
    for _ in range(3):
        device.failed += 1
        seen = stages(handle, lambda: step(model), 6)
        assert seen[:2] == SCRIPT[:2]
        assert not handle.settling
        peaks.append(handle.plan.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]
    assert stages(handle, lambda: step(model), 40) == [""] * 40, "it is looked at once"
