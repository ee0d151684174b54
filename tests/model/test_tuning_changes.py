"""The measured default when costs are not what was predicted, or do not stay what they were."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from timed_device import Timed, TimedModel, offload, seconds, stages, step

from actoffload.model.tuning.drift import PATIENCE
from actoffload.model.tuning.lockstep import WINDOW
from actoffload.model.tuning.pace import TRIES

MIB = 2**20


KIB = 2**10


def settled(link: float = 1e4, passes: int = 10) -> tuple[Timed, TimedModel, object]:
    """Return a device, a model of 8 blocks of 4 KiB, and the handle with a plan."""
    device = Timed(link, link)
    device.behind = False  # events are read as soon as they may be
    model = TimedModel(device, nbytes=4 * KIB)
    handle = offload(model, device)
    for _ in range(passes):
        step(model)
    return device, model, handle


# Another cost than predicted


class Contended(Timed):
    """Copies slow compute down: by so many seconds for each copied byte."""

    def __init__(self, cost: float) -> None:
        super().__init__(1e7, 1e7)
        self.cost = cost

    def to_host(self, pairs, stream):
        super().to_host(pairs, stream)
        self.main.now += self.cost * sum(host.nbytes for host, _ in pairs)


@pytest.mark.parametrize(
    ("slower", "offloaded"), [(0.0, 6), (0.006, 6), (0.009, 4), (0.015, 2), (0.025, 1), (0.035, 1), (0.05, 0)]
)
def test_a_plan_that_costs_more_than_predicted_is_cut_or_dropped(slower, offloaded, caplog):
    device = Contended(slower * 24 / (24 * MIB))
    model = TimedModel(device)
    handle = offload(model, device)
    with caplog.at_level(logging.INFO, "actoffload"):
        times = [seconds(model, device) for _ in range(12 + 5 * TRIES)]
    assert len(handle.plan.offloaded) == offloaded
    assert times[-1] <= 24 * 1.01
    (line,) = (record.getMessage() for record in caplog.records)
    if offloaded < 6:
        reason_begins = "Nothing is offloaded, because"
        reason = f"because with 6 groups offloaded (24.0 MiB) a pass took {24e3 * (1 + slower):.2f} ms"
        assert reason in line
        assert reason in handle.report().because
        assert reason in handle.plan.because
        assert len(handle.report().offloaded_groups) == offloaded
        assert handle.report().advice[0].startswith("Nothing to change" if offloaded else reason_begins)
    else:
        assert not handle.plan.because


class SlowHost(Timed):
    """The host takes as long as the device, and longer for each copy."""

    def compute(self, seconds):
        super().compute(seconds)
        self.host += seconds

    def to_host(self, pairs, stream):
        super().to_host(pairs, stream)
        self.host += 0.01


def test_host_time_of_hooks_counts():
    device = SlowHost(1e9, 1e9)
    device.behind = False
    model = TimedModel(device)
    handle = offload(model, device)
    for _ in range(12):
        step(model)
    assert not handle.plan.offloaded
    assert "the host is as slow as the device" in handle.plan.because


# Later changes


def plans(handle, model, device, passes: int, elements=lambda: 4) -> int:
    """Run passes; return how many times the first steps were measured again."""
    settling = []
    seen = stages(handle, lambda: (step(model, elements()), settling.append(handle.settling)), passes)
    assert settling == [stage != "" for stage in seen]
    return sum(now == "LEAN" and before != "LEAN" for before, now in zip(["", *seen], seen, strict=False))


def test_noise_of_5_percent_changes_nothing():
    device, model, handle = settled()
    source = random.Random(0)
    device.slow = lambda: source.uniform(0.95, 1.05)
    assert plans(handle, model, device, 400) == 0


def test_a_slower_device_is_measured_again():
    device, model, handle = settled(2.5e3)
    before = handle.plan.offloaded_bytes
    step_times = WINDOW * WINDOW
    assert plans(handle, model, device, step_times) == 0
    device.slow = lambda: 2.0
    assert plans(handle, model, device, 2 * step_times + 10) == 1
    assert handle.plan.offloaded_bytes > before, "there is more compute to copy beside"


def test_costs_that_change_all_the_time_are_measured_again_ever_more_rarely():
    device, model, handle = settled()
    passes = [0]

    def slow() -> float:
        return 1.0 + (passes[0] // 100) % 2

    device.slow = slow

    def elements() -> int:
        passes[0] += 1
        return 4

    count = plans(handle, model, device, 700, elements)
    assert 1 <= count <= 3


@pytest.mark.parametrize("elements", [2, 8])
def test_other_inputs_are_measured_after_a_while(elements):
    device, model, handle = settled()
    assert plans(handle, model, device, PATIENCE - 2, lambda: elements) == 0
    assert plans(handle, model, device, 20, lambda: elements) == 1
    assert handle.plan.nbytes == (elements * KIB,) * 8
    assert plans(handle, model, device, 100, lambda: 4) == 0, "the patience has doubled"
    assert plans(handle, model, device, 60, lambda: 4) == 1


def test_variable_lengths_are_not_measured_again():
    device, model, handle = settled()
    source = random.Random(1)
    count = plans(handle, model, device, 300, lambda: source.choice([2, 4, 8]))
    assert count == 0


@pytest.mark.parametrize("seed", range(6))
def test_variable_lengths_while_measuring(seed):
    """What passes of other lengths take does not count for or against the plan."""
    device = Timed(1e7, 1e7)
    model = TimedModel(device)
    handle = offload(model, device)
    source = random.Random(seed)
    steps = 0
    while handle.settling:
        step(model, source.choice([2, 4, 8]))
        steps += 1
    assert steps <= 9 + 3 * 4, "those with shorter inputs are repeated"
    assert handle.plan.offloaded == tuple(range(6))
    assert handle.plan.seconds == pytest.approx(handle.plan.baseline_seconds, rel=0.01)


def test_lengths_that_alternate_between_training_and_evaluation():
    device, model, handle = settled()
    for _ in range(12):
        assert plans(handle, model, device, 10) == 0
        for _ in range(10):
            model(torch.zeros(16, requires_grad=True))  # with a graph, without a backward
    assert handle.plan.offloaded == tuple(range(6))


def test_the_first_steps_are_warm_the_second_time():
    _device, model, handle = settled()
    seen = stages(handle, lambda: step(model, 8), PATIENCE + 20)
    assert [stage for stage in seen if stage] == ["LEAN", "MEMORY", "BARE", "PLAN", "PLAN", "PLAN", "WARM", "NONE"]


def test_numbers_of_the_passes_in_the_log(caplog):
    with caplog.at_level(logging.INFO, "actoffload"):
        _device, model, handle = settled()
        seen = stages(handle, lambda: step(model, 8), PATIENCE + 20)
    first, second = (record.getMessage() for record in caplog.records)
    begun = 11 + seen.index("LEAN")
    assert "measured in passes 1 to 9" in first
    assert f"measured in passes {begun} to {begun + 7}" in second
    assert handle.report().measured_passes == (begun + 2, begun + 7)
