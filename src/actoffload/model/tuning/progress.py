"""Go through the first steps pass by pass, in this rank or as another one decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...device.base import Backend
from ...planner import GroupPlan
from ...replay import Policy
from ...schedule.execution_order import GroupPlans
from ..conduct import FollowedModule
from ..reporting import PassLog
from .findings import Findings, Room, room_in
from .first_steps import FirstSteps, Script
from .lockstep import Decision
from .ranks import Ranks
from .stages import LEAN
from .timed_pass import Stage, TimedPass

__all__ = ["Progress"]

UNFINISHED = 4  # forwards in a row that run before the backward of the one before
BESIDE = 2  # passes that are measured again because the one before had no backward by then; in some programs all do
PASSED_OVER = 4  # passes in a row that may not fit without offloading, so that the first steps do not go on


class Progress:
    """Knows what the next pass is for, and what the passes before it have shown.

    Parameters
    ----------
    backend, groups, plans, log
        Of the model.
    ranks : Ranks
        That run the model together.
    budget : int, optional
        Bytes of device memory that a pass may take.
    policies : mapping of int to Policy, optional
        By group: how it may be recomputed where the memory is not enough.

    Attributes
    ----------
    stage : Stage or None
        Of the next pass; None before the first steps have begun, and once there is a plan.
    found : Findings
        What is known.
    begun : int
        Number of the first pass.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        ranks: Ranks,
        budget: int | None = None,
        policies: Mapping[int, Policy] | None = None,
    ) -> None:
        self._steps = partial(FirstSteps, backend, groups, plans, log, budget, policies)
        self._backend, self._ranks, self._budget = backend, ranks, budget
        self.stage: Stage | None = None
        self.found = Findings()
        self.begun = 0
        self._script: Script | None = None  # none where another rank decides
        self._unfinished = self._passed_over = 0  # passes in a row
        self._beside = 0
        self._own: tuple[Room, int] | None = None  # of a rank that follows: its room, and bytes allocated before a pass

    @property
    def untimed(self) -> bool:
        """Whether no pass can be timed, because several forwards run before a backward."""
        return self._unfinished >= UNFINISHED

    @property
    def settling(self) -> bool:
        """Whether passes are measured for a plan that is not final: in all ranks from the same pass on, no longer."""
        return self.stage is not None and not self.untimed and self._passed_over < PASSED_OVER

    def begin(self, number: int, *, warm: bool = False, again: bool = False) -> None:
        """Measure the first steps, or measure them again; `number` is that of the first pass.

        `warm`: a pass has offloaded everything before.  `again`: they had begun, so other ranks may have said how much
        room they have, which they say once.
        """
        self.begun, self._beside, ranks = number, 0, self._ranks
        of_all = ranks.room_of_all
        if again and self.found.limit is not None:
            of_all = partial(Room.less, reserve=self.found.reserve)
        steps = self._steps(of_all, lambda: ranks.lockstep is not None)
        script = steps.run(warm=warm)
        self.found, self.stage, self._script = steps.found, next(script), script

    def end(self) -> None:
        """Measure no more; what was found stays."""
        self._script = self.stage = None

    # The pass before

    def counts(self, timed: TimedPass) -> bool:
        """Return whether what a pass showed counts: its backward has ended, and no other ran inside of it."""
        if timed.ended is None:
            self._unfinished += 1
            return False
        beside, self._unfinished = self._unfinished > 0 and timed.stage is not Stage.FIRST, 0
        if self._script is not None and beside and self._beside < BESIDE:
            self._beside += 1  # [guard: backward that was skipped once] its graph lived in this pass
            return False
        return True

    def add(self, timed: TimedPass) -> GroupPlan | None:
        """Take a pass that counts, and return the plan if it was the last one that had to be measured."""
        if self._script is None:
            if timed.stage is Stage.LEAN and timed.meter is not None:
                room, before = room_in(timed, self._backend, self._budget), timed.meter.allocated_before
                # With gradient accumulation, gradients are there before some passes only.
                self._own = room, max(before, self._own[1] if self._own else 0)
                self._ranks.together(lambda of: of.post_room(room))
            return None
        try:
            self.stage = self._script.send(timed)
        except StopIteration as stop:
            plan: GroupPlan | None = stop.value
            if plan is None:  # an interrupt had ended it
                self.begin(timed.number + 1, again=True)
            return plan
        return None

    # The next pass

    def follow(self, number: int, *, planned: bool) -> GroupPlan | None:
        """Take what another rank decided for a pass, and return the plan if that was chosen.

        If that rank does not answer, go on alone: with the plan there is, or with the first steps if none is `planned`.
        """
        decision, before = self._ranks.together(lambda of: of.decision(number)), self.found
        if decision is None or decision.found is None:
            self.end()
            if not planned:
                self.begin(number, warm=True)
            return None
        found = decision.found
        if self._own is not None:
            found = found.in_rank(*self._own)
        if found.plan == before.plan:
            found.plan = before.plan  # whose roles are known
        self.found, self.stage, self._script = found, decision.stage, None
        return found.plan if decision.stage is None else None

    def stage_of(self, number: int, elements: int, *, aside: bool) -> Stage:
        """Return what a pass is for while there is no plan, the same in all ranks.  `aside`: it is not measured."""
        assert self.stage is not None
        lockstep = self._ranks.lockstep
        follows = lockstep is not None and not lockstep.leads
        in_use = 0 if self.stage in LEAN else self._backend.in_use() or 0
        if not (follows or aside) and self._outdated(self.stage, elements, in_use):
            # [guard: first steps that are outdated]
            self.begin(number, warm=True, again=True)
        stage = decided = self.stage
        # A pass that may not fit offloads everything and does not count.
        fits = stage in LEAN or self.found.fits(stage, elements, in_use)
        if aside or self.untimed or not fits:
            stage = Stage.FIRST
        if lockstep is not None and lockstep.leads:
            known = replace(self.found, choose=None, search_frontier=None)  # which are large
            self._ranks.together(lambda of: of.decide(number, Decision(stage, known)))
        # Ranks that follow count what was decided, so that `settling` is the same in all.
        self._passed_over = self._passed_over + 1 if (decided if follows else stage) is Stage.FIRST else 0
        return stage

    def _outdated(self, stage: Stage, elements: int, in_use: int) -> bool:
        """Return whether what was measured so far does not hold for this pass and those to come."""
        if stage in LEAN or self.untimed:
            return False
        often = self._passed_over + 1 >= PASSED_OVER
        return self.found.exceeds(stage, in_use) or (often and not self.found.fits(stage, elements, in_use))
