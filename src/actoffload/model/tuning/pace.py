"""Compare what passes with a plan take with what they take without offloading.

`[Note: which pass counts]`  Two passes with the plan and two without are enough where each of the first two compares in
the same way with each of the others: the plan costs time, or it does not.  Otherwise as many are run again.  The median
counts: of two passes their mean, of four that of the two in the middle.  The fastest would be wrong where one pass
happens to be short, and where the plan costs time in each second pass only: if a program waits for the device after
every two of them, the host has no lead in the first.  A mean of all would be wrong where one happens to be long.

Passes may have a pattern: with gradient accumulation each second, third or fourth one reduces gradients, and a program
may wait for the device after some passes.  The order is N w P P w N, and the same once more, where P has the plan, N
has not, and w warms up after a change.  So P and N have the same places in a pattern of two, three or four passes.  A
device that gets slower, because it gets warm, slows both down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from ...device.base import Backend
from ...planner import GroupPlan
from ...schedule.timeline import milliseconds, size
from .findings import StepTimes
from .timed_pass import TimedPass

__all__ = ["TOLERANCE", "TRIES", "Comparison", "alike", "refer", "relative", "typical"]

TOLERANCE, SHORT_TOLERANCE, SHORT = 0.01, 0.02, 0.020  # of the time of a pass; for short passes; seconds
CAUTION = 0.7  # part of the tolerance that a plan may cost when it is measured, for passes that take longer later
MOST = 0.03  # cost, as a fraction of the time of a pass, up to which it is taken to fall with the number of groups
ALIKE = 0.05  # by how much passes with one plan differ at most, unless something else than the plan took time
FEWER, TRIES = 0.75, 3  # part of the groups of a plan that cost more, with which it is tried again; how often


@dataclass(frozen=True)
class Comparison:
    """Seconds of passes with a plan and without offloading, and the numbers of the first and last of these passes."""

    plan: GroupPlan
    offloaded: tuple[float, ...]
    without: tuple[float, ...]
    first: int
    last: int

    @staticmethod
    def of(
        plan: GroupPlan, offloaded: Sequence[TimedPass], without: Sequence[TimedPass], backend: Backend, size: int
    ) -> Comparison:
        """Compare passes that the device has run; `size` is the number of elements that the plan is for."""
        numbers = [timed.number for timed in (*offloaded, *without)]
        seconds = _seconds(offloaded, backend, size), _seconds(without, backend, size)
        return Comparison(plan, *seconds, min(numbers), max(numbers))

    @property
    def times(self) -> StepTimes:
        """What counts; see [Note: which pass counts]."""
        return StepTimes(median(self.offloaded), median(self.without), self.first, self.last)

    @property
    def cost(self) -> float:
        """How much longer a pass takes with the plan, as a fraction of its time without offloading."""
        return self.times.offloaded / self.times.without - 1

    @property
    def allowed(self) -> float:
        """What the plan may cost."""
        return CAUTION * (SHORT_TOLERANCE if self.times.without < SHORT else TOLERANCE)

    @property
    def is_free(self) -> bool:
        """Whether passes with the plan are as short as without."""
        return self.cost <= self.allowed

    @property
    def is_clear(self) -> bool:
        """Whether each pass with the plan compares in the same way with each one without."""
        short, long = min(self.offloaded) / max(self.without), max(self.offloaded) / min(self.without)
        return (short - 1 <= self.allowed) == (long - 1 <= self.allowed)

    def fewer(self) -> int:
        """Return the number of groups with which the plan is tried again.

        A small cost may fall with the number of groups.  A large cost does not: it begins where the copies no longer
        fit beside compute.
        """
        number = len(self.plan.offloaded)
        most = math.floor(number * FEWER)
        even = math.floor(number * self.allowed / self.cost) if self.cost <= MOST else 0
        return min(even or most, most)

    def because(self, others: Sequence[Comparison] = ()) -> str:
        """Return the reason for another plan, as a clause; `others` were tried afterwards, with fewer groups."""
        number, taken = len(self.plan.offloaded), milliseconds(self.times.offloaded)
        groups = "1 group" if number == 1 else f"{number} groups"
        tried = f"with {groups} offloaded ({size(self.plan.offloaded_bytes)}) a pass took {taken}"
        found = f"{tried}, without offloading {milliseconds(self.times.without)}"
        more = [f"with {len(of.plan.offloaded)} it took {1 + of.cost:.3f} x the time without" for of in others]
        return "; ".join((f"{found}, although copies should have taken no time", *more))


def typical(passes: Sequence[TimedPass], backend: Backend, size: int) -> float:
    """Return the median of the seconds of some passes, for a number of elements of the inputs."""
    return median(_seconds(passes, backend, size))


def alike(passes: Sequence[TimedPass], backend: Backend) -> bool:
    """Return whether some passes took about as long."""
    seconds = [timed.pace(backend) for timed in passes]
    return max(seconds) <= (1 + ALIKE) * min(seconds)


def _seconds(passes: Sequence[TimedPass], backend: Backend, size: int) -> tuple[float, ...]:
    # A pass that runs nothing on the device takes no time there; all are compared as ratios.
    return tuple(max(timed.pace(backend) * max(size, 1), 1e-9) for timed in passes)


def refer(plan: GroupPlan, without: float) -> GroupPlan:
    """Return a plan whose expected time refers to the measured time of whole passes without offloading."""
    if plan.seconds is None or not plan.baseline_seconds:
        return plan
    return replace(plan, seconds=plan.seconds / plan.baseline_seconds * without, baseline_seconds=without)


def relative(plan: GroupPlan) -> float:
    """Return the time of a pass with a plan, relative to that without offloading and recomputing."""
    return plan.seconds / plan.baseline_seconds if plan.seconds and plan.baseline_seconds else inf
