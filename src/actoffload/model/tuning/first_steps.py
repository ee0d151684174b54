"""The first steps of the default: measure a few passes, and choose a plan from what they show.

`[Note: the first steps]`  Nothing is known before the first step, and it must not run out of memory where any plan
fits.  So the first two passes offload everything that can be: the first warms up, in the second are measured the bytes,
when they are saved and needed, and the rates of the copies.  If the model fits without offloading too, two passes run
without: the device memory that the groups take comes from the first of these, their times from the second.  The
planner then chooses, from costs alone.  Because costs do not say everything that makes a step longer, whole passes with
the plan and without are compared before it is kept.  A plan that costs time is tried again with fewer groups, and
compared again: no plan is kept that was not measured.

If it does not fit, a third pass that offloads everything is timed, and passes in which all groups are recomputed, if
they may be.  In the first one or two of these the operators are timed.  Then come the groups with the outputs of
operators saved, and recomputed whole, each in a pass that warms up and one that is timed; and one more without
offloading, if that fits.  Passes with the plan show its peak, and if that is above the limit, another plan is chosen;
see [Note: peaks of plans].  Where steps are short, the time of the host decides, and it changes from pass to pass.  So
the plans for a host that is slower or faster than it was measured are run too, and the one whose passes were the
shortest is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from ..._torch.modules import is_compiled
from ...device.base import Backend
from ...planner import GroupPlan, Variant, choose, choose_recomputed, frontier, worth_saving
from ...replay import Policy
from ...schedule.costs import Link
from ...schedule.execution_order import GroupPlans
from ...schedule.plan import Plan
from ..conduct import FollowedModule
from ..reporting import PassLog, group_names
from .findings import Findings, Room, room_in
from .fitting import Fitting, Script, next_pass, trimming
from .group_costs import hook_seconds, layer_costs, measured_link
from .pace import TOLERANCE, TRIES, Comparison, refer, relative, typical
from .timed_pass import Stage, TimedPass
from .ways import HOST_SECONDS, Ways, timed_operators

__all__ = ["FirstSteps", "Script"]

FULL, SMALLER = 0.9, 4  # part of the most elements of inputs so far; passes with fewer that do not count
FREE = 0.002  # of the time of a pass; plans that differ by less are equally fast
NO_LINK = Link(1.0, 1.0)  # nothing is copied, so its rates do not matter
HOST_CAUTION = 2.5  # factor of the host time of hooks: on shared machines it varies by as much


class FirstSteps:
    """Finds out what the first steps show, and the plan that follows from it.

    It does not reference the `Progress`, which holds the generator that `run` returns: no cycle keeps either alive.

    Parameters
    ----------
    backend, groups, plans, log
        Of the model.
    budget : int, optional
        Bytes of device memory that a pass may take.
    policies : mapping of int to Policy, optional
        By group: how it may be recomputed where the memory is not enough.
    of_all : callable
        From the room of this rank to the room with which a plan fits in all ranks.
    with_others : callable
        Whether the model runs in several ranks.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        budget: int | None = None,
        policies: Mapping[int, Policy] | None = None,
        of_all: Callable[[Room], Room] = lambda room: room,
        with_others: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backend, self._groups, self._plans, self._log, self._budget = backend, groups, plans, log, budget
        self._policies, self._of_all, self._with_others = policies or {}, of_all, with_others
        self._ways = Ways(groups, self._policies)
        self.found = Findings()
        self._most = 0  # elements of inputs so far

    def run(self, *, warm: bool) -> Script:
        """Yield what the next pass is for, get it when it is over, and return a plan; see [Note: the first steps].

        `warm`: a pass has offloaded everything before.
        """
        found = self.found
        if not warm:
            yield from next_pass(Stage.FIRST)
        lean = yield from self._full(Stage.LEAN)
        found.in_flight = 1 + lean.waiting
        memory = bare = None
        found.fits_bare = self._fits_bare(lean)
        if found.fits_bare:
            memory = yield from self._full(Stage.MEMORY)
            found.bare = memory.peak_without()
            bare = yield from self._full(Stage.BARE)
        else:  # its times count, and the pass before may have allocated host memory, for which the device waited
            lean = yield from self._full(Stage.LEAN)
            assert lean.meter is not None
            # With gradient accumulation, gradients are there before some passes only.
            found.allocated_before = max(found.allocated_before, lean.meter.allocated_before)
        found.plan = self._choose(lean, memory, bare)
        if bare is None:
            if self._policies and not self._is_free(found.plan):
                found.plan = yield from self._recomputed(found.plan)
            found.plan = yield from Fitting(self._backend, found, self._with_others).run(found.plan)
        elif found.plan.offloaded:
            found.plan = yield from self._tried(found.plan, bare)
        else:
            without = [bare, (yield from trimming(found, Stage.WARM, found.plan)), (yield from next_pass(Stage.NONE))]
            without[-1].wait(self._backend)
            found.plan = refer(found.plan, typical(without, self._backend, found.size))
            if found.bare.nbytes and found.plan.peak_bytes is not None:
                found.plan = replace(found.plan, peak_bytes=found.bare.at(found.size))
        return found.plan

    def _full(self, stage: Stage) -> Generator[Stage, TimedPass, TimedPass]:
        """Yield a stage until its pass has inputs as large as any before, and return that pass; not for ever.

        The plan is for inputs of this size.  The last batch of an epoch is often smaller.
        """
        largest = timed = yield from next_pass(stage)
        for _ in range(SMALLER):
            self._most = max(self._most, timed.elements)
            if timed.elements >= FULL * self._most:  # [guard: inputs that are smaller than before -> True]
                return timed
            timed = yield from next_pass(stage)
            largest = max(timed, largest, key=lambda of: of.elements)
        self._most = largest.elements  # those that are larger still are rare
        return largest

    def _fits_bare(self, lean: TimedPass) -> bool:
        """Return whether a pass without offloading fits into the memory of the device, in all ranks."""
        assert lean.meter is not None
        own, self.found.size = room_in(lean, self._backend, self._budget), lean.elements
        room = self._of_all(own)
        if own.limit is None or room.limit is None:
            return True
        self.found.reserve = own.limit - room.limit
        self.found.limit, self.found.bare = room.limit, lean.peak_without()
        # Where a plan offloads few of the groups that share a storage, it is copied, and the others keep it.
        self.found.excess = lean.shared  # [guard: room for what groups share]
        self.found.allocated_before = lean.meter.allocated_before
        return room.free() >= 0

    def _choose(self, lean: TimedPass, memory: TimedPass | None, bare: TimedPass | None) -> GroupPlan:
        """Plan from what was measured in a pass that offloaded everything and one that offloaded nothing."""
        found, timed = self.found, lean if bare is None else bare
        assert lean.meter is not None
        assert timed.meter is not None
        self._wait(lean, memory, timed)
        begun = time.perf_counter()
        found.adopts, names = lean.adopted > 0, group_names(self._groups, lean.sequence)
        if timed.sequence != lean.sequence:
            return self._keep("The groups ran in another order in each of the first passes: their costs are not known.")
        link = measured_link(lean.meter) if lean.sequence else None
        if link is None and (bare is not None or not lean.sequence):
            return self._keep("Nothing is offloaded: only the last groups, which are kept, save anything that can be.")
        compiled = {k for k, key in enumerate(lean.sequence) if self._is_compiled(self._groups[key.group])}
        if memory is not None and memory.sequence != lean.sequence:
            memory = None
        layers = layer_costs(lean, timed, memory, compiled, found.allocated_before)
        found.size = timed.elements
        found.outside = timed.outside(self._backend)
        hooks = hook_seconds(lean.sizes, lean.meter, timed.meter) if timed is not lean else None
        each = HOST_SECONDS if hooks is None else hooks
        # Nothing was copied where all tensors are too small, or the host has no memory: then recomputation is left.
        known: dict[str, Any] = {"host_seconds": each, "host_caution": HOST_CAUTION, "among": None if link else ()}
        tolerance, without = FREE if self._budget is None else TOLERANCE, found.bare.at(found.size) or None
        costs = names, layers, link or NO_LINK
        found.choose = partial(choose, *costs, limit=found.limit, tolerance=tolerance, without_bytes=without, **known)
        ways = [(Variant(layer),) for layer in layers]
        found.search_frontier = partial(frontier, names, ways, link or NO_LINK, **known)
        plan = found.chosen()
        device = sum(layer.forward + layer.backward + layer.gap_forward + layer.gap_backward for layer in layers)
        tensors = sum(len(layers[k].saved) for k in plan.offloaded)
        host = sum(layer.host_forward + layer.host_backward for layer in layers) + 2 * tensors * each * HOST_CAUTION
        found.least_size = round(found.size * min(host / device, 1.0)) if device else 0
        found.planning = time.perf_counter() - begun
        return plan

    def _is_free(self, plan: GroupPlan) -> bool:
        """Return whether a plan is within the limit, and as fast as without offloading; also if its cost is unknown."""
        if plan.seconds is None or plan.peak_bytes is None or not plan.baseline_seconds:
            return True
        return plan.peak_bytes <= (self.found.limit or inf) and plan.seconds <= plan.baseline_seconds * (1 + TOLERANCE)

    def _recomputed(self, plan: GroupPlan) -> Script:
        """Measure passes in which all groups are recomputed, and return the plan in which some may be."""
        found, limit = self.found, self.found.limit or inf
        first = yield from next_pass(Stage.FIRST_AGAIN)
        first.wait(self._backend)
        assert found.choose is not None
        names, layers, link = found.choose.args
        of_group = {key.group: layer for key, layer in zip(first.sequence, layers, strict=False)}
        costs = timed_operators(first, found.size)
        operators = self._ways.operators(costs, of_group)
        if not operators.keys() >= of_group.keys() & self._policies.keys():  # the first of their kinds were watched
            second = yield from next_pass(Stage.FIRST_AGAIN)
            second.wait(self._backend)
            operators = self._ways.operators(costs | timed_operators(second, found.size), of_group)
        saves = {group: tuple(of.name for of in worth_saving(operators.get(group, ()))) for group in self._policies}
        found.saves = saves
        yield from next_pass(Stage.AGAIN)  # to warm up: what is saved has changed
        again = timed = yield from next_pass(Stage.AGAIN)
        whole = None
        if any(operators.values()):
            found.saves = dict.fromkeys(self._policies, ())
            yield from next_pass(Stage.WHOLE)  # to warm up
            whole = yield from next_pass(Stage.WHOLE)
            found.saves = saves
        found.again = again.peak_without()
        if found.needs(Stage.BARE_AGAIN, found.size, found.allocated_before) <= limit:
            timed = yield from next_pass(Stage.BARE_AGAIN)
        self._wait(again, whole, timed)
        found.saves = {}
        if again.sequence != timed.sequence or group_names(self._groups, again.sequence) != names:
            return plan
        begun = time.perf_counter()
        ways = self._ways.of(operators, layers, again, timed, whole, found.size, found.allocated_before)
        found.outside = timed.outside(self._backend)
        found.choose = partial(choose_recomputed, names, ways, link, **found.choose.keywords)
        assert found.search_frontier is not None
        found.search_frontier = partial(frontier, names, ways, link, **found.search_frontier.keywords)
        better = found.chosen()
        if relative(plan) <= relative(better) and (plan.peak_bytes or inf) <= limit:
            better = plan
        found.planning += time.perf_counter() - begun
        return better

    def _tried(self, plan: GroupPlan, bare: TimedPass) -> Script:
        """Compare passes with a plan, and then with ever fewer groups of it, with passes without offloading.

        Return the first plan that costs nothing; one that offloads nothing if there is none among the first few.
        """
        found, compared = self.found, list[Comparison]()
        while True:
            now, bare = yield from self._compared(plan, bare)
            compared.append(now)
            without = now.times.without
            if now.is_free:
                found.times, plan = now.times, refer(plan, without)
                return plan if now is compared[0] else self._only(plan, compared[:-1])
            plan = found.chosen(among=plan.offloaded[: now.fewer()])
            if not plan.offloaded or len(compared) > TRIES:
                kept = self._keep(f"Nothing is offloaded, because {compared[0].because(compared[1:])}.")
                return replace(
                    kept, seconds=without, baseline_seconds=without, peak_bytes=found.bare.at(found.size) or None
                )

    def _compared(self, plan: GroupPlan, bare: TimedPass) -> Generator[Stage, TimedPass, tuple[Comparison, TimedPass]]:
        """Compare passes with a plan and without offloading, of which `bare` is the first, and return the last of them.

        The order of the passes is that of [Note: which pass counts].
        """
        found, offloaded, without = self.found, list[TimedPass](), [bare]
        found.plan = plan
        while True:
            yield from next_pass(Stage.PLAN)  # the first pass after a change warms up
            offloaded += [(yield from next_pass(Stage.PLAN)), (yield from next_pass(Stage.PLAN))]
            yield from trimming(found, Stage.WARM, plan)
            without.append((yield from next_pass(Stage.NONE)))
            without[-1].wait(self._backend)
            now = Comparison.of(plan, offloaded, without, self._backend, found.size)
            if now.is_clear or len(offloaded) > 2:
                return now, without[-1]
            without.append((yield from next_pass(Stage.NONE)))

    def _only(self, plan: GroupPlan, compared: Sequence[Comparison]) -> GroupPlan:
        """Return a plan that says why it offloads no more groups."""
        because = compared[0].because(compared[1:])
        number = len(plan.offloaded)
        only = "Only 1 group is" if number == 1 else f"Only {number} groups are"
        return replace(plan, because=f"{only} offloaded, because {because}.")

    @staticmethod
    def _is_compiled(group: FollowedModule) -> bool:
        return group.compiled or is_compiled(group.module)

    def _wait(self, *passes: TimedPass | None) -> None:
        """Wait until the device has run all of some passes, so that what was measured in them may be read."""
        for timed in passes:
            if timed is not None:
                timed.wait(self._backend)

    def _keep(self, because: str) -> GroupPlan:
        order = self._plans.order
        names = group_names(self._groups, order)
        return GroupPlan(names, Plan(max(len(names), 1)), self._log.bytes_of(order), because=because)
