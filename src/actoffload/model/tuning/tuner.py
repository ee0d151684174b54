"""The default of `offload`: measure during the first steps, then offload what costs no time.

What is measured, and how the plan is chosen, is in `FirstSteps`.  Here each pass of the model gets its purpose: a stage
of the first steps, or the plan; and the first steps are repeated when costs have changed.  Where several ranks run one
model, the first of them decides: see [Note: ranks decide together].

A pass is timed on the device, from the start of the forward to the end of its backward.  The events are read passes
later; the host waits for the device once before a plan is chosen and once for each comparison with it, and only where
the device is more than a whole pass behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..._warnings import warn
from ...engine.engine import Engine
from ...engine.layer import tensors_in
from ...engine.model_pass import ModelPass
from ...planner import GroupPlan
from ...recompute import Policy
from ...schedule.execution_order import GroupKey, GroupPlans
from ...schedule.timeline import size
from ..conduct import Conduct, FollowedModule
from ..reporting import PassLog
from .drift import Drift
from .findings import Findings, Room, room_in
from .first_steps import FirstSteps, Script
from .lockstep import WINDOW, Decision
from .metering import Meter
from .ranks import Ranks
from .stages import LEAN, Stages
from .timed_pass import Stage
from .timer import PassTimer

__all__ = ["Tuner"]

logger = logging.getLogger("actoffload")

UNFINISHED = 4  # forwards in a row that run before the backward of the one before
SOON = 64  # passes with a plan before which memory is looked at: with gradient accumulation the optimizer starts late
BESIDE = 2  # passes that are measured again because the one before had no backward by then; in some programs all do
PASSED_OVER = 4  # passes in a row that may not fit without offloading, so that the first steps do not go on

MEASURING = "This is the plan of the first steps, which are measured."
ALONE = (
    "No step can be timed, because parts of the model are called and not the module that was passed to offload: call "
    "that module, or offload the one that is called."
)
UNTIMED = "Several forwards run before a backward, so no pass can be timed."


class Tuner:
    """Measures, plans, and keeps the plan as long as costs stay what they were.

    Parameters
    ----------
    engine, groups, plans, log
        Of the model.
    title : str
        What the log calls the model.
    passes : int
        Number of passes that offloaded everything before, and were not measured.
    recompute : mapping of int to Policy, optional
        By group: what is saved of a group that is recomputed in backward.
    policies : mapping of int to Policy, optional
        By group: what is saved of it if it is recomputed because the memory is not enough otherwise.
    budget : int, optional
        Bytes of device memory that forward and backward may take; None for all that there are.
    ranks : Ranks, optional
        That run the model together.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        title: str = "the model",
        passes: int = 0,
        budget: int | None = None,
        recompute: Mapping[int, Policy] | None = None,
        policies: Mapping[int, Policy] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._engine, self._groups, self._plans, self._log, self._title = engine, groups, plans, log, title
        self._budget, self._policies = budget, policies or {}
        self._stages = Stages(engine, groups, plans, log, recompute or {}, self._policies)
        self._ranks = Ranks() if ranks is None else ranks
        self._lock = threading.Lock()
        self._number = passes
        self._timer = PassTimer(engine)
        self._unfinished = self._passed_over = 0  # passes in a row
        self._settled = 0  # pass since which there is a plan
        self._own: tuple[Room, int] | None = None  # of a rank that follows: its room, and bytes allocated before a pass
        self._in_use = 0  # bytes of device memory before a pass, when they were looked at last
        self._alone = False  # the groups are called, and not the model
        self._chosen: Findings | None = None  # whose plan is kept
        self._measuring: Findings
        self._script: Script | None
        self._stage: Stage | None
        self._begin(passes + 1, warm=passes > 0)
        self._drift = Drift()

    @property
    def settling(self) -> bool:
        """Whether passes are measured for a plan that is not final: in all ranks from the same pass on, no longer."""
        measured = self._unfinished < UNFINISHED and self._passed_over < PASSED_OVER
        return self._stage is not None and measured and not self._alone

    def plan(self) -> GroupPlan:
        """Return the plan, or what is done until there is one."""
        because = ALONE if self._alone else UNTIMED if self._unfinished >= UNFINISHED else MEASURING
        return self._stages.plan(self._chosen, because)

    def frontier(self) -> Sequence[GroupPlan]:
        """Return the plans that are worth having, for what was measured."""
        found = () if self._chosen is None else self._chosen.frontier()
        if not found:
            yet = " yet: run steps until handle.settling is False" if self.settling else ""
            raise RuntimeError(f"What other plans cost is not known{yet}. {self.plan().because}".rstrip())
        return found

    def facts(self) -> dict[str, Any]:
        """Return what was measured of whole passes, as fields of `StepFacts`."""
        times = None if self._chosen is None else self._chosen.times
        found: dict[str, Any] = {}
        if self._chosen is not None:
            found["next_choice"] = self._chosen.next_choice()
        if times is not None:
            found["pass_seconds_with"], found["pass_seconds_without"] = times.offloaded, times.without
            found["measured_passes"] = times.first, times.last
        return found

    # One pass

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> Conduct:
        """Return how this pass is followed; plan first if enough was measured."""
        with self._lock:
            conduct = self._conduct_of(inputs, alone=alone, busy=busy)
        # Ranks that decide together recompute the same groups, with what these communicate.
        return replace(conduct, apart=True) if self._policies and self._ranks.apart else conduct

    def _conduct_of(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> Conduct:
        if alone or busy:
            self._alone = not busy
            return self._stages.whole(self._chosen)
        self._alone = False
        aside = self._engine.backend.capturing() or not isinstance(self._engine.recorder, Meter | None)
        if aside:
            self._timer.drop()  # [guard: pass measured while a graph is captured or a step is recorded]
            if self._ranks.lockstep is None:
                return self._stages.whole(self._chosen)
        self._close()
        self._number += 1
        elements = sum(tensor.numel() for tensor in tensors_in(inputs))
        stage = self._stage_of_pass(elements, aside=aside)
        if aside:
            return self._stages.whole(self._chosen)
        return self._steady(elements) if stage is None else self._measure(stage, elements)

    def forward_ends(self, output: Any) -> None:
        """Time the pass until the end of its backward."""
        self._timer.forward_ends(output)

    def pass_ends(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take what a forward saved."""
        self._plans.learn(sequence)
        timed = self._timer.of_thread()
        if timed is not None:
            timed.saw(done, sequence)
        if not done.partly or (timed is not None and timed.stage is Stage.PLAN):
            self._log.forward_done(done, sequence)
            if timed is not None and self._log.latest is not None:
                timed.waiting = self._log.latest.statistics.waiting

    def retire(self) -> None:
        """Stop measuring."""
        with self._lock:
            self._timer.drop()
            self._ranks.leave()

    def _measure(self, stage: Stage, elements: int) -> Conduct:
        """Begin a pass of the first steps."""
        if self._measuring.host_bytes is not None:
            self._engine.trim(keep=self._measuring.host_bytes)
        memory = stage is Stage.PLAN and self._measuring.limit is not None
        timed = self._timer.begin(stage, self._number, elements, memory=memory)
        return self._stages.of(stage, self._measuring, timed.operators)

    def _close(self) -> None:
        """End the pass before this one, and go on in the script if its backward has ended."""
        timed = self._timer.take()
        if timed is None:
            return
        if timed.ended is None:
            self._unfinished += 1
            return
        beside, self._unfinished = self._unfinished > 0 and timed.stage is not Stage.FIRST, 0
        if self._script is not None and beside and self._beside < BESIDE:
            self._beside += 1  # [guard: backward that was skipped once] its graph lived in this pass
            return
        if self._script is None:
            if self._stage is None:
                self._drift.add(timed)
            elif timed.stage is Stage.LEAN and timed.meter is not None:
                room, before = room_in(timed, self._engine.backend, self._budget), timed.meter.allocated_before
                # With gradient accumulation, gradients are there before some passes only.
                self._own = room, max(before, self._own[1] if self._own else 0)
                self._ranks.together(lambda of: of.post_room(room))
            return
        try:
            self._stage = self._script.send(timed)
        except StopIteration as stop:
            if stop.value is None:  # an interrupt had ended it
                self._begin(self._number + 1, again=True)
            else:
                self._settle(stop.value)

    # The plan

    def _begin(self, number: int, *, warm: bool = False, again: bool = False) -> None:
        """Measure the first steps, or measure them again; `number` is that of the first pass.

        `again`: they had begun, so other ranks may have said how much room they have, which they say once.
        """
        self._begun, self._beside, ranks = number, 0, self._ranks
        of_all = ranks.room_of_all
        if again and self._measuring.limit is not None:
            of_all = partial(Room.less, reserve=self._measuring.reserve)
        steps = FirstSteps(
            self._engine.backend,
            self._groups,
            self._plans,
            self._log,
            self._budget,
            self._policies,
            of_all,
            lambda: ranks.lockstep is not None,
        )
        script = steps.run(warm=warm)
        self._measuring, self._stage, self._script = steps.found, next(script), script

    def _settle(self, plan: GroupPlan) -> None:
        """Keep a plan from now on."""
        self._chosen = self._measuring
        self._script = self._stage = None
        self._drift.restart(self._number)
        self._settled = self._number
        if not plan.offloaded and not plan.recomputed:
            self._log.nothing_offloaded()
        peak = None if plan.peak_bytes is None else plan.peak_bytes + self._chosen.reserve
        if self._budget is not None and peak is not None and peak > self._budget:
            warn(
                f"memory_budget is {size(self._budget)}, but the smallest peak that a plan reaches is {size(peak)}: "
                "that plan is used."
            )
        passes = f"passes {self._begun} to {self._number}"
        if (lockstep := self._ranks.lockstep) is not None:
            passes += f" by rank {lockstep.leader}"
            if lockstep.leads:
                self._ranks.together(lambda of: of.decide(self._number, Decision(found=self._chosen)))
        logger.info("%s", self._chosen.decision(self._title, passes))

    # Together with other ranks

    def _stage_of_pass(self, elements: int, *, aside: bool) -> Stage | None:
        """Return what a pass is for, the same in all ranks; None for the plan.  `aside`: it is not measured."""
        if self._stage is None and self._number % WINDOW == 0 and self._renews():
            self._begin(self._number, warm=True)
        lockstep = self._ranks.lockstep
        follows = lockstep is not None and not lockstep.leads
        if self._stage is not None and follows:
            self._follow()
        if self._stage is None:
            return None
        in_use = 0 if self._stage in LEAN else self._allocated()
        if not (follows or aside) and self._outdated(self._stage, elements, in_use):
            # [guard: first steps that are outdated]
            self._begin(self._number, warm=True, again=True)
        stage = decided = self._stage
        # A pass that may not fit offloads everything and does not count.
        fits = stage in LEAN or self._measuring.fits(stage, elements, in_use)
        if aside or self._unfinished >= UNFINISHED or not fits:
            stage = Stage.FIRST
        if lockstep is not None and lockstep.leads:
            known = replace(self._measuring, choose=None, search_frontier=None)  # which are large
            self._ranks.together(lambda of: of.decide(self._number, Decision(stage, known)))
        # Ranks that follow count what was decided, so that `settling` is the same in all.
        self._passed_over = self._passed_over + 1 if (decided if follows else stage) is Stage.FIRST else 0
        return stage

    def _outdated(self, stage: Stage, elements: int, in_use: int) -> bool:
        """Return whether what was measured so far does not hold for this pass and those to come."""
        if stage in LEAN or self._unfinished >= UNFINISHED:
            return False
        found, often = self._measuring, self._passed_over + 1 >= PASSED_OVER
        return found.exceeds(stage, in_use) or (often and not found.fits(stage, elements, in_use))

    def _follow(self) -> None:
        """Take what another rank decided for this pass; go on alone if it does not answer."""
        decision, before = self._ranks.together(lambda of: of.decision(self._number)), self._measuring
        if decision is None or decision.found is None:
            self._stage = self._script = None
            if self._chosen is None:
                self._begin(self._number, warm=True)
            return
        found = decision.found
        if self._own is not None:
            found = found.in_rank(*self._own)
        if found.plan == before.plan:
            found.plan = before.plan  # whose roles are known
        self._measuring, self._stage, self._script = found, decision.stage, None
        if decision.stage is None:
            assert found.plan is not None
            self._settle(found.plan)

    def _renews(self) -> bool:
        """Return whether the first steps are measured again from this pass on."""
        chosen, lockstep = self._chosen, self._ranks.lockstep
        assert chosen is not None
        leads = lockstep is None or lockstep.leads
        wanted = leads and self._drift.moved(self._number, chosen.size, self._engine.backend)
        self._in_use = self._allocated()
        wanted = wanted or chosen.exceeds(Stage.PLAN, self._in_use)
        if lockstep is None:
            return wanted
        return bool(self._ranks.together(lambda of: of.begins_again(self._number, wanted=wanted)))

    # Later

    def _allocated(self) -> int:
        return self._engine.backend.in_use() or 0

    def _steady(self, elements: int) -> Conduct:
        """Return how a pass is followed once there is a plan."""
        chosen = self._chosen
        assert chosen is not None
        if self._drift.times(self._number):
            self._timer.begin(Stage.PLAN, self._number, elements)
        if self._number - self._settled <= SOON:
            self._in_use = self._allocated()
        if not chosen.fits(Stage.PLAN, elements, self._in_use):
            return self._stages.leanest(None if self._ranks.lockstep is None else chosen)
        return self._stages.idle() if elements < chosen.least_size else self._stages.planned(chosen)
