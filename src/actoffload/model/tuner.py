"""The default of `offload`: measure the first passes, then follow the plan that came out.

What passes are for is in `Script`; what they show of a model is here, and how passes are followed.  The script runs
again when more memory is allocated before a pass than was planned with, or all inputs have become larger.

A pass is timed on the device, from the start of the forward to the end of its backward.  The events are read later: the
host waits for the device once for each pass that is measured.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._text import milliseconds, size
from .._torch.tensors import leaves
from .._warnings import warn
from ..engine.passes import ModelPass
from ..planner import OperatorCost, Variant
from ..replay.policy import Policy
from ..schedule.plan import Plan
from ..schedule.schedules import GroupSchedule, leanest
from ..tune.costs import gradient_bytes, kind_of, larger_operator, layer_costs, measured_link, probed_link, ways_of
from ..tune.exchange import WINDOW, LostRankError, Ranks
from ..tune.findings import Findings, Room
from ..tune.meter import Meter, Peak, Shown, TimedPass
from ..tune.script import MISSED, RECOMPUTING, SCATTER, OutdatedError, Plans, Script, Stage, Steps, Trial, fits
from .follow import ModelState
from .replays import OperatorTimes
from .steering import PassSettings, Steering

logger = logging.getLogger("actoffload")

BUSY = 0.02  # seconds for which the device is kept busy before a pass that is measured by group
HOST_GAPS = 0.05  # part of the host memory that buffers of other sizes may leave unused
LARGER = 16  # passes in a row that may not fit with the plan that is kept, before another one is made
LESS = 0.05  # part of the memory that plans leave after the device ran out of it

MEASURING = "This is the plan of the first steps, which are measured."
ALONE = (
    "No step can be timed, because parts of the model are called and not the module that was passed to offload: call "
    "that module, or offload the one that is called."
)
FORWARDS = "Several forwards run before a backward, so no pass can be timed."


class ModelScript(Script):
    """What the first passes of a model show, and the plan that follows from it.

    It does not reference the `Tuner`, which holds the generator that `run` returns: no cycle keeps either alive.

    `found` has what is known before the passes, and takes what they show.  `policies` are those of the groups that
    plans may replay.
    """

    def __init__(self, state: ModelState, found: Findings, policies: Mapping[int, Policy], ranks: Ranks) -> None:
        super().__init__(ranks)
        self._state, self._policies, self.found = state, policies, found
        self._engine, self._backend = state.engine, state.engine.backend
        self.elements = self.in_use = 0  # of the inputs of the pass that begins, and bytes in use before it
        self.pinned = 0  # most bytes of host memory of a plan

    def shown(self, timed: TimedPass) -> Shown | None:
        """Return what a pass showed here; None if a group of it is not there any more."""
        # [guard: group that is deleted while passes are measured]
        if any(self._state.groups[group].ref() is None for group in timed.sequence):
            return None
        idle = self.found.plan is not None and self.found.plan.idle
        peak = self.found.peak_in(Peak(timed.peak, timed.elements, timed.allocated))
        return timed.shown(peak, ran=bool(timed.sequence) or idle)

    def fits(self) -> bool:
        """Return whether the pass that begins now fits with the plan that is tried."""
        return self.found.fits(self.elements, self.in_use)

    def traced(self, traced: Sequence[TimedPass]) -> bool:
        """Return whether the operators of all replayed groups are known, or what compiled ones save."""
        latest = traced[-1]
        ran = set(self._state.order)
        known = {group for group in latest.sequence if self._state.groups[group].is_compiled}
        known |= latest.graphless  # [guard: groups that are frozen]
        known.update(*(timed.operators.groups for timed in traced))
        # [guard: first pass without inputs -> True]
        return latest.elements > 0 and known >= ran & self._policies.keys()

    def planned(self, traced: Sequence[TimedPass], lean: TimedPass) -> Plans:
        """Plan with the costs of the first rank, for the memory of all."""
        own = self._room(lean)
        costs = self._measured(traced, lean) if self.ranks.copies.leads else None
        gathered = self.gather((own, costs))
        first = gathered[0][1]
        assert first is not None
        found = self.found = first.for_all([room for room, _ in gathered], own, self.found.allocated_before)
        self.size = found.size
        if not found.ways:
            found.plan = Plan(max(len(found.names), 1), names=found.names, because="No group has run.")
            return (found.plan,)
        if found.limit is not None:
            # Earlier passes, whose backward is still to come, may keep everything.
            kept = sum(group[0].cost.nbytes for group in found.ways)
            found.limit = max(found.limit - (found.in_flight - 1) * kept, 0)
        plan = found.chosen(limit=None)
        found.bare = Peak(plan.peak_bytes or 0, found.size, found.allocated_before)
        self.limits = [] if found.limit is None else [found.limit]
        if found.limit is not None and found.bare.nbytes > found.limit:
            return (found.chosen(),)
        return (replace(plan, because=fits(found.bare.nbytes, found.limit), baseline_peak_bytes=None),)

    def _room(self, lean: TimedPass) -> Room:
        """Return the room of this rank by the leanest pass."""
        found, meter = self.found, lean.meter
        assert meter is not None
        found.allocated_before = max(meter.allocated_before, found.allocated_before)
        if not meter.borders:
            return Room()
        link = measured_link(meter) or probed_link(self._backend, self._engine.host_room())
        found.device_bytes, found.largest = self._backend.memory_limit(), lean.largest
        return Room(found.most(), lean.highest(), link)

    def _measured(self, traced: Sequence[TimedPass], lean: TimedPass) -> Findings:
        """Return what was measured in this rank."""
        found, meter, room = self.found, lean.meter, self._engine.host_room()
        assert meter is not None
        found.limit = None if not meter.borders else found.most()
        found.names = self._state.names(lean.sequence)
        found.in_flight, found.size, found.tokens = 1 + lean.waiting, lean.elements, lean.tokens
        found.gradients = gradient_bytes(meter, len(lean.sizes))
        # Where a plan offloads few of the groups that share a storage, it is copied, and the others keep it.
        found.excess = lean.shared  # [guard: room for what groups share]
        if lean.sequence:
            found.outside, found.ways = lean.outside(), self._ways(traced, lean, meter)
        if room is not None:  # [guard: plans for the host memory that there is]
            found.host_limit = room // found.in_flight
        return found

    def _ways(self, traced: Sequence[TimedPass], lean: TimedPass, meter: Meter) -> list[tuple[Variant, ...]]:
        """Return the ways to run each group, the first of them without replay."""
        groups = [self._state.groups[group] for group in lean.sequence]
        compiled = {k for k, group in enumerate(groups) if group.is_compiled}
        kinds = [kind_of(group.module) for group in groups]
        costs = layer_costs(meter, lean.sizes, kinds, compiled, self.found.allocated_before)
        operators: dict[int, list[OperatorCost]] = {}
        saved: dict[int, list[int]] = {}
        for each in traced:
            # [guard: operators of inputs of another size -> True]
            factor = lean.elements / each.elements if lean.elements and each.elements else 1.0
            for number, costs_of_group in each.operators.costs().items():
                operators[number] = [larger_operator(cost, factor) for cost in costs_of_group]
            for number, sizes in each.operators.saved.items():
                saved[number] = [math.ceil(factor * nbytes) for nbytes in sizes]
        numbers = [group.group for group in groups]
        ran = {number for each in traced for number in each.sequence}
        alike = {kind: number for number, kind in zip(numbers, kinds, strict=True) if number in ran}
        for number, kind in zip(numbers, kinds, strict=True):
            if number not in ran and (like := alike.get(kind)) is not None:
                # [guard: groups that run for the first time in the leanest pass]
                operators[number], saved[number] = operators.get(like, []), saved.get(like, [])
        return ways_of(numbers, costs, self._policies, operators, saved, self._backend.batch)

    # Trials

    def follow(self, plans: Plans) -> None:
        """Follow a plan from the pass on that begins now, for which its host memory is pinned."""
        (self.found.plan,) = plans
        # An earlier plan may be kept in the end.
        self.pinned = max(self.pinned, self.found.plan.offloaded_bytes * self.found.in_flight)
        self._engine.fit(self.pinned)
        # Blocks that were cut for the passes before would leave gaps for those with this plan.
        self._backend.release_device()

    def took(self, trial: Trial) -> None:
        """Note what a plan took, which others take, too."""
        found, (plan,), (peak,) = self.found, trial.plans, trial.peaks
        if peak and plan.idle:
            found.bare = Peak(peak, found.size, found.allocated_before)
        found.excess += trial.excess[0]  # [guard: room for what passes take]
        if trial.refused:
            # Tensors stayed on the device for lack of host memory: the plan is for less than it seemed to have.
            wanted, room = plan.offloaded_bytes * found.in_flight, self._engine.host_room()
            held = min(self.gather(wanted if room is None else min(room, wanted)))
            found.host_limit = int((1 - HOST_GAPS) * held) // found.in_flight

    def replanned(self, excess: Sequence[int], best: Trial | None) -> Plans:
        """Return a plan by what others have shown; after the trial of the `best` one that with whole replay.

        The leanest pass was whole replay, so what plans with other ways took beyond their prediction is left out there.
        There is none if nothing may be replayed, it is too large, or what it takes is not known; nor if it could not be
        kept, because the best takes about as long as the device alone in the leanest pass, without what it has waited
        for.
        """
        found, ways = self.found, self.found.ways
        limit = (math.inf if found.limit is None else found.limit) - excess[0]
        if best is None:
            return (found.chosen(),)
        found.pace = best.seconds / (best.plans[0].seconds or best.seconds)
        if found.in_flight > 1 or best.plans[0].peak_bytes is None or all(len(group) == 1 for group in ways):
            return ()
        pairs = [(group[-1].cost, group[-1].held or group[-1].cost) for group in ways]
        spans = ((c.gap_forward + c.forward + c.gap_backward + c.backward for c in pair) for pair in pairs)
        least = found.outside + sum(map(min, spans))
        if best.seconds < (1 + SCATTER) * least:  # [guard: whole replay that cannot be faster -> False]
            self.untried = f"{RECOMPUTING} takes at least {milliseconds(least)} a pass."
            return ()
        plan = found.chosen(excess=excess[0], whole=True)
        peak = (plan.peak_bytes or 0) - found.excess
        return () if peak > limit else (replace(plan, peak_bytes=peak + excess[0]),)


class Tuner(Steering):
    """Gives each pass its purpose, and keeps the plan as long as it fits.

    `budget` is the device memory in bytes that forward and backward may take, None for all that there is.  `policies`
    have for each group how it is replayed: `always`, or only if the memory is not enough.
    """

    measures = True

    def __init__(
        self, state: ModelState, budget: int | None, policies: Mapping[int, Policy], ranks: Ranks, *, always: bool
    ) -> None:
        super().__init__(state, GroupSchedule(), policies if always else {})
        self._engine = state.engine
        self._policies, self._ranks, self._budget = policies, ranks, budget
        self._lock = threading.Lock()
        self._number = 0
        self._timed: TimedPass | None = None  # the pass in progress, or the latest
        self._alone = False  # the groups are called, and not the model
        self._larger = 0  # passes in a row that do not fit with the plan that is kept
        self._failed = self._engine.backend.out_of_memory_errors()  # allocations so far
        self._short = 0  # bytes that earlier plans counted on and did not find
        self._engine.doubling = True
        self._begin(1)

    def _begin(self, number: int, allocated: int = 0) -> None:
        """Run the script from this pass on; `allocated`: bytes before a pass that may come again."""
        self._drop()
        self._begun = number
        found = Findings(budget=self._budget, short=self._short, allocated_before=allocated)
        self._script = ModelScript(self.state, found, {} if self._always else self._policies, self._ranks)
        self._steps: Steps[Plans] = self._script.run()
        self.stage: Stage | None = next(self._steps)  # of the present pass; None once there is a plan

    # What is known

    @property
    def settling(self) -> bool:  # type: ignore[override]
        """Whether passes are measured for a plan that is not final: in all ranks from the same pass on, no longer."""
        return self.stage is not None and not self._alone and self._script.missed <= MISSED

    def plan(self) -> Plan:
        """Return the plan, or what is done until there is one."""
        if self.chosen is None or self.chosen.plan is None:
            because = ALONE if self._alone else MEASURING if self.settling else FORWARDS
            return self._described(GroupSchedule(), because)
        return self._described(self.chosen.plan, "")

    # One pass

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings | None:
        """Return how this pass is followed; plan first if enough was measured."""
        with self._lock:
            self._alone = alone and not busy
            if alone or busy:
                return self._whole()
            aside = self._engine.backend.capturing() or not isinstance(self._engine.recorder, Meter | None)
            if aside:
                self._drop()  # [guard: pass measured while a graph is captured or a step is recorded]
                if self._ranks.copies.alone:
                    return self._whole()
            self._number += 1
            tensors = list(leaves(inputs))
            elements = sum(tensor.numel() for tensor in tensors)
            in_use = self._engine.backend.in_use() or 0
            self._look_for_failures()
            if self.stage is None and self._number % WINDOW == 0 and self.chosen is not None:
                # More memory is in use than the plan was made for, or all inputs have become larger.
                # [guard: first batch smaller than the others]
                wanted = self._larger >= LARGER or not self.chosen.fits(0, in_use)
                if self._ranks.begins_again(self._number, wanted=wanted):
                    self._begin(self._number)
            if self.stage is not None and self._number > self._begun:
                self._advance(elements, in_use)
            if aside:
                return self._whole()
            if self.stage is None:
                return self._settled_pass(elements, in_use)
            return self._measured_pass(tensors)

    def forward_ends(self, output: Any) -> None:
        """Time the pass until the end of its backward."""
        timed = self._timed
        if timed is not None and timed.thread == threading.get_ident():
            timed.watch(leaves(output))

    def pass_ends(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Take what a forward saved."""
        super().pass_ends(done, sequence)
        if self._timed is not None and self._timed.thread == threading.get_ident():
            self._timed.saw(done, sequence)
            self._timed.waiting = self.state.log.waiting(done)

    def retire(self) -> None:
        """Stop measuring."""
        with self._lock:
            self._drop()
            self._ranks.leave()

    def _drop(self) -> TimedPass | None:
        """End measuring the pass before this one; return it if all of it was measured."""
        timed, recorder = self._timed, self._engine.recorder
        self._timed = None
        if isinstance(recorder, Meter):
            self._engine.record(None)
        if timed is None or timed.ended is None or (timed.meter is not None and timed.meter is not recorder):
            return None  # a step was recorded in it, or there was no backward
        return timed

    # The script

    def _advance(self, elements: int, in_use: int) -> None:
        """Go on by what the pass before this one showed."""
        script = self._script
        script.timed, script.elements, script.in_use = self._drop(), elements, in_use
        try:
            self.stage = next(self._steps)
        except StopIteration as stop:
            if stop.value is not None:
                self._settle(stop.value[0])
            else:  # an interrupt had ended it
                self._ranks.leave()
                self._begin(self._number)
        except OutdatedError:
            # Where other passes are in progress, their memory goes again.
            self._begin(self._number, 0 if script.found.in_flight > 1 else in_use)
        except LostRankError as lost:
            self._ranks.lose(lost)
            self.stage = None
            if self.chosen is None:
                self._begin(self._number)

    def _look_for_failures(self) -> None:
        """Run the script again, for less memory, if the device ran out of it with a plan."""
        failed, limit = self._engine.backend.out_of_memory_errors(), self._script.found.limit
        if failed > self._failed and limit is not None and self._ranks.copies.alone:
            self._short += round(LESS * limit)  # [guard: plans after an out-of-memory error]
            self._begin(self._number)
            less = f"plans leave {size(self._short)} of it from here on"
            logger.warning("The device ran out of memory with the plan of %s: %s.", self.state.root.name, less)
        self._failed = failed

    def _measured_pass(self, tensors: Sequence[Any]) -> PassSettings | None:
        """Return how a pass of the script is followed."""
        stage, engine, backend = self.stage, self._engine, self._engine.backend
        meter = None
        if stage is Stage.LEAN:
            modules = [module for group in self.state.groups if (module := group.ref()) is not None]
            parts = dict.fromkeys(part for group in modules for part in group.modules())
            meter = Meter(backend, engine.counters, memory=True, modules=parts)
            backend.occupy(BUSY)
        memory = stage is Stage.PLAN and self._script.found.limit is not None
        self._timed = timed = TimedPass(engine, tensors, meter, memory=memory)
        if stage is Stage.FIRST:
            timed.operators = OperatorTimes(backend)
        return self._follow_found(self._script.found) if stage is Stage.PLAN else self._leanest(timed.operators)

    def _leanest(self, operators: OperatorTimes | None = None) -> PassSettings:
        # Where no host memory may be used, what replay needs is kept.
        settings = PassSettings(recompute=self._policies, operators=operators)
        return (
            settings if self._engine.host_room() == 0 else replace(settings, plan_for=lambda order: leanest(len(order)))
        )

    def _follow_found(self, found: Findings, *, whole: bool = False) -> PassSettings | None:
        """Return how a forward is followed by a plan that is tried or kept."""
        assert found.plan is not None
        if self._plan is not found.plan:
            # Blocks may be skipped at random: the measured pass may not have had some that come later.
            full = found.limit is not None and found.bare.at(found.size) > found.limit
            self._follow(found.plan, offload_others=full)
        return self._planned(whole=whole)

    def _whole(self) -> PassSettings | None:
        """Follow the whole forward, by the plan if there is one, also by one that is being tried."""
        # The host memory that this plan does not need was freed, and a captured pass can take none.
        trying = self.stage is Stage.PLAN  # [guard: captured pass while a plan is tried -> False]
        found = self._script.found if trying else self.chosen
        return self._leanest() if found is None else self._follow_found(found, whole=True)

    # The plan

    def _settle(self, plan: Plan) -> None:
        """Keep a plan from now on."""
        chosen = self.chosen = self._script.found
        chosen.plan = plan
        self.stage, self._larger = None, 0
        # The pass before may have tried another plan, and the report is about the latest one with all groups.
        self._unseen = 1  # [guard: report of the plan that is kept]
        needed = plan.offloaded_bytes * chosen.in_flight
        if not needed or needed < self._script.pinned:
            self._engine.fit(needed)
        peak = None if plan.peak_bytes is None else plan.peak_bytes + chosen.reserve
        if chosen.budget is not None and peak is not None and peak > chosen.budget:
            warn(
                f"memory_budget is {size(chosen.budget)}, but the smallest peak that a plan reaches is {size(peak)}: "
                "that plan is used."
            )
        number = f"{len(plan.offloaded)} of {len(plan.names)} groups of {self.state.root.name}"
        again = f", {len(plan.recomputed)} are recomputed" if plan.recomputed else ""
        line = f"{number} are offloaded ({size(plan.offloaded_bytes)}){again}: measured in passes {self._begun} to"
        logger.info("%s", f"{line} {self._number - 1}. {plan.because}".strip())

    def _settled_pass(self, elements: int, in_use: int) -> PassSettings | None:
        """Return how a pass is followed once there is a plan."""
        chosen = self.chosen
        assert chosen is not None
        fits = chosen.fits(elements, in_use)
        self._larger = 0 if fits else self._larger + 1
        planned = self._follow_found(chosen, whole=not fits)
        if fits or planned is None:
            return planned
        # Larger inputs than the plan was made for; where other ranks follow it, they replay what it does.
        leanest = self._leanest()
        return leanest if self._ranks.copies.alone else replace(leanest, recompute=planned.recompute)
