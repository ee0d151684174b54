"""Passes with plans where none without offloading fits: what they take, and which plan is kept.

`[Note: peaks of plans]`  A pass must not take more than the limit, also while plans are tried: where the limit is the
memory of the device, that ends the program.  So what is predicted is the most that a pass may take.  If one takes more
all the same, all other plans are expected to take as much more.  If it takes less, they are not expected to take less:
they need the most at another place, with other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeAlias

from ...device.base import Backend
from ...planner import GroupPlan, choose_recomputed
from .findings import Findings
from .pace import TRIES, alike, typical
from .timed_pass import Stage, TimedPass

__all__ = ["Fitting", "Script", "next_pass", "trimming"]

HOSTS = (2.0, 0.5)  # times what the host took, for which other plans are tried

Script: TypeAlias = Generator[Stage, TimedPass, GroupPlan]


class _Tried(NamedTuple):
    """A plan with the peak of its passes, their seconds, and the factor of the host's times that it is best for."""

    plan: GroupPlan
    seconds: float
    factor: float


class Fitting:
    """Runs passes with plans, and finds the fastest that fits.

    Parameters
    ----------
    backend : Backend
        Of the model.
    found : Findings
        What is known by now; it is kept up to date.
    with_others : callable
        Whether the model runs in several ranks.
    """

    def __init__(self, backend: Backend, found: Findings, with_others: Callable[[], bool]) -> None:
        self._backend, self.found, self._with_others = backend, found, with_others

    def run(self, plan: GroupPlan) -> Script:
        """Run passes with a plan, and with others that may fit or be faster, and return the fastest that fits.

        Another one is chosen if they take more than the limit.  Then come those that would be best if the host were
        slower or faster than it was measured.  A plan that exceeds the limit is kept only if none was found that does
        not.
        """
        found, limit, tried = self.found, self.found.limit or inf, list[_Tried]()
        hosts, baseline = list(HOSTS), plan.baseline_seconds  # without offloading, by the costs that were measured
        factor = 1.0
        while True:
            found.plan = plan
            passes = [(yield from trimming(found, Stage.PLAN, plan))]
            passes += [(yield from next_pass(Stage.PLAN)), (yield from next_pass(Stage.PLAN))]
            passes[-1].wait(self._backend)
            if not alike(passes[1:], self._backend):  # one of them allocated memory, or was interrupted
                passes += [(yield from next_pass(Stage.PLAN))]
                passes[-1].wait(self._backend)
            seconds = typical(passes[1:], self._backend, found.size)
            # [guard: peaks of passes with smaller inputs or less memory before]
            peak = max(of.peak_at(found.size, found.allocated_before) for of in passes)
            if not peak or plan.peak_bytes is None or found.choose is None or found.in_flight > 1:
                return found.as_timed(plan, seconds, baseline, in_proportion=self._with_others())
            # See [Note: peaks of plans].
            found.excess += max(peak - plan.peak_bytes, 0)  # [guard: room for what passes take]
            tried.append(_Tried(replace(plan, peak_bytes=peak), seconds, factor))
            other = self._other([of.plan for of in tried], hosts)
            if other is None or len(tried) > TRIES:
                break
            plan, factor = other
        within = [each for each in tried if (each.plan.peak_bytes or 0) <= limit]
        best = min(within or tried, key=lambda each: each.seconds if within else each.plan.peak_bytes or 0)
        if best.factor != 1.0:  # [guard: costs by which the plan was found]
            costs = found.for_host(best.factor)
            found.choose, found.search_frontier = costs.choose, costs.search_frontier
            baseline = best.plan.baseline_seconds
        # What a host of another speed does not explain makes a pass without offloading as much longer or shorter.
        in_proportion = self._with_others() or best.factor != 1.0
        return found.as_timed(best.plan, best.seconds, baseline, in_proportion=in_proportion)

    def _other(self, tried: Sequence[GroupPlan], hosts: list[float]) -> tuple[GroupPlan, float] | None:
        """Return a plan that was not tried yet and may be better than the last one that was; None if there is none.

        With it comes the factor of the host's times that it is best for.  `hosts` are the factors for which no plan was
        searched yet.
        """
        found, known = self.found, [(of.plan, of.saves) for of in tried]
        assert found.choose is not None
        if (tried[-1].peak_bytes or 0) > (found.limit or inf):
            plan = found.chosen()
            if (plan.plan, plan.saves) not in known:
                return plan, 1.0
        while hosts and found.choose.func is choose_recomputed:
            factor = hosts.pop(0)
            costs = found.for_host(factor)
            assert costs.choose is not None
            if costs.choose.args == found.choose.args:  # the host took no time
                continue
            plan = costs.chosen()
            if (plan.plan, plan.saves) not in known:
                return plan, factor
        return None


def trimming(found: Findings, stage: Stage, plan: GroupPlan) -> Generator[Stage, TimedPass, TimedPass]:
    """Yield a stage that warms up, and let its pass begin with freeing host memory that the plan does not need."""
    found.host_bytes = plan.offloaded_bytes * found.in_flight
    timed = yield from next_pass(stage)
    found.host_bytes = None
    return timed


def next_pass(stage: Stage) -> Generator[Stage, TimedPass, TimedPass]:
    """Yield a stage until a pass of it is over, and return that pass."""
    while True:
        timed = yield stage
        if timed.stage is stage:
            return timed
