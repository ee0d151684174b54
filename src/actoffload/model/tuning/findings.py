"""What the first steps of a model show: plain data, which the ranks of a model can share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from ...device.base import Backend, usable
from ...planner import GroupPlan
from ...planner.variants import with_host
from ...schedule.timeline import milliseconds, size
from .group_costs import CLOCKS
from .timed_pass import Peak, Stage, TimedPass

__all__ = ["Findings", "Room", "StepTimes", "room_in"]

MORE = 0.005  # of the limit: so much more allocated memory is looked at
SMALLER = 0.9  # of a peak: the next choice that a report names


class StepTimes(NamedTuple):
    """Seconds of a pass with the plan and without offloading, and the numbers of the first and last pass compared."""

    offloaded: float
    without: float
    first: int
    last: int


class Room(NamedTuple):
    """Bytes of device memory that a pass may take, None for no limit, and the peak of one without offloading."""

    limit: int | None = None
    peak: Peak = Peak()

    def for_all(self, others: Iterable[Room]) -> Room:
        """Return the room of a rank whose plan has to fit in others too, with inputs as large as the largest of all."""
        known = [self, *(room for room in others if room.limit is not None)]
        elements = max(room.peak.elements for room in known)  # [guard: ranks whose inputs were short]
        reserve = self.free(elements) - min(room.free(elements) for room in known)
        return self.less(reserve)._replace(peak=self.peak.of(elements))

    def less(self, reserve: int) -> Room:
        """Return the room without some bytes of it."""
        return self if self.limit is None else self._replace(limit=self.limit - reserve)

    def free(self, elements: int = 0) -> int:
        """Return the bytes that are free without offloading, with as many elements; negative where it does not fit."""
        return (self.limit or 0) - self.peak.at(elements)


def room_in(lean: TimedPass, backend: Backend, budget: int | None) -> Room:
    """Return the room that there is by a measured pass that offloaded everything."""
    limit, meter = backend.memory_limit(), lean.meter
    if limit is None or meter is None or not meter.borders:
        return Room()
    limit = usable(limit, max((nbytes for sizes in lean.sizes for nbytes in sizes), default=0))
    # Earlier passes, whose backward is still to come, may keep everything.
    in_flight = lean.waiting * sum(map(sum, lean.sizes))
    limit = limit if budget is None else min(limit, budget)
    return Room(max(limit - in_flight, 0), lean.peak_without())


@dataclass
class Findings:
    """What the first steps have shown so far, and the plan that follows from it.

    Parameters
    ----------
    plan : GroupPlan, optional
        The plan that is tried, and in the end chosen.
    saves : mapping of int to tuple of str
        By group that is recomputed in the present stage: the operators whose outputs are saved.
    adopts : bool
        Whether groups are offloaded with what was saved before them.
    limit : int, optional
        Bytes of device memory that a pass may take.
    reserve : int
        Bytes by which the limit is smaller for the rank that takes most.
    size : int
        Elements of the inputs.
    least_size : int
        Fewest elements for which hooks cost nothing.
    in_flight : int
        Number of passes whose memory is needed at once.
    allocated_before : int
        Bytes of device memory that were allocated before a pass, for which the plan is.
    more : int
        Bytes that were allocated in this rank beyond those of the rank that planned.
    bare : Peak
        Of a pass without offloading: measured if such a pass fits, otherwise the sum of what was measured with
        everything offloaded.
    fits_bare : bool
        Whether such a pass is within the limit.
    again : Peak
        Of a pass in which everything is recomputed and nothing offloaded.
    host_bytes : int, optional
        Bytes to which the host memory is to be reduced now.
    planning : float
        Seconds that planning took.
    times : StepTimes, optional
        Of whole passes.
    excess : int
        Bytes by which passes may take more memory than the costs of groups add up to.
    outside : float
        Seconds of a pass before its first group and behind its last one.
    pace : float
        How many times as long passes take as the costs of groups say; see `as_timed`.
    late : float
        Seconds by which passes with the plan took longer still, negative for less.
    choose, search_frontier : partial, optional
        The functions of the planner, with the costs that were measured, or those for another host; see `for_host`.
    """

    plan: GroupPlan | None = None
    saves: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    adopts: bool = False
    limit: int | None = None
    reserve: int = 0
    size: int = 0
    least_size: int = 0
    in_flight: int = 1
    allocated_before: int = 0
    more: int = 0
    bare: Peak = field(default_factory=Peak)
    fits_bare: bool = False
    again: Peak = field(default_factory=Peak)
    host_bytes: int | None = None
    planning: float = 0.0
    times: StepTimes | None = None
    excess: int = 0
    outside: float = 0.0
    pace: float = 1.0
    late: float = 0.0
    choose: partial[GroupPlan] | None = None
    search_frontier: partial[tuple[GroupPlan, ...]] | None = None
    _next: tuple[GroupPlan, str] | None = field(default=None, init=False, repr=False, compare=False)

    def chosen(self, **changes: Any) -> GroupPlan:
        """Return the best plan by the costs that were measured; `changes` replace arguments of the planner."""
        assert self.choose is not None
        plan = self.corrected(self.choose(**changes, excess=self.excess))
        if not (self.reserve and plan.because):
            return plan
        more = f"Another rank takes {size(self.reserve)} more than the one that decides."
        return replace(plan, because=f"{plan.because} {more}")

    def for_host(self, factor: float) -> Findings:
        """Return the same with costs of groups for a host that takes `factor` times as long as it was measured."""
        choose, frontier = self.choose, self.search_frontier
        assert choose is not None
        assert frontier is not None
        names, ways, link = choose.args
        costs = names, with_host(ways, factor), link
        choose = partial(choose.func, *costs, **choose.keywords)
        return replace(self, choose=choose, search_frontier=partial(frontier.func, *costs, **frontier.keywords))

    def corrected(self, plan: GroupPlan) -> GroupPlan:
        """Return a plan by costs of groups with the peak and the times that are expected of a pass."""
        if plan.peak_bytes is not None:
            plan = replace(plan, peak_bytes=plan.peak_bytes + self.excess)
        if plan.seconds is None or plan.baseline_seconds is None:
            return plan
        seconds, baseline = plan.seconds + self.outside, plan.baseline_seconds + self.outside
        return replace(plan, seconds=seconds, baseline_seconds=baseline)

    def frontier(self) -> tuple[GroupPlan, ...]:
        """Return the plans that are worth having; none if the costs are not known."""
        if self.search_frontier is None:
            return ()
        return tuple(map(self._as_measured, map(self.corrected, self.search_frontier())))

    def as_timed(self, plan: GroupPlan, seconds: float, baseline: float | None, *, in_proportion: bool) -> GroupPlan:
        """Return a plan with the measured seconds of a pass, where none without offloading fits.

        By the costs of groups such a pass takes `baseline`.  But groups are measured in passes that wait for copies
        most of the time.  Such a device is cooler, and computes faster than in a pass with the plan.  Where ranks run
        together, their collectives run in these waits, and beside compute otherwise.  Both make a pass without
        offloading as much longer as one with the plan.  What neither explains is the plan's own.  So a pass without
        offloading changes by the same part if that is small, or if it does so `in_proportion` for such a reason.
        """
        if not plan.seconds or not baseline:
            return plan
        longer = seconds / plan.seconds
        self.pace = longer if in_proportion or abs(longer - 1) <= CLOCKS else 1.0
        self.late = seconds - self.pace * plan.seconds
        return replace(plan, seconds=seconds, baseline_seconds=self.pace * baseline)

    def _as_measured(self, plan: GroupPlan) -> GroupPlan:
        """Return a plan that is expected to be as late as the one that was measured, but no faster than without."""
        if plan.seconds is None or plan.baseline_seconds is None:
            return plan
        seconds, baseline = self.pace * plan.seconds, self.pace * plan.baseline_seconds
        if plan.offloaded or plan.recomputed:
            seconds = max(seconds + self.late, min(seconds, baseline))
        return replace(plan, seconds=seconds, baseline_seconds=baseline)

    def next_choice(self) -> str:
        """Return what a smaller peak would cost, in a sentence; empty if that is not known or there is none.

        It is searched once for each plan.
        """
        plan = self.plan
        if plan is None or self.choose is None or plan.peak_bytes is None or not plan.baseline_seconds:
            return ""
        if self._next is None or self._next[0] is not plan:
            self._next = plan, self._cost_of_less(plan, plan.peak_bytes)
        return self._next[1]

    def _cost_of_less(self, plan: GroupPlan, peak: int) -> str:
        found = self._as_measured(self.chosen(limit=round(peak * SMALLER)))
        if found.seconds is None or found.peak_bytes is None or found.peak_bytes >= peak:
            return ""
        cost = found.seconds / (found.baseline_seconds or plan.baseline_seconds or found.seconds)
        peaks = f"A peak of {size(found.peak_bytes)} instead of {size(peak)}"
        budget = f'memory_budget="{math.ceil(found.peak_bytes / 2**20)}MiB"'
        return f"{peaks} would cost at most {cost:.2f} x the time of a pass without offloading: {budget}."

    def needs(self, stage: Stage, elements: int, in_use: int = 0) -> int:
        """Return the most bytes that a pass takes.

        Parameters
        ----------
        stage : Stage
            What it is for.
        elements : int
            Of its inputs.
        in_use : int
            Bytes that are allocated before it.  An optimizer allocates its states in its first step, which may come
            after the first passes.
        """
        known = self._peak_in(stage)
        # Where other passes may be in progress, it says nothing.
        counts = self.limit is not None and self.in_flight == 1 and in_use - known.allocated > MORE * self.limit
        return known.at(elements, in_use if counts else 0)

    def fits(self, stage: Stage, elements: int, in_use: int = 0) -> bool:
        """Return whether a pass is within the limit, or takes no more than it did when it was planned; see `needs`."""
        needed = self.needs(stage, elements, in_use)
        return self.limit is None or needed <= max(self.limit, self._peak_in(stage).nbytes)

    def exceeds(self, stage: Stage, in_use: int) -> bool:
        """Return whether passes are above the limit because more is allocated before them than was expected."""
        return not self.fits(stage, 0, in_use)

    def _peak_in(self, stage: Stage) -> Peak:
        if stage is Stage.BARE_AGAIN:
            return self.again
        plan = self.plan
        if stage is not Stage.PLAN or plan is None or plan.peak_bytes is None:
            return self.bare
        if self.fits_bare and not plan.offloaded:  # [guard: plan whose peak was measured in another pass]
            return self.bare
        return Peak(plan.peak_bytes + self.more, self.size, self.allocated_before)

    def in_rank(self, room: Room, allocated: int) -> Findings:
        """Return what another rank found, for one that has its own room, and so much allocated before a pass."""
        more = allocated - self.allocated_before

        def shifted(peak: Peak) -> Peak:
            return peak._replace(nbytes=peak.nbytes + more, allocated=peak.allocated + more) if peak.nbytes else peak

        own: dict[str, Any] = {"bare": shifted(self.bare), "again": shifted(self.again), "more": more}
        limit = self.limit if room.limit is None else room.limit
        return replace(self, limit=limit, allocated_before=allocated, **own)

    def decision(self, title: str, passes: str) -> str:
        """Return what was measured in some passes of a model and decided, in a line."""
        plan = self.plan
        assert plan is not None
        number = f"{len(plan.offloaded)} of {len(plan.names)} groups of {title}"
        again = f", {len(plan.recomputed)} are recomputed" if plan.recomputed else ""
        line = f"{number} are offloaded ({size(plan.offloaded_bytes)}){again}: measured in {passes}"
        if self.planning:
            line += f", planned in {milliseconds(self.planning)}"
        if self.times is not None:
            with_, without = milliseconds(self.times.offloaded), milliseconds(self.times.without)
            line += f"; a pass takes {with_}, {without} without offloading"
        return f"{line}. {plan.because}" if plan.because else line
