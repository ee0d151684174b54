"""A plan that costs time when it is measured: tried with fewer groups, each time beside passes without offloading."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from timed_device import KIB, Timed, TimedModel, offload, seconds

from actoffload.model.tuning.pace import TRIES

ALL = ["FIRST", "LEAN", "MEMORY", "BARE", "PLAN", "PLAN", "PLAN", "WARM", "NONE"]
AGAIN = ["PLAN", "PLAN", "PLAN", "WARM", "NONE"]
MORE = ["NONE", *AGAIN]
"""Further passes with a plan where the first ones do not say whether it costs time."""
GROUP = 4 * KIB


class Crowded(Timed):
    """Copies to the host cost time at the end of a forward, by the bytes that a pass copies."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        super().__init__(1e4, 1e4)
        self.cost, self.copied = cost, 0

    def to_host(self, pairs, stream):
        super().to_host(pairs, stream)
        before, self.copied = self.copied, self.copied + sum(host.nbytes for host, _ in pairs)
        self.main.now += self.cost(self.copied) - self.cost(before)


def beyond(free: int, cost: float) -> Callable[[int], float]:
    """Copies are free up to some bytes in a pass; each further byte makes compute slower."""
    return lambda copied: cost * max(copied - free, 0)


def measured(cost: Callable[[int], float], noise: Callable[[int], float] = lambda number: 1.0):
    """Return the handle of a model, the stages of its passes and their times; `noise` is a factor for each pass."""
    device = Crowded(cost)
    model = TimedModel(device, nbytes=GROUP)
    handle, seen, times = offload(model, device), [], []
    for number in range(1, 13 + len(AGAIN + MORE) * (TRIES + 1)):
        device.copied = 0
        device.slow = lambda number=number: noise(number)
        times.append(seconds(model, device))
        stage = handle._tracker.steering._first.stage
        seen.append("" if stage is None else stage.name)
    return handle, [name for name in seen if name], times


@pytest.mark.parametrize(("free", "tries", "offloaded"), [(24, 0, 6), (17, 1, 4), (13, 2, 3), (9, 3, 2)])
def test_as_many_groups_as_cost_nothing(free, tries, offloaded):
    """Each group beyond costs a tenth of a pass."""
    handle, seen, times = measured(beyond(free * KIB, 2.4 / GROUP))
    assert seen == ALL + AGAIN * tries
    assert handle.plan.offloaded == tuple(range(offloaded))
    assert times[-1] == pytest.approx(24, rel=0.007)
    report = handle.report()
    assert report.measured_passes is not None
    assert report.measured_passes[1] == len(ALL + AGAIN * tries)
    assert report.slowdown == pytest.approx(1.0, abs=0.007)
    assert handle.plan.because.startswith("Only" if tries else "")
    assert handle.plan.because.count("x the time without") == max(tries - 1, 0)


def test_a_plan_that_costs_time_with_any_number_of_groups():
    handle, seen, times = measured(beyond(0, 2.4 / GROUP))
    assert seen == ALL + AGAIN * TRIES
    assert handle.plan.offloaded == ()
    assert times[-1] == pytest.approx(24)
    because = handle.plan.because
    assert because.startswith(
        "Nothing is offloaded, because with 6 groups offloaded (24.0 KiB) a pass took 38400.00 ms"
    )
    for number, cost in (4, "1.400"), (3, "1.300"), (2, "1.200"):
        assert f"; with {number} it took {cost} x the time without" in because


def test_a_small_cost_that_does_not_fall_with_the_number_of_groups():
    """Of all groups 0.9 %, of fewer 4.7 %: no plan is kept that was not measured."""
    handle, seen, times = measured(lambda copied: 0.0 if not copied else 0.216 if copied > 5 * GROUP else 1.128)
    assert seen == ALL + AGAIN * TRIES
    assert handle.plan.offloaded == ()
    assert times[-1] == pytest.approx(24)
    assert "; with 4 it took 1.047 x the time without" in handle.plan.because


@pytest.mark.parametrize(("cost", "tries", "offloaded"), [(0.009, 1, 4), (0.015, 1, 2), (0.025, 1, 1), (0.035, 2, 1)])
def test_a_small_cost_that_falls_with_the_number_of_groups(cost, tries, offloaded):
    handle, seen, _ = measured(beyond(0, cost * 24 / (6 * GROUP)))
    assert seen == ALL + AGAIN * tries
    assert handle.plan.offloaded == tuple(range(offloaded))
    report = handle.report()
    assert report.slowdown == pytest.approx(1 + cost * offloaded / 6)
    assert report.measured_passes is not None
    assert report.measured_passes[1] == len(seen)


# Noise


def always(copied: int) -> float:
    """Return what costs 2.8 % of a pass, however little is copied."""
    return 0.672 if copied else 0.0


@pytest.mark.parametrize(("number", "factor"), [(6, 0.97), (7, 0.96), (6, 1.05), (9, 1.05)])
def test_one_pass_that_is_short_or_long_makes_no_plan_free(number, factor):
    handle, _, times = measured(always, lambda of: factor if of == number else 1.0)
    assert handle.plan.offloaded == ()
    assert "without offloading 24000.00 ms" in handle.plan.because
    assert "it took 1.028 x the time without" in handle.plan.because
    assert times[-1] == pytest.approx(24)


@pytest.mark.parametrize(("number", "factor"), [(4, 0.97), (9, 0.96), (6, 1.05), (7, 1.05), (14, 0.97)])
def test_one_pass_that_is_short_or_long_makes_no_plan_cost_time(number, factor):
    handle, seen, _ = measured(beyond(0, 0.0), lambda of: factor if of == number else 1.0)
    assert seen == (ALL + MORE if number <= len(ALL) else ALL)
    assert handle.plan.offloaded == tuple(range(6))
    assert handle.plan.because == ""
    assert handle.report().slowdown == pytest.approx(1.0)


@pytest.mark.parametrize("longer", [0.99, 1.1])
@pytest.mark.parametrize(("period", "phase"), [(of, k) for of in (2, 3, 4) for k in range(of)])
def test_patterns_of_passes(period, phase, longer):
    """As with gradient accumulation, or in programs that wait for the device now and then."""

    def noise(number: int) -> float:
        return longer if number % period == phase else 1.0

    free, _, _ = measured(beyond(0, 0.0), noise)
    assert free.plan.offloaded == tuple(range(6))
    costly, _, _ = measured(always, noise)
    assert costly.plan.offloaded == ()


@pytest.mark.parametrize("phase", [0, 1])
def test_a_plan_that_costs_time_in_each_second_pass(phase):
    """Of it 2.8 %, as in a program that waits for the device after every two passes, and the host has no lead then."""
    device = Crowded(beyond(0, 0.0))
    model = TimedModel(device, nbytes=GROUP)
    handle = offload(model, device)
    for number in range(13 + len(AGAIN + MORE) * (TRIES + 1)):
        device.cost = always if number % 2 == phase else beyond(0, 0.0)
        device.copied = 0
        seconds(model, device)
    assert handle.plan.offloaded == ()


@pytest.mark.parametrize("seed", range(4))
def test_noise_of_half_a_percent(seed):
    source = random.Random(seed)
    factors = [source.uniform(0.9975, 1.0025) for _ in range(100)]
    free, seen, _ = measured(beyond(0, 0.0), factors.__getitem__)
    assert seen == ALL
    assert free.plan.offloaded == tuple(range(6))
    costly, _, _ = measured(always, factors.__getitem__)
    assert costly.plan.offloaded == ()
