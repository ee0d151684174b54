"""The default of `offload`: measure during the first steps, then offload what costs no time.

What is measured, and how the plan is chosen, is in `FirstSteps`; where these are, in `Progress`.  Here each pass of the
model gets its purpose: a stage of the first steps, or the plan; and the first steps are repeated when costs have
changed.  Where several ranks run one model, the first of them decides: see [Note: ranks decide together].

A pass is timed on the device, from the start of the forward to the end of its backward.  The events are read passes
later; the host waits for the device once before a plan is chosen and once for each comparison with it, and only where
the device is more than a whole pass behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ..._warnings import warn
from ...engine.engine import Engine
from ...engine.layer import tensors_in
from ...engine.passes import ModelPass
from ...planner import GroupPlan
from ...replay import Policy
from ...schedule.execution_order import GroupKey, GroupPlans
from ...schedule.timeline import size
from ..conduct import Conduct, FollowedModule
from ..reporting import PassLog
from .drift import Drift
from .findings import Findings
from .lockstep import WINDOW, Decision
from .metering import Meter
from .progress import Progress
from .ranks import Ranks
from .stages import Stages
from .timed_pass import Stage
from .timer import PassTimer

__all__ = ["Tuner"]

logger = logging.getLogger("actoffload")

SOON = 64  # passes with a plan before which memory is looked at: with gradient accumulation the optimizer starts late

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
        self._settled = 0  # pass since which there is a plan
        self._in_use = 0  # bytes of device memory before a pass, when they were looked at last
        self._alone = False  # the groups are called, and not the model
        self._chosen: Findings | None = None  # whose plan is kept
        self._first = Progress(engine.backend, groups, plans, log, self._ranks, budget, self._policies)
        self._first.begin(passes + 1, warm=passes > 0)
        self._drift = Drift()

    @property
    def settling(self) -> bool:
        """Whether passes are measured for a plan that is not final: in all ranks from the same pass on, no longer."""
        return self._first.settling and not self._alone

    def plan(self) -> GroupPlan:
        """Return the plan, or what is done until there is one."""
        because = ALONE if self._alone else UNTIMED if self._first.untimed else MEASURING
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
            return self._conduct_of(inputs, alone=alone, busy=busy)

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
        found = self._first.found
        if found.host_bytes is not None:
            self._engine.trim(keep=found.host_bytes)
        memory = stage is Stage.PLAN and found.limit is not None
        timed = self._timer.begin(stage, self._number, elements, memory=memory)
        return self._stages.of(stage, found, timed.operators)

    def _close(self) -> None:
        """End the pass before this one, and go on by what it showed."""
        timed = self._timer.take()
        if timed is None or not self._first.counts(timed):
            return
        if self._first.stage is None:
            self._drift.add(timed)
        elif (plan := self._first.add(timed)) is not None:
            self._settle(plan)

    def _stage_of_pass(self, elements: int, *, aside: bool) -> Stage | None:
        """Return what a pass is for, the same in all ranks; None for the plan.  `aside`: it is not measured."""
        first, lockstep = self._first, self._ranks.lockstep
        if first.stage is None and self._number % WINDOW == 0 and self._renews():
            first.begin(self._number, warm=True)
        if first.stage is not None and lockstep is not None and not lockstep.leads:
            plan = first.follow(self._number, planned=self._chosen is not None)
            if plan is not None:
                self._settle(plan)
        return None if first.stage is None else first.stage_of(self._number, elements, aside=aside)

    # The plan

    def _settle(self, plan: GroupPlan) -> None:
        """Keep a plan from now on."""
        self._chosen = self._first.found
        self._first.end()
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
        passes = f"passes {self._first.begun} to {self._number}"
        if (lockstep := self._ranks.lockstep) is not None:
            passes += f" by rank {lockstep.leader}"
            if lockstep.leads:
                self._ranks.together(lambda of: of.decide(self._number, Decision(found=self._chosen)))
        logger.info("%s", self._chosen.decision(self._title, passes))

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
