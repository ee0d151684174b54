"""The default of `offload`: measure the first passes, then follow the plan that came out.

What is measured, and how the plan is chosen, is in `Script`.  Here each pass of the model gets its purpose: a stage of
the script, or the plan; and the script runs again when more memory is allocated before a pass than was planned with.
Where several ranks run one model, the first of them decides: see [Note: ranks decide together].

A pass is timed on the device, from the start of the forward to the end of its backward.  The events are read later; the
host waits for the device once before a plan is chosen, and once for each pass with a plan that is timed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..._text import size
from ..._torch.tensors import leaves
from ..._warnings import warn
from ...engine.passes import ModelPass
from ...replay import Policy
from ...schedule.execution_order import Roles, remap
from ...schedule.plan import Plan
from ...tune.meter import Meter
from ..follow import ModelState
from ..replays import OperatorTimes
from ..steering import Mode, PassSettings, RolesOfPlan, recomputing, scheduled_plan
from .findings import Findings, Room
from .metering import Stage, TimedPass
from .ranks import WINDOW, Decision, Ranks
from .script import Script, Steps

logger = logging.getLogger("actoffload")

UNFINISHED = 4  # forwards in a row that run before the backward of the one before
LESS = 0.05  # part of the memory that plans leave after the device ran out of it
BESIDE = 2  # passes that are measured again because the one before had no backward by then; in some programs all do
LARGER = 16  # passes in a row that may not fit with the plan that is kept, before another one is made
PASSED_OVER = 4  # passes in a row that may not fit with the plan that is tried, so that the script does not go on

MEASURING = "This is the plan of the first steps, which are measured."
ALONE = (
    "No step can be timed, because parts of the model are called and not the module that was passed to offload: call "
    "that module, or offload the one that is called."
)
UNTIMED = "Several forwards run before a backward, so no pass can be timed."


class Tuner:
    """Gives each pass its purpose, and keeps the plan as long as it fits.

    `budget` is the device memory in bytes that forward and backward may take, None for all that there is.  `policies`
    have for each group how it is replayed: `always`, or only if the memory is not enough.
    """

    def __init__(
        self, state: ModelState, budget: int | None, policies: Mapping[int, Policy], ranks: Ranks, *, always: bool
    ) -> None:
        self._state, self._engine, self._log = state, state.engine, state.log
        self._policies, self._ranks = policies, ranks
        self._always: Mapping[int, Policy] = policies if always else {}
        self._lock = threading.Lock()
        self._number = 0
        self._timed: TimedPass | None = None  # the pass in progress, or the latest
        self._settled = 0  # pass since which there is a plan
        self._alone = False  # the groups are called, and not the model
        self._chosen: Findings | None = None  # whose plan is kept
        self._roles: RolesOfPlan | None = None  # of the latest plan
        self._unfinished = self._passed_over = self._larger = 0  # passes in a row
        self._failed = self._engine.backend.out_of_memory_errors()  # allocations so far
        self._own: tuple[Room, int] | None = None  # of a rank that follows: its room, and bytes allocated before a pass
        self.found = Findings(budget=budget)  # of the script that runs, or ran last
        self.stage: Stage | None = None  # of the next pass; None once there is a plan
        self._steps: Steps | None = None  # none where another rank decides
        self._begin(1)

    def _begin(self, number: int, *, again: bool = False, allocated: int = 0) -> None:
        """Run the script from this pass on; `again`: other ranks said how much room they have, which they say once.

        `allocated`: bytes before a pass that may come again.
        """
        self.begun, self._beside, before = number, 0, self.found
        self._deleted = self._count_deleted()
        room_of_all = self._ranks.room_of_all
        if again and before.limit is not None:
            room_of_all = partial(Room.less, reserve=before.reserve)
        self.found = Findings(budget=before.budget, short=before.short, allocated_before=allocated)
        optional = {} if self._always else self._policies
        steps = Script(self._state, self.found, optional, room_of_all).run()
        self.stage, self._steps = next(steps), steps

    def _count_deleted(self) -> int:
        return sum(group.ref() is None for group in self._state.groups)

    # What is known

    @property
    def untimed(self) -> bool:
        """Whether no pass can be timed, because several forwards run before a backward."""
        return self._unfinished >= UNFINISHED

    @property
    def settling(self) -> bool:
        """Whether passes are measured for a plan that is not final: in all ranks from the same pass on, no longer."""
        return self.stage is not None and not (self.untimed or self._alone) and self._passed_over <= PASSED_OVER

    def plan(self) -> Plan:
        """Return the plan, or what is done until there is one."""
        if self._chosen is None or self._chosen.plan is None:
            because = ALONE if self._alone else UNTIMED if self.untimed else MEASURING
            return scheduled_plan(self._state, because, self._always)
        order = self._state.plans.order
        return recomputing(remap(self._chosen.plan, self._state.names()), order, self._always)

    def costs(self) -> Findings:
        """Return what was measured for the plan."""
        chosen = self._chosen
        if chosen is None or not chosen.ways:
            yet = " yet: run steps until handle.settling is False" if self.settling else ""
            raise RuntimeError(f"What other plans cost is not known{yet}. {self.plan().because}".rstrip())
        return chosen

    def next_choice(self) -> str:
        """Return what a smaller peak would cost, in a sentence; empty if that is not known."""
        return "" if self._chosen is None else self._chosen.next_choice

    # One pass

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings:
        """Return how this pass is followed; plan first if enough was measured."""
        with self._lock:
            self._alone = alone and not busy
            if alone or busy:
                return self._whole()
            aside = self._engine.backend.capturing() or not isinstance(self._engine.recorder, Meter | None)
            if aside:
                self._drop()  # [guard: pass measured while a graph is captured or a step is recorded]
                if self._ranks.exchange.alone:
                    return self._whole()
            self._close()
            self._number += 1
            self._look_for_failures()
            tensors = list(leaves(inputs))
            elements = sum(tensor.numel() for tensor in tensors)
            stage = self._stage_of_pass(elements, aside=aside)
            if aside:
                return self._whole()
            if stage is None:
                return self._settled_pass(elements)
            planned = self.found.host_bytes  # what a plan takes that has not run
            if planned is not None and stage is Stage.PLAN:
                self._engine.trim(keep=planned)
                self._engine.pin(planned)
                # Blocks that were cut for the passes before would leave gaps for those with this plan.
                self._engine.backend.release_device()
            memory = stage is Stage.PLAN and self.found.limit is not None
            self._timed = timed = TimedPass(stage, tensors, self._state, memory=memory)
            return self._planned(self.found) if stage is Stage.PLAN else self._leanest(self._policies, timed.operators)

    def forward_ends(self, output: Any) -> None:
        """Time the pass until the end of its backward."""
        timed = self._timed
        if timed is not None and timed.thread == threading.get_ident():
            timed.watch(leaves(output))

    def pass_ends(self, done: ModelPass[int], sequence: Sequence[int]) -> None:
        """Take what a forward saved."""
        self._state.plans.learn(sequence)
        timed = self._timed if self._timed is not None and self._timed.thread == threading.get_ident() else None
        if timed is not None:
            timed.saw(done, sequence)
        self._log.forward_done(done, sequence)
        if timed is not None:
            timed.waiting = self._log.waiting(done)

    def retire(self) -> None:
        """Stop measuring."""
        with self._lock:
            self._drop()
            self._ranks.leave()

    def _drop(self) -> None:
        """Forget the pass, and read none of its events."""
        if isinstance(self._engine.recorder, Meter):
            self._engine.record(None)
        self._timed = None

    def _close(self) -> None:
        """End the pass before this one, and go on by what it showed."""
        timed, recorder = self._timed, self._engine.recorder
        self._drop()
        if timed is None or (timed.meter is not None and timed.meter is not recorder):  # a step was recorded in it
            return
        if timed.ended is None:
            self._unfinished += 1
            return
        beside, self._unfinished = self._unfinished > 0 and timed.stage is not Stage.FIRST, 0
        if self.stage is None:
            return
        if self._steps is None:  # another rank decides: it needs the room that the leanest pass has shown here
            if timed.stage is Stage.LEAN and timed.meter is not None:
                room, before = self.found.room(timed, self._engine.backend), timed.meter.allocated_before
                # With gradient accumulation, gradients are there before some passes only.
                self._own = room, max(before, self._own[1] if self._own else 0)
                self._ranks.show_room(room)
            return
        if beside and self._beside < BESIDE:
            self._beside += 1  # [guard: backward that was skipped once] its graph lived in this pass
            return
        if self._count_deleted() != self._deleted:  # [guard: group that is deleted while passes are measured]
            self._begin(self._number + 1, again=True)
            return
        try:
            self.stage = self._steps.send(timed)
        except StopIteration as stop:
            plan: Plan | None = stop.value
            if plan is None:  # an interrupt had ended it
                self._begin(self._number + 1, again=True)
            else:
                self._settle(plan)

    def _look_for_failures(self) -> None:
        """Run the script again, for less memory, if the device ran out of it with a plan."""
        failed, limit = self._engine.backend.out_of_memory_errors(), self.found.limit
        if failed > self._failed and limit is not None and self._ranks.exchange.alone:
            self.found.short += round(LESS * limit)  # [guard: plans after an out-of-memory error]
            self._begin(self._number)
            less = f"plans leave {size(self.found.short)} of it from here on"
            logger.warning("The device ran out of memory with the plan of %s: %s.", self._state.root.name, less)
        self._failed = failed

    # Stages

    def _stage_of_pass(self, elements: int, *, aside: bool) -> Stage | None:
        """Return what a pass is for, the same in all ranks; None for the plan.  `aside`: it is not measured."""
        follows = self._ranks.follows
        if self.stage is None and self._number % WINDOW == 0 and self._renews():
            self._begin(self._number)
        if self.stage is not None and follows:
            self._follow()
        if self.stage is None:
            return None
        in_use = 0 if self.stage is not Stage.PLAN else self._engine.backend.in_use() or 0
        often = self._passed_over + 1 >= PASSED_OVER
        fits = self.stage is not Stage.PLAN or self.found.fits(elements, in_use)
        if not (fits or follows or aside or self.untimed) and (often or not self.found.fits(0, in_use)):
            # [guard: first steps that are outdated]
            others = self.found.in_flight > 1 or self._unfinished > 0  # whose memory goes again
            self._begin(self._number, again=True, allocated=0 if others else in_use)
            fits = True
        stage = decided = self.stage
        # A pass that may not fit replays and offloads everything, and does not count.
        if aside or self.untimed or not fits:
            stage = Stage.FIRST
        known = replace(self.found, ways=())  # which are large
        self._ranks.decide(self._number, Decision(stage, known))
        # Ranks that follow count what was decided, so that `settling` is the same in all.
        self._passed_over = self._passed_over + 1 if (decided if follows else stage) is Stage.FIRST else 0
        return stage

    def _leanest(self, policies: Mapping[int, Policy], operators: OperatorTimes | None = None) -> PassSettings:
        # Where no host memory may be used, what replay needs is kept.
        roles = Roles.keep_all if self._engine.host_room() == 0 else Roles.leanest
        return PassSettings(Mode.WHOLE, self._state.plans.order, lambda order: roles(len(order)), policies, operators)

    def _planned(self, found: Findings, *, whole: bool = False) -> PassSettings:
        """Return how a forward with a plan is followed; `whole`: also where nothing is offloaded."""
        roles = self._roles_of(found)
        if not (whole or roles.plan.offloaded or roles.recompute):
            self._engine.counters.passes += 1
            return PassSettings(Mode.IDLE)
        mode = Mode.WHOLE if whole or found.adopts else Mode.SCOPED
        return PassSettings(mode, self._state.plans.order, roles.roles, roles.recompute)

    def _whole(self) -> PassSettings:
        """Follow the whole forward, by the plan if there is one, also by one that is being tried."""
        # The host memory that this plan does not need was freed, and a captured pass can take none.
        trying = self.stage is Stage.PLAN  # [guard: captured pass while a plan is tried -> False]
        found = self.found if trying else self._chosen
        return self._leanest(self._policies) if found is None else self._planned(found, whole=True)

    def _roles_of(self, found: Findings) -> RolesOfPlan:
        assert found.plan is not None
        if self._roles is None or self._roles.plan is not found.plan:
            # Blocks may be skipped at random: the measured pass may not have had some that come later.
            full = found.limit is not None and found.bare.at(found.size) > found.limit
            self._roles = RolesOfPlan(self._state, found.plan, self._always, offload_others=full)
        return self._roles

    # Other ranks

    def _follow(self) -> None:
        """Take what another rank decided for this pass.

        If that rank does not answer, go on alone: with the plan there is, or with the script if there is none.
        """
        decision = self._ranks.decision(self._number)
        if decision is None:
            self.stage = self._steps = None
            if self._chosen is None:
                self._begin(self._number)
            return
        found, before = decision.found, self.found
        if self._own is not None:
            found = found.in_rank(*self._own)
        if found.plan == before.plan:
            found.plan = before.plan  # whose roles are known
        self.found, self.stage, self._steps = found, decision.stage, None
        if decision.stage is None and found.plan is not None:
            self._settle(found.plan)

    # The plan

    def _settle(self, plan: Plan) -> None:
        """Keep a plan from now on."""
        self.found.plan = plan
        chosen = self._chosen = self.found
        self.stage = self._steps = None
        self._settled, self._larger = self._number, 0
        if not plan.offloaded:
            self._engine.trim()
        peak = None if plan.peak_bytes is None else plan.peak_bytes + chosen.reserve
        if chosen.budget is not None and peak is not None and peak > chosen.budget:
            warn(
                f"memory_budget is {size(chosen.budget)}, but the smallest peak that a plan reaches is {size(peak)}: "
                "that plan is used."
            )
        number = f"{len(plan.offloaded)} of {len(plan.names)} groups of {self._state.root.name}"
        again = f", {len(plan.recomputed)} are recomputed" if plan.recomputed else ""
        passes = f"passes {self.begun} to {self._number}"
        if not self._ranks.exchange.alone:
            passes += f" by rank {self._ranks.exchange.leader}"
            self._ranks.decide(self._number, Decision(None, chosen))
        line = f"{number} are offloaded ({size(plan.offloaded_bytes)}){again}: measured in {passes}"
        logger.info("%s", f"{line}. {plan.because}" if plan.because else line)

    def _renews(self) -> bool:
        """Return whether the script runs again from this pass on.

        It does if more memory is in use than the plan was made for, or all inputs have become larger.
        """
        chosen = self._chosen
        assert chosen is not None
        # [guard: first batch smaller than the others]
        wanted = self._larger >= LARGER or not chosen.fits(0, self._engine.backend.in_use() or 0)
        return self._ranks.begins_again(self._number, wanted=wanted)

    def _settled_pass(self, elements: int) -> PassSettings:
        """Return how a pass is followed once there is a plan."""
        chosen = self._chosen
        assert chosen is not None
        fits = chosen.fits(elements, self._engine.backend.in_use() or 0)
        self._larger = 0 if fits else self._larger + 1
        if fits:
            # The pass before may have tried another plan, and the report is about the latest one with all groups.
            first = self._number == self._settled + 1  # [guard: report of the plan that is kept -> False]
            return self._planned(chosen, whole=first)
        # Larger inputs than the plan was made for; where other ranks follow it, they replay what it does.
        policies = self._policies if self._ranks.exchange.alone else self._roles_of(chosen).recompute
        return self._leanest(policies)
