"""What the first passes of a model show: plain data, which the ranks of a model can share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from ...planner import GroupPlan
from ...schedule.timeline import milliseconds, size
from .timed_pass import Peak, Stage

__all__ = ["Findings", "Room"]

MORE = 0.005  # part of the limit: less additional memory before a pass changes nothing
SMALLER = 0.9  # of a peak: the next choice that a report names


class Room(NamedTuple):
    """Bytes of device memory that a pass may take, None for no limit, and the peak of the leanest pass."""

    limit: int | None = None
    peak: Peak = Peak()

    def for_all(self, others: Iterable[Room]) -> Room:
        """Return the room of a rank whose plan has to fit in others too, with inputs as large as the largest of all."""
        known = [self, *(room for room in others if room.limit is not None)]
        elements = max(room.peak.elements for room in known)  # [guard: ranks whose inputs were short]
        reserve = self.free(elements) - min(room.free(elements) for room in known)
        return self.less(reserve)._replace(peak=self.peak.scaled_to(elements))

    def less(self, reserve: int) -> Room:
        """Return the room without some bytes of it."""
        return self if self.limit is None else self._replace(limit=self.limit - reserve)

    def free(self, elements: int = 0) -> int:
        """Return the bytes that the leanest pass leaves free, with as many elements; negative where it does not fit."""
        return (self.limit or 0) - self.peak.at(elements)


@dataclass
class Findings:
    """What the first passes have shown so far, and the plan that follows from it.

    Parameters
    ----------
    plan : GroupPlan, optional
        The plan that is tried, and in the end kept.
    adopts : bool
        Whether groups are offloaded with what was saved before them.
    limit : int, optional
        Bytes of device memory that a pass may take.
    reserve : int
        Bytes by which the limit is smaller for the rank that takes most.
    size : int
        Elements of the inputs.
    in_flight : int
        Number of passes whose memory is needed at once.
    allocated_before : int
        Bytes of device memory that were allocated before a pass, for which the plan is.
    more : int
        Bytes that were allocated in this rank beyond those of the rank that planned.
    bare : Peak
        Of a pass in which everything is kept, as it is expected or was measured.
    host_bytes : int, optional
        Bytes to which the host memory is reduced at the start of this pass.
    planning : float
        Seconds that planning took.
    excess : int
        Bytes by which passes took more memory than the costs of groups add up to.
    outside : float
        Seconds of a pass before its first group and behind its last one.
    pace : float
        Measured seconds of a pass with the plan, by the seconds that were expected.
    choose, search_frontier : partial, optional
        The functions of the planner, with the costs that were measured.
    """

    plan: GroupPlan | None = None
    adopts: bool = False
    limit: int | None = None
    reserve: int = 0
    size: int = 0
    in_flight: int = 1
    allocated_before: int = 0
    more: int = 0
    bare: Peak = field(default_factory=Peak)
    host_bytes: int | None = None
    planning: float = 0.0
    excess: int = 0
    outside: float = 0.0
    pace: float = 1.0
    choose: partial[GroupPlan] | None = None
    search_frontier: partial[tuple[GroupPlan, ...]] | None = None
    _next: tuple[GroupPlan, str] | None = field(default=None, init=False, repr=False, compare=False)

    def chosen(self, **changes: Any) -> GroupPlan:
        """Return the best plan by the costs that were measured; `changes` replace arguments of the planner."""
        assert self.choose is not None
        plan = self.expected(self.choose(**{"excess": self.excess, **changes}))
        if not (self.reserve and plan.because):
            return plan
        more = f"Another rank takes {size(self.reserve)} more than the one that decides."
        return replace(plan, because=f"{plan.because} {more}")

    def expected(self, plan: GroupPlan) -> GroupPlan:
        """Return a plan by costs of groups with the peak and the times that are expected of a whole pass."""
        if plan.peak_bytes is not None:
            plan = replace(plan, peak_bytes=plan.peak_bytes + self.excess)
        if plan.seconds is None or plan.baseline_seconds is None:
            return plan
        seconds, baseline = plan.seconds + self.outside, plan.baseline_seconds + self.outside
        return replace(plan, seconds=self.pace * seconds, baseline_seconds=self.pace * baseline)

    def frontier(self) -> tuple[GroupPlan, ...]:
        """Return the plans that are worth having; none if the costs are not known."""
        return () if self.search_frontier is None else tuple(map(self.expected, self.search_frontier()))

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
        found = self.chosen(limit=round(peak * SMALLER))
        if found.seconds is None or found.peak_bytes is None or found.peak_bytes >= peak:
            return ""
        cost = found.seconds / (found.baseline_seconds or plan.baseline_seconds or found.seconds)
        peaks = f"A peak of {size(found.peak_bytes)} instead of {size(peak)}"
        budget = f'memory_budget="{math.ceil(found.peak_bytes / 2**20)}MiB"'
        return f"{peaks} would cost at most {cost:.2f} x the time of a pass without offloading: {budget}."

    def fits(self, stage: Stage, elements: int, in_use: int = 0) -> bool:
        """Return whether a pass is within the limit, or takes no more than it did when it was planned.

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
        if self.limit is None:
            return True
        plan, known = self.plan, self.bare
        if stage is Stage.PLAN and plan is not None and plan.peak_bytes is not None:
            known = Peak(plan.peak_bytes + self.more, self.size, self.allocated_before)
        # Where other passes may be in progress, `in_use` says nothing.
        counts = self.in_flight == 1 and in_use - known.allocated > MORE * self.limit
        return known.at(elements, in_use if counts else 0) <= max(self.limit, known.nbytes)

    def in_rank(self, room: Room, allocated: int) -> Findings:
        """Return what another rank found, for one that has its own room, and so much allocated before a pass."""
        more, bare = allocated - self.allocated_before, self.bare
        if bare.nbytes:
            bare = bare._replace(nbytes=bare.nbytes + more, allocated=bare.allocated + more)
        limit = self.limit if room.limit is None else room.limit
        return replace(self, limit=limit, allocated_before=allocated, bare=bare, more=more)

    def decision(self, title: str, passes: str) -> str:
        """Return what was measured in some passes of a model and decided, in a line."""
        plan = self.plan
        assert plan is not None
        number = f"{len(plan.offloaded)} of {len(plan.names)} groups of {title}"
        again = f", {len(plan.recomputed)} are recomputed" if plan.recomputed else ""
        line = f"{number} are offloaded ({size(plan.offloaded_bytes)}){again}: measured in {passes}"
        if self.planning:
            line += f", planned in {milliseconds(self.planning)}"
        return f"{line}. {plan.because}" if plan.because else line
