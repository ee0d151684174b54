"""The default of `offload`: measure during the first steps, then offload what costs no time.

What is measured, and how the plan is chosen, is in `FirstSteps`.  Here each pass of the model gets its purpose: a stage
of the first steps, or the plan; and the first steps are repeated when costs have changed.

A pass is timed on the device, from the start of the forward to the end of its backward.  The events are read passes
later; the host waits for the device at most twice, where the device is more than a whole pass behind.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from .._torch import warn
from ..engine.engine import Engine
from ..engine.layer import tensors_in
from ..engine.model_pass import ModelPass
from ..planner import GroupPlan
from ..recompute import Policy
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.plan import Roles
from ..schedule.timeline import milliseconds, size
from .conduct import Conduct, FollowedModule, Mode
from .first_steps import FirstSteps, Script
from .metering import Meter
from .operator_times import OperatorTimes
from .reporting import PassLog, group_names
from .steering import recomputing
from .timed_pass import Stage, TimedPass

__all__ = ["Tuner"]

logger = logging.getLogger("actoffload")

MOVED = 0.10  # change of a cost from which on another plan is looked for
WINDOW = 8  # passes over which costs are compared
PATIENCE = 64  # passes before a plan is replaced, doubled each time
UNFINISHED = 4  # forwards in a row that run before the backward of the one before

LEAN = (Stage.FIRST, Stage.LEAN, Stage.FIRST_AGAIN, Stage.AGAIN, Stage.WHOLE)  # everything is offloaded
BY_GROUP = (Stage.LEAN, Stage.MEMORY, Stage.BARE, Stage.AGAIN, Stage.WHOLE, Stage.BARE_AGAIN)  # measured by group

MEASURING = "This is the plan of the first steps, which are measured."
ALONE = "The groups are called and not the model, so no pass can be timed."
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
    ) -> None:
        self._engine, self._groups, self._plans, self._log, self._title = engine, groups, plans, log, title
        self._budget, self._recompute, self._policies = budget, recompute or {}, policies or {}
        self._lock = threading.Lock()
        self._number = passes
        self._current: TimedPass | None = None  # in progress, or the latest
        self._thread = 0  # that runs its forward
        self._unfinished = 0
        self._alone = False  # the groups are called, and not the model
        self._chosen: FirstSteps | None = None  # whose plan is kept
        self._measuring: FirstSteps
        self._script: Script | None
        self._stage: Stage | None
        self._begin(passes + 1, warm=passes > 0)
        self._replan_at = 0
        self._patience = PATIENCE
        self._later: deque[TimedPass] = deque(maxlen=WINDOW)  # one of each window
        self._pace: float | None = None  # seconds for each element of the inputs when the plan was new

    def plan(self) -> GroupPlan:
        """Return the plan, or what is done until there is one."""
        if self._chosen is None or self._chosen.roles is None:
            return self._leanest(ALONE if self._alone else UNTIMED if self._unfinished >= UNFINISHED else MEASURING)
        order = self._plans.order
        return recomputing(self._chosen.roles.plan.remapped(group_names(self._groups, order)), order, self._recompute)

    def frontier(self) -> Sequence[GroupPlan]:
        """Return the plans that are worth having, for what was measured."""
        found = () if self._chosen is None else self._chosen.frontier()
        if not found:
            raise RuntimeError(
                f"What other plans cost is not known yet: run twelve steps. {self.plan().because}".rstrip()
            )
        return found

    def facts(self) -> dict[str, Any]:
        """Return what was measured of whole passes, as fields of `StepFacts`."""
        times = None if self._chosen is None else self._chosen.times
        found: dict[str, Any] = {"because": self.plan().because}
        if self._chosen is not None:
            found["next_choice"] = self._chosen.next_choice()
        if times is not None:
            found["step_seconds_with"], found["step_seconds_without"] = times.offloaded, times.without
            found["measured_steps"] = times.first, times.last
        return found

    # One pass

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> Conduct:
        """Return how this pass is followed; plan first if enough was measured."""
        with self._lock:
            if alone or busy:
                self._alone = not busy
                return self._whole()
            self._alone = False
            if self._engine.backend.capturing() or not isinstance(self._engine.recorder, Meter | None):
                self._drop()  # [guard: pass measured while a graph is captured or a step is recorded]
                return self._whole()
            self._close()
            self._number += 1
            elements = sum(tensor.numel() for tensor in tensors_in(inputs))
            return self._steady(elements) if self._stage is None else self._measure(elements)

    def forward_ends(self, output: Any) -> None:
        """Time the pass until the end of its backward."""
        if self._current is not None and self._thread == threading.get_ident():
            self._current.watch(self._engine.backend, tensors_in(output))

    def pass_ends(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take what a forward saved."""
        self._plans.learn(sequence)
        timed = self._current if self._thread == threading.get_ident() else None
        if timed is not None:
            timed.saw(done, sequence)
        if not done.partly or (timed is not None and timed.stage is Stage.PLAN):
            self._log.forward_done(done, sequence)
            if timed is not None and self._log.latest is not None:
                timed.waiting = self._log.latest.statistics.waiting

    def retire(self) -> None:
        """Stop measuring."""
        with self._lock:
            self._drop()

    def _measure(self, elements: int) -> Conduct:
        """Begin a pass of the first steps; one that may not fit offloads everything and does not count."""
        stage = self._stage
        assert stage is not None
        if self._unfinished >= UNFINISHED or not (stage in LEAN or self._measuring.fits(elements)):
            stage = Stage.FIRST
        if self._measuring.host_bytes is not None:
            self._engine.trim(keep=self._measuring.host_bytes)
        timed = self._time(stage, elements)
        if stage in BY_GROUP:
            memory = stage not in (Stage.BARE, Stage.BARE_AGAIN)
            timed.meter = Meter(self._engine.backend, self._engine.counters, memory=memory)
            self._engine.record(timed.meter)
        recompute = {**self._recompute, **self._measuring.recompute}
        if stage is Stage.FIRST_AGAIN:
            timed.operators = OperatorTimes(self._engine.backend)
        if stage in LEAN:
            return replace(self._lean(recompute), operators=timed.operators)
        if stage in BY_GROUP:
            return Conduct(Mode.SCOPED, self._plans.order, recompute=recompute)
        return self._planned(self._measuring) if stage is Stage.PLAN else self._idle()

    def _time(self, stage: Stage, elements: int) -> TimedPass:
        self._thread = threading.get_ident()
        self._current = TimedPass.begin(stage, self._number, elements, self._engine.backend)
        return self._current

    def _drop(self) -> None:
        """Forget the pass before this one, and read none of its events."""
        if isinstance(self._engine.recorder, Meter):
            self._engine.record(None)
        self._current = None

    def _close(self) -> None:
        """End the pass before this one, and go on in the script if its backward has ended."""
        timed, recorder = self._current, self._engine.recorder
        self._drop()
        if timed is None or (timed.meter is not None and timed.meter is not recorder):
            return  # a step was recorded in the middle of it
        if timed.ended is None:
            self._unfinished += 1
            return
        self._unfinished = 0
        if self._script is None:
            self._later.append(timed)
            return
        try:
            self._stage = self._script.send(timed)
        except StopIteration as stop:
            if stop.value is None:  # an interrupt had ended it
                self._begin(self._number + 1, warm=False)
            else:
                self._settle(stop.value)

    def _planned(self, chosen: FirstSteps) -> Conduct:
        assert chosen.roles is not None
        recompute = {**self._recompute, **chosen.recompute}
        if not chosen.roles.plan.offloaded and not recompute:
            return self._idle()
        mode = Mode.WHOLE if chosen.adopts or chosen.roles.incremental else Mode.SCOPED
        return Conduct(mode, self._plans.order, chosen.roles, recompute)

    def _lean(self, recompute: Mapping[int, Policy]) -> Conduct:
        return Conduct(Mode.WHOLE, self._plans.order, lambda order: Roles.leanest(len(order)), recompute)

    def _idle(self) -> Conduct:
        if self._recompute:
            return Conduct(Mode.SCOPED, self._plans.order, recompute=self._recompute)
        self._engine.counters.passes += 1
        return Conduct(Mode.IDLE)

    def _whole(self) -> Conduct:
        """Follow the whole forward, by the plan if there is one."""
        chosen, order = self._chosen, self._plans.order
        if chosen is None or chosen.roles is None:
            return Conduct(Mode.WHOLE, order, self._plans.roles, self._recompute)
        return Conduct(Mode.WHOLE, order, chosen.roles, {**self._recompute, **chosen.recompute})

    def _leanest(self, because: str) -> GroupPlan:
        order = self._plans.order
        names = group_names(self._groups, order)
        plan = GroupPlan(names, self._plans.roles(order).plan, self._log.bytes_of(order), because=because)
        return recomputing(plan, order, self._recompute)

    # The plan

    def _begin(self, number: int, *, warm: bool = False) -> None:
        """Measure the first steps, or measure them again; `number` is that of the first pass."""
        self._begun = number
        self._measuring = FirstSteps(
            self._engine.backend, self._groups, self._plans, self._log, self._budget, self._policies
        )
        script = self._measuring.run(warm=warm)
        self._stage, self._script = next(script), script

    def _settle(self, plan: GroupPlan) -> None:
        """Keep a plan from now on."""
        self._chosen = self._measuring
        self._script = self._stage = None
        self._replan_at = self._number + self._patience
        self._patience *= 2
        self._pace = None
        self._later.clear()
        if not plan.offloaded:
            self._log.nothing_offloaded()
        if self._budget is not None and plan.peak_bytes is not None and plan.peak_bytes > self._budget:
            warn(
                f"memory_budget is {size(self._budget)}, but the smallest peak that a plan reaches is "
                f"{size(plan.peak_bytes)}: that plan is used."
            )
        logger.info("%s", self._decision(plan, self._chosen))

    def _decision(self, plan: GroupPlan, found: FirstSteps) -> str:
        """Return what was measured and decided, in a line."""
        number = f"{len(plan.offloaded)} of {len(plan.names)} groups of {self._title}"
        again = f", {len(plan.recomputed)} are recomputed" if plan.recomputed else ""
        passes = f"measured in passes {self._begun} to {self._number}"
        line = f"{number} are offloaded ({size(plan.offloaded_bytes)}){again}: {passes}"
        if found.planning:
            line += f", planned in {milliseconds(found.planning)}"
        if found.times is not None:
            with_, without = milliseconds(found.times.offloaded), milliseconds(found.times.without)
            line += f"; a pass takes {with_}, {without} without offloading"
        return f"{line}. {plan.because}" if plan.because else line

    # Later

    def _steady(self, elements: int) -> Conduct:
        """Return how a pass is followed once there is a plan."""
        chosen = self._chosen
        assert chosen is not None
        if self._number % WINDOW == 0 and (self._moved(chosen) or chosen.exceeds(self._engine.backend.in_use() or 0)):
            self._begin(self._number, warm=True)
            return self._measure(elements)
        if self._number % WINDOW == 0 or not self._later:
            self._time(Stage.PLAN, elements)
        if not chosen.fits(elements):
            return self._lean({**self._policies, **self._recompute})
        return self._idle() if elements < chosen.least_size else self._planned(chosen)

    def _moved(self, chosen: FirstSteps) -> bool:
        """Return whether costs are others than those of the plan, and have been for some passes."""
        backend = self._engine.backend
        done = [timed for timed in self._later if timed.ended and backend.passed(timed.ended)]
        if len(done) < WINDOW:
            return False
        now, sizes = median(timed.pace(backend) for timed in done), sorted(timed.elements for timed in done)
        if self._pace is None:
            self._pace = now
        if self._number < self._replan_at:
            return False
        settled = sizes[-1] <= sizes[0] * (1 + MOVED)  # else inputs vary, and a plan for some is as good as any
        return (settled and _differ(sizes[0], chosen.size)) or _differ(now, self._pace)


def _differ(now: float, before: float) -> bool:
    return abs(now - before) > MOVED * before
