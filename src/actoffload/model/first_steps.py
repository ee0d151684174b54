"""The first steps of the default: measure a few passes, and choose a plan from what they show.

`[Note: the first steps]`  Nothing is known before the first step, and it must not run out of memory where any plan
fits.  So the first two passes offload everything that can be: the first warms up, in the second are measured the bytes,
when they are saved and needed, and the rates of the copies.  If the model fits without offloading too, two passes run
without: the device memory that the groups take comes from the first of these, their times from the second.  The
planner then chooses, from costs alone.  Because costs do not say everything that makes a step longer, whole passes with
the plan and without are compared before it is kept.

If it does not fit, a third pass that offloads everything is timed, and passes in which all groups are recomputed, if
they may be: in the first the operators are timed, in the second the groups, in the third the same without offloading if
that fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple, TypeAlias

from .._torch import is_compiled
from ..device.base import Backend
from ..planner import (
    GroupPlan,
    Variant,
    choose,
    choose_recomputed,
    frontier,
    worth_saving,
)
from ..recompute import Policy, never, saving
from ..schedule.execution_order import GroupPlans
from ..schedule.plan import Plan
from ..schedule.timeline import milliseconds, size
from .conduct import FollowedModule
from .group_costs import hook_seconds, layer_costs, measured_link
from .reporting import PassLog, group_names
from .steering import RolesOfPlan
from .timed_pass import Stage, TimedPass
from .ways import HOST_SECONDS, Ways

__all__ = ["FirstSteps", "Script", "StepTimes"]

TOLERANCE, SHORT_TOLERANCE, SHORT = 0.01, 0.02, 0.020  # of the time of a pass; for short passes; seconds
FREE = 0.002  # of the time of a pass; plans that differ by less are equally fast
MORE = 0.005  # of the limit: so much more allocated memory is looked at
CARE = 0.002  # part of a peak by which plans with recomputation may exceed what was predicted
ROOM = 0.03  # fraction of the device memory that predictions leave free
CAUTION = 0.7  # part of the tolerance that a plan may cost when it is measured, for passes that take longer later
MOST = 0.03  # cost, as a fraction of the time of a pass, from which on nothing is offloaded
SMALLER = 0.9  # of a peak: the next choice that a report names
HOST_CAUTION = 2.5  # factor of the host time of hooks: on shared machines it varies by as much


class StepTimes(NamedTuple):
    """Seconds of a pass with the plan and without offloading, and the numbers of the first and last pass compared."""

    offloaded: float
    without: float
    first: int
    last: int


Script: TypeAlias = Generator[Stage, TimedPass, GroupPlan]


class FirstSteps:
    """What the first steps showed, and the plan that follows from it.

    It does not reference the `Tuner`, which holds the generator that `run` returns: no cycle keeps either alive.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        budget: int | None = None,
        policies: Mapping[int, Policy] | None = None,
    ) -> None:
        self._backend, self._groups, self._plans, self._log, self._budget = backend, groups, plans, log, budget
        self._policies = policies or {}  # by group: how it may be recomputed where the memory is not enough
        self._ways = Ways(groups, self._policies)
        self.roles: RolesOfPlan | None = None  # of the plan that is tried, and in the end chosen
        self.adopts = False  # groups are offloaded with what was saved before them
        self.limit: int | None = None  # bytes of device memory
        self.size = 0  # elements of the inputs
        self._in_flight = 1  # passes
        self._before = 0  # bytes of device memory that are allocated before a pass
        self.host_bytes: int | None = None  # to which the host memory is to be reduced now
        self.least_size = 0  # fewest elements for which hooks cost nothing
        self.planning = 0.0  # seconds
        self.recompute: Mapping[int, Policy] = {}  # by group, in the present stage, and in the end in the plan
        self.times: StepTimes | None = None
        self._bare_peak = 0  # bytes of device memory without offloading
        self._choose_among: partial[GroupPlan] | None = None
        self._search_frontier: partial[tuple[GroupPlan, ...]] | None = None
        self._careful = False  # some groups may be recomputed

    def run(self, *, warm: bool) -> Script:
        """Yield what the next pass is for, get it when it is over, and return a plan; see [Note: the first steps].

        `warm`: a pass has offloaded everything before.
        """
        if not warm:
            yield from _next(Stage.FIRST)
        lean = yield from _next(Stage.LEAN)
        self._in_flight = 1 + lean.waiting
        memory = bare = None
        if self._fits_bare(lean):
            memory = yield from _next(Stage.MEMORY)
            self._bare_peak = memory.peak_without()
            bare = yield from _next(Stage.BARE)
        else:  # its times count, and the pass before may have allocated host memory, for which the device waited
            lean = yield from _next(Stage.LEAN)
        plan = self._choose(lean, memory, bare)
        self.roles = RolesOfPlan(self._groups, plan)
        if bare is None:
            if self._policies and not self._is_free(plan):
                plan = yield from self._recomputed(plan)
                self.roles = RolesOfPlan(self._groups, plan)
            yield from self._trimming(Stage.PLAN, plan)
            timed = [(yield from _next(Stage.PLAN)), (yield from _next(Stage.PLAN))]
            timed[-1].wait(self._backend)
            plan = replace(plan, seconds=self._fastest(timed)) if plan.seconds is not None else plan
            self.roles = RolesOfPlan(self._groups, plan)
            return plan
        if not plan.offloaded:
            without = [bare, (yield from self._trimming(Stage.WARM, plan)), (yield from _next(Stage.NONE))]
            without[-1].wait(self._backend)
            plan = self._timed(plan, self._fastest(without))
            self.roles = RolesOfPlan(self._groups, plan)
            return plan
        # The first pass after a change warms up.  Passes without offloading are timed before and behind, because the
        # device gets slower when it gets warm.
        yield from _next(Stage.PLAN)
        offloaded = [(yield from _next(Stage.PLAN)), (yield from _next(Stage.PLAN))]
        yield from self._trimming(Stage.WARM, plan)
        plan = self._compare(plan, offloaded, [bare, (yield from _next(Stage.NONE))])
        self.roles = RolesOfPlan(self._groups, plan)
        return plan

    def _trimming(self, stage: Stage, plan: GroupPlan) -> Generator[Stage, TimedPass, TimedPass]:
        """Yield a stage that warms up, and let its pass begin with freeing host memory that the plan does not need."""
        self.host_bytes = plan.offloaded_bytes * self._in_flight
        timed = yield from _next(stage)
        self.host_bytes = None
        return timed

    def frontier(self) -> tuple[GroupPlan, ...]:
        """Return the plans that are worth having; none if the costs are not known."""
        found = () if self._search_frontier is None else self._search_frontier()
        return tuple(map(_careful, found)) if self._careful else found

    def next_choice(self) -> str:
        """Return what a smaller peak would cost, in a sentence; empty if that is not known or there is none."""
        if self.roles is None or self._choose_among is None:
            return ""
        plan = self.roles.plan
        if plan.peak_bytes is None or not plan.baseline_seconds:
            return ""
        found = self._choose_among(limit=round(plan.peak_bytes * SMALLER))
        found = _careful(found) if self._careful else found
        if found.seconds is None or found.peak_bytes is None or found.peak_bytes >= plan.peak_bytes:
            return ""
        cost = found.seconds / (found.baseline_seconds or plan.baseline_seconds)
        peaks = f"A peak of {size(found.peak_bytes)} instead of {size(plan.peak_bytes)}"
        budget = f'memory_budget="{math.ceil(found.peak_bytes / 2**20)}MiB"'
        return f"{peaks} would cost at most {cost:.2f} x the time of a pass without offloading: {budget}."

    def fits(self, elements: int) -> bool:
        """Return whether a pass with inputs of this size fits with the plan, or without one if there is none."""
        peak = None if self.roles is None else self.roles.plan.peak_bytes
        peak = self._bare_peak if peak is None else peak
        # An upper bound: activations grow with the inputs, weights do not.
        return self.limit is None or elements <= self.size or peak * elements <= self.limit * self.size

    def exceeds(self, in_use: int) -> bool:
        """Return whether the plan exceeds the limit because more is allocated before a pass than when it was measured.

        An optimizer allocates its states in its first step, which may come after the first passes.
        """
        peak, more = None if self.roles is None else self.roles.plan.peak_bytes, in_use - self._before
        if peak is None or self.limit is None or self._in_flight > 1:
            return False
        return more > MORE * self.limit and peak + more > self.limit

    def _fits_bare(self, lean: TimedPass) -> bool:
        """Return whether a pass without offloading fits into the memory of the device."""
        assert lean.meter is not None
        limit, self.size = self._backend.memory_limit(), lean.elements
        if limit is None or not lean.meter.borders:
            return True
        in_flight = lean.waiting * sum(map(sum, lean.sizes))  # of earlier passes, if they keep everything
        self.limit = round(limit * (1 - ROOM)) - in_flight
        if self._budget is not None:
            self.limit = min(self.limit, self._budget - in_flight)
        self._bare_peak, self._before = lean.peak_without(), lean.meter.allocated_before
        return self._bare_peak <= self.limit

    def _choose(self, lean: TimedPass, memory: TimedPass | None, bare: TimedPass | None) -> GroupPlan:
        """Plan from what was measured in a pass that offloaded everything and one that offloaded nothing."""
        timed = lean if bare is None else bare
        assert lean.meter is not None
        assert timed.meter is not None
        self._wait(lean, memory, timed)
        begun = time.perf_counter()
        self.adopts, names = lean.adopted > 0, group_names(self._groups, lean.sequence)
        link = measured_link(lean.meter)
        if link is None:
            return self._keep("Nothing is offloaded: only the last groups, which are kept, save anything that can be.")
        if timed.sequence != lean.sequence:
            return self._keep("The groups ran in another order in each of the first passes: their costs are not known.")
        compiled = {k for k, key in enumerate(lean.sequence) if is_compiled(self._groups[key.group].module)}
        if memory is not None and memory.sequence != lean.sequence:
            memory = None
        layers = layer_costs(lean, timed, memory, compiled)
        found = hook_seconds(lean.sizes, lean.meter, timed.meter) if timed is not lean else None
        each = HOST_SECONDS if found is None else found
        among = partial(choose, names, layers, link, host_seconds=each, host_caution=HOST_CAUTION)
        among = partial(among, limit=self.limit, tolerance=FREE if self._budget is None else TOLERANCE)
        self._choose_among = among
        ways = [(Variant(layer),) for layer in layers]
        self._search_frontier = partial(frontier, names, ways, link, host_seconds=each, host_caution=HOST_CAUTION)
        plan = among()
        device = sum(layer.forward + layer.backward + layer.gap_forward + layer.gap_backward for layer in layers)
        tensors = sum(len(layers[k].saved) for k in plan.offloaded)
        host = sum(layer.host_forward + layer.host_backward for layer in layers) + 2 * tensors * each * HOST_CAUTION
        self.size = timed.elements
        self.least_size = round(self.size * min(host / device, 1.0)) if device else 0
        self.planning = time.perf_counter() - begun
        return plan

    def _is_free(self, plan: GroupPlan) -> bool:
        """Return whether a plan is within the limit, and as fast as without offloading; also if its cost is unknown."""
        if plan.seconds is None or plan.peak_bytes is None or not plan.baseline_seconds:
            return True
        return plan.peak_bytes <= (self.limit or inf) and plan.seconds <= plan.baseline_seconds * (1 + TOLERANCE)

    def _recomputed(self, plan: GroupPlan) -> Script:
        """Measure passes in which all groups are recomputed, and return the plan in which some may be."""
        self.recompute = self._policies
        first = yield from _next(Stage.FIRST_AGAIN)
        assert first.operators is not None
        first.wait(self._backend)
        assert self._choose_among is not None
        names, layers, link = self._choose_among.args
        forwards = {key.group: layer.forward for key, layer in zip(first.sequence, layers, strict=False)}
        operators = self._ways.operators(first.operators.costs(), forwards)
        self.recompute = {
            group: saving(of.name for of in worth_saving(operators.get(group, ()))) for group in self._policies
        }
        yield from _next(Stage.AGAIN)  # to warm up: what is saved has changed
        again = timed = yield from _next(Stage.AGAIN)
        whole = None
        if any(operators.values()):
            saving_outputs, self.recompute = self.recompute, dict.fromkeys(self._policies, never)
            whole = yield from _next(Stage.WHOLE)
            self.recompute = saving_outputs
        if again.peak_without() <= (self.limit or inf):
            timed = yield from _next(Stage.BARE_AGAIN)
        self._wait(again, whole, timed)
        self.recompute = {}
        if again.sequence != timed.sequence or group_names(self._groups, again.sequence) != names:
            return plan
        begun = time.perf_counter()
        ways = self._ways.of(operators, layers, again, timed, whole)
        how = dict(self._choose_among.keywords)
        if self.limit is not None:
            how["limit"] = math.floor(self.limit / (1 + CARE)) + 1
        self._choose_among = partial(choose_recomputed, names, ways, link, **how)
        assert self._search_frontier is not None
        self._search_frontier = partial(frontier, names, ways, link, **self._search_frontier.keywords)
        found = _careful(self._choose_among())
        self._careful = True
        if _relative(plan) <= _relative(found) and (plan.peak_bytes or inf) <= (self.limit or inf):
            found = plan
        self.planning += time.perf_counter() - begun
        self.recompute = {again.sequence[k].group: saving(found.saves[k] or ()) for k in found.recomputed}
        return found

    def _compare(self, plan: GroupPlan, offloaded: list[TimedPass], without: list[TimedPass]) -> GroupPlan:
        """Return the plan if passes with it are as short as without, and otherwise one that offloads less."""
        without[-1].wait(self._backend)
        fast, slow = self._fastest(without), self._fastest(offloaded)
        numbers = [timed.number for timed in (*offloaded, *without)]
        allowed, cost = CAUTION * (SHORT_TOLERANCE if fast < SHORT else TOLERANCE), slow / fast - 1
        if cost <= allowed:
            self.times = StepTimes(slow, fast, min(numbers), max(numbers))
            return self._timed(plan, fast)
        number = len(plan.offloaded)
        less = math.floor(number * min(allowed / cost, 1.0))
        tried = f"with {number} groups offloaded ({size(plan.offloaded_bytes)}) a pass took {milliseconds(slow)}"
        because = f"{tried}, without offloading {milliseconds(fast)}, although copies should have taken no time"
        if cost > MOST or not less:
            kept = self._keep(f"Nothing is offloaded, because {because}.")
            return replace(kept, seconds=fast, baseline_seconds=fast, peak_bytes=self._bare_peak or None)
        assert self._choose_among is not None
        found = self._timed(self._choose_among(among=plan.offloaded[:less]), fast)
        return replace(found, because=f"Only {len(found.offloaded)} groups are offloaded, because {because}.")

    def _wait(self, *passes: TimedPass | None) -> None:
        """Wait until the device has run all of some passes, so that what was measured in them may be read."""
        for timed in passes:
            if timed is not None:
                timed.wait(self._backend)

    def _fastest(self, passes: list[TimedPass]) -> float:
        """Return the seconds of the fastest of some passes, for as many elements as were planned for."""
        return min(timed.pace(self._backend) for timed in passes) * max(self.size, 1)

    def _timed(self, plan: GroupPlan, without: float) -> GroupPlan:
        """Return a plan whose expected time refers to the measured time of whole passes without offloading."""
        if plan.seconds is None or not plan.baseline_seconds:
            return plan
        return replace(plan, seconds=plan.seconds / plan.baseline_seconds * without, baseline_seconds=without)

    def _keep(self, because: str) -> GroupPlan:
        order = self._plans.order
        names = group_names(self._groups, order)
        return GroupPlan(names, Plan(max(len(names), 1)), self._log.bytes_of(order), because=because)


def _careful(plan: GroupPlan) -> GroupPlan:
    """Return a plan with the peak that it has at most."""
    return plan if plan.peak_bytes is None else replace(plan, peak_bytes=math.ceil(plan.peak_bytes * (1 + CARE)))


def _relative(plan: GroupPlan) -> float:
    """Return the time of a pass with a plan, relative to that without offloading and recomputing."""
    return plan.seconds / plan.baseline_seconds if plan.seconds and plan.baseline_seconds else inf


def _next(stage: Stage) -> Generator[Stage, TimedPass, TimedPass]:
    """Yield a stage until a pass of it is over, and return that pass."""
    while True:
        timed = yield stage
        if timed.stage is stage:
            return timed
