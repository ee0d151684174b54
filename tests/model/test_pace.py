"""A plan that costs time when it is measured: tried with fewer groups, each time beside passes without offloading."""

from __future__ import annotations

import pytest
from timed_device import KIB, Timed, TimedModel, offload, seconds

from actoffload.model.pace import TRIES

ALL = ["FIRST", "LEAN", "MEMORY", "BARE", "PLAN", "PLAN", "PLAN", "WARM", "NONE"]
AGAIN = ["PLAN", "PLAN", "PLAN", "WARM", "NONE"]


class Crowded(Timed):
    """Copies are free up to some bytes in a pass; each further byte makes compute slower."""

    def __init__(self, free: int, cost: float) -> None:
        super().__init__(1e4, 1e4)
        self.free, self.cost, self.copied = free, cost, 0

    def to_host(self, pairs, stream):
        super().to_host(pairs, stream)
        nbytes = sum(host.nbytes for host, _ in pairs)
        over = max(self.copied + nbytes - self.free, 0) - max(self.copied - self.free, 0)
        self.copied += nbytes
        self.main.now += self.cost * over


def measured(free: int, cost: float):
    """Return the handle of a model, the stages of its passes and their times."""
    device = Crowded(free, cost)
    model = TimedModel(device, nbytes=4 * KIB)
    handle, seen, times = offload(model, device), [], []
    for _ in range(12 + len(AGAIN) * TRIES):
        device.copied = 0
        times.append(seconds(model, device))
        stage = handle._tracker.steering._stage
        seen.append("" if stage is None else stage.name)
    return handle, [name for name in seen if name], times


@pytest.mark.parametrize(("free", "tries", "offloaded"), [(24, 0, 6), (17, 1, 4), (13, 2, 3), (9, 3, 2)])
def test_as_many_groups_as_cost_nothing(free, tries, offloaded):
    """Each group beyond costs a tenth of a pass."""
    handle, seen, times = measured(free * KIB, 2.4 / (4 * KIB))
    assert seen == ALL + AGAIN * tries
    assert handle.plan.offloaded == tuple(range(offloaded))
    assert times[-1] == pytest.approx(24, rel=0.007)
    report = handle.report()
    assert report.measured_steps is not None
    assert report.measured_steps[1] == len(ALL + AGAIN * tries)
    assert report.slowdown == pytest.approx(1.0, abs=0.007)
    assert handle.plan.because.startswith("Only" if tries else "")
    assert handle.plan.because.count("x the time without") == max(tries - 1, 0)


def test_a_plan_that_costs_time_with_any_number_of_groups():
    handle, seen, times = measured(0, 2.4 / (4 * KIB))
    assert seen == ALL + AGAIN * TRIES
    assert handle.plan.offloaded == ()
    assert times[-1] == pytest.approx(24)
    because = handle.plan.because
    assert because.startswith(
        "Nothing is offloaded, because with 6 groups offloaded (24.0 KiB) a pass took 38400.00 ms"
    )
    for number, cost in (4, "1.400"), (3, "1.300"), (2, "1.200"):
        assert f"; with {number} it took {cost} x the time without" in because
