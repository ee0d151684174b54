"""The first passes of a model: measure two, and choose the fastest plan that fits.

`[Note: the first passes]`  Nothing is known before the first pass, and it must fit where any plan does.  So it is the
leanest there is: every group is replayed in backward, and what it needs for that is offloaded.  It traces and proves
the groups and times their operators.  The next pass runs in the same way without proofs, and is measured by group:
bytes, times, and the rates of copies.  Events would measure a host that is slower than the device, so the device is
kept busy before each group while the host queues it.  From both passes follows what each group costs in every other
way.  A compiled group has no operators to time: it runs again as a whole, and what it would save otherwise is counted
where it is dropped.  If everything fits without, two more passes keep everything, to know its peak and its time.  One
with the final plan is followed as a whole, for the report; then nothing is installed.

Otherwise the planner chooses the fastest plan that fits, and it is tried: see `trials` [Note: trials of plans].  Its
host memory is pinned before its first pass, which takes device memory; its second is timed.  A pass that takes longer
than was simulated runs once more, because the host may have paused, and the faster of the two counts.  If one takes
more memory than the limit, all plans are expected to take as much more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias

from torch.nn import Module

from ..._text import milliseconds
from ...planner import OperatorCost, Variant, replay_ways
from ...planner.variants import correct_times
from ...replay import Policy
from ...schedule.costs import LayerCost, Saved
from ...schedule.plan import Plan
from ...tune.costs import gradient_bytes, layer_costs, probed_link
from ...tune.trials import Trial, fits, keep_best
from ..follow import FollowedModule, ModelState
from .findings import Findings, Room
from .metering import Peak, Stage, TimedPass

FULL = 0.9  # part of the most elements of inputs so far, with which a pass counts
PATIENCE = 6  # passes that are run until one counts
HOST_GAPS = 0.05  # part of the host memory that buffers of other sizes may leave unused
LONGER = 0.05  # part of the simulated time by which a pass takes longer that is timed once more
TRACES = 2  # passes, or steps of a pipeline, in which groups are traced

Steps: TypeAlias = Generator[Stage, TimedPass, Plan]


class Script:
    """Finds out what the first passes show, and the plan that follows from it.

    It does not reference the `Tuner`, which holds the generator that `run` returns: no cycle keeps either alive.

    `found` has what is known before the passes, and takes what they show.  `policies` are those of the groups that
    plans may replay.  `room_of_all` returns the room with which a plan fits in all ranks, from that of this rank.
    """

    def __init__(
        self, state: ModelState, found: Findings, policies: Mapping[int, Policy], room_of_all: Callable[[Room], Room]
    ) -> None:
        self._state, self._policies, self._room_of_all = state, policies, room_of_all
        self._backend, self._host_room = state.engine.backend, state.engine.host_room
        self.found = found
        self._most = 0  # elements of inputs so far
        self._least = 0.0  # seconds of whole replay, where it is not tried

    def run(self) -> Steps:
        """Yield what the next pass is for, get it when it is over, and return a plan; see [Note: the first passes]."""
        found = self.found
        traced = list[TimedPass]()
        known = False
        while not known and len(traced) < TRACES:
            traced.append((yield from self._pass(Stage.FIRST)))
            # [guard: first pass without inputs -> True]
            known = traced[-1].elements > 0 and not self._untraced(traced)
        lean = yield from self._pass(Stage.LEAN)
        self._look_at_room(lean)
        for timed in (*traced, lean):
            timed.wait()
        plan = found.plan = self._choose(traced, lean)
        if found.limit is None or not found.ways:
            return plan
        return (yield from self._fitted(plan))

    def _untraced(self, traced: Sequence[TimedPass]) -> bool:
        """Return whether the operators of a replayed group are not known, or what a compiled one saves."""
        ran = set(self._state.plans.order)
        known = {group for group in traced[-1].sequence if self._state.groups[group].is_compiled}
        known |= traced[-1].graphless  # [guard: groups that are frozen]
        known.update(*(timed.operators.groups for timed in traced if timed.operators is not None))
        return not known >= ran & self._policies.keys()

    def _pass(self, stage: Stage) -> Generator[Stage, TimedPass, TimedPass]:
        """Yield a stage until a pass of it counts, and return that pass; not for ever.

        It has to call groups: the model may take another branch at times.  The plan is for the largest inputs: the last
        batch of an epoch is often smaller.  Where inputs are larger than all before, groups are traced and proven
        again, which takes time.
        """
        passes = list[TimedPass]()
        while len(passes) < PATIENCE:
            timed = yield stage
            if timed.stage is not stage:
                continue
            passes.append(timed)
            before, self._most = self._most, max(self._most, timed.elements)
            # [guard: passes that call no group -> True]
            called = (
                timed.sequence
                or stage is Stage.FIRST
                or (stage is Stage.PLAN and self.found.plan and self.found.plan.idle)
            )
            # [guard: inputs that are smaller than before, or larger -> True]
            alike = stage is Stage.FIRST or FULL * self._most <= timed.elements <= before / FULL
            if called and alike:
                return timed
        largest = max(passes, key=lambda each: (bool(each.sequence), each.elements))
        self._most = largest.elements  # those that are larger still are rare
        return largest

    def _look_at_room(self, lean: TimedPass) -> None:
        """Note the memory that a plan may take, so that it fits in all ranks."""
        found = self.found
        assert lean.meter is not None
        found.in_flight, found.adopts = 1 + lean.waiting, lean.adopted > 0
        found.size, found.tokens = lean.elements, lean.tokens
        found.gradients = gradient_bytes(lean.meter, len(lean.sizes))
        own = found.room(lean, self._backend)
        room = self._room_of_all(own)
        found.link = room.link
        found.allocated_before = max(lean.meter.allocated_before, found.allocated_before)
        if own.limit is None or room.limit is None:
            return
        found.reserve, found.limit = own.limit - room.limit, room.limit
        # Where a plan offloads few of the groups that share a storage, it is copied, and the others keep it.
        found.excess = lean.shared  # [guard: room for what groups share]

    def _choose(self, traced: Sequence[TimedPass], lean: TimedPass) -> Plan:
        """Plan from what was measured."""
        found = self.found
        if not lean.sequence:
            names = self._state.names()
            return Plan(max(len(names), 1), names=names, because="No group has run.")
        names = self._state.names(lean.sequence)
        found.outside = lean.outside()
        found.link = found.link or probed_link(self._backend, self._host_room())
        room = self._host_room()
        if room is not None:  # [guard: plans for the host memory that there is]
            found.host_limit = room // found.in_flight
        found.names, found.ways = names, self._ways(traced, lean)
        if found.limit is not None:
            # Earlier passes, whose backward is still to come, may keep everything; so far they were replayed.
            more = sum(group[0].cost.nbytes for group in found.ways) - sum(map(sum, lean.sizes))
            found.limit = max(found.limit - lean.waiting * max(more, 0), 0)
        kept = found.chosen(limit=None)
        found.bare = Peak(kept.peak_bytes or 0, found.size, found.allocated_before)
        if found.limit is None or found.bare.nbytes <= found.limit:
            return replace(kept, because=fits(found.bare.nbytes, found.limit), baseline_peak_bytes=None)
        return found.chosen()

    def _ways(self, traced: Sequence[TimedPass], lean: TimedPass) -> list[tuple[Variant, ...]]:
        """Return the ways to run each group, the first of them without replay."""
        assert lean.meter is not None
        groups = [self._state.groups[group] for group in lean.sequence]
        compiled = {k for k, group in enumerate(groups) if group.is_compiled}
        kinds = [_kind(group.module) for group in groups]
        costs = layer_costs(lean.meter, lean.sizes, kinds, compiled, self.found.allocated_before)
        operators: dict[int, list[OperatorCost]] = {}
        saved: dict[int, list[int]] = {}
        for each in traced:
            assert each.operators is not None
            # [guard: operators of inputs of another size -> True]
            factor = lean.elements / each.elements if lean.elements and each.elements else 1.0
            for number, costs_of_group in each.operators.costs().items():
                operators[number] = [_larger(cost, factor) for cost in costs_of_group]
            for number, sizes in each.operators.saved.items():
                saved[number] = [math.ceil(factor * nbytes) for nbytes in sizes]
        return ways_of(groups, costs, self._policies, operators, saved, self._backend.batch)

    def _fitted(self, plan: Plan) -> Steps:
        """Try plans, and the same with whole replay, and return the best; see `trials` [Note: trials of plans]."""
        best, kept, took = yield from keep_best((plan,), self._try, self._replanned, "pass")
        (plan,), (peak,) = best.plans, best.peaks
        if plan.idle:
            peak, limit = peak or plan.peak_bytes or 0, self.found.limit or 0
            because = plan.because if peak > limit else fits(peak, limit)
            return replace(plan.measured(best.seconds, best.seconds), peak_bytes=peak, because=because)
        if self._least:
            least = milliseconds(self._least)
            took = f"Recomputing every group, about what checkpointing does, takes at least {least} a pass."
        timed, because = self._as_timed(best), f"{plan.because} {took}".strip()
        if kept is not best:
            whole = replace(kept.plans[0], peak_bytes=kept.peaks[0])
            timed = whole.measured(kept.seconds, timed.baseline_seconds)
        return replace(timed, because=because)

    def _try(self, plans: tuple[Plan, ...], whole: bool) -> Generator[Stage, TimedPass, Trial[Plan]]:
        """Run passes with a plan.  The first takes host memory and is not timed, except with whole replay after it."""
        found, passes, refused, (plan,) = self.found, list[TimedPass](), False, plans
        found.plan, limit = plan, found.limit or inf
        if not whole:
            found.host_bytes = plan.offloaded_bytes * found.in_flight
            passes.append((yield from self._pass(Stage.PLAN)))
            found.host_bytes, refused = None, passes[0].refused > 0
        if refused:
            # Tensors stayed on the device for lack of host memory: the plan is for less than it seemed to have.
            held = min(self._host_room() or plan.offloaded_bytes, plan.offloaded_bytes * found.in_flight)
            found.host_limit = int((1 - HOST_GAPS) * held) // found.in_flight
        elif whole or self._peak_of(passes) <= limit:
            passes.append((yield from self._pass(Stage.PLAN)))
            expected = plan.seconds or inf
            if self._seconds(passes[-1]) > (1 + LONGER) * expected:  # [guard: passes in which the host paused]
                passes.append((yield from self._pass(Stage.PLAN)))
        peak = 0 if plan.peak_bytes is None else self._peak_of(passes)
        if peak and plan.idle:
            found.bare = Peak(peak, found.size, found.allocated_before)
        timed = passes if whole or len(passes) == 1 else passes[1:]
        trial = Trial((plan,), min(map(self._seconds, timed)), (peak,), (limit,), refused)
        found.excess += 0 if whole else trial.excess[0]  # [guard: room for what passes take]
        return trial

    def _replanned(self, excess: Sequence[int], best: Trial[Plan] | None) -> tuple[Plan, ...]:
        """Return a plan by what others have shown; after the trial of the `best` one that with whole replay.

        The leanest pass was whole replay, so what plans with other ways took beyond their prediction is left out there.
        There is none if nothing may be replayed, it is too large, or what it takes is not known; nor if the best takes
        less than the groups alone in the leanest pass, without what compute has waited for.
        """
        found, ways, limit = self.found, self.found.ways, (self.found.limit or inf) - excess[0]
        if best is None:
            return (found.chosen(),)
        if found.in_flight > 1 or best.plans[0].peak_bytes is None or all(len(group) == 1 for group in ways):
            return ()
        pairs = [(group[-1].cost, group[-1].held or group[-1].cost) for group in ways]
        least = sum(min(cost.forward + cost.backward for cost in pair) for pair in pairs)
        if best.seconds < least:  # [guard: whole replay that cannot be faster -> False]
            self._least = least
            return ()
        self._as_timed(best)
        plan = found.chosen(excess=excess[0], whole=True)
        whole = replace(plan, peak_bytes=(plan.peak_bytes or 0) - found.excess)
        return () if (whole.peak_bytes or inf) > limit else (whole,)

    def _peak_of(self, passes: Sequence[TimedPass]) -> int:
        """Return the peak of passes with a plan; 0 if it is not known."""
        found = self.found
        # [guard: peaks of passes with smaller inputs or less memory before]
        peaks = (Peak(each.peak, each.elements, each.allocated) for each in passes if each.peak)
        peak = max((each.at(found.size, found.allocated_before) for each in peaks), default=0)
        return 0 if found.in_flight > 1 else peak

    def _seconds(self, timed: TimedPass) -> float:
        """Return the seconds of a pass as with inputs of the size that the plan is for."""
        return max(timed.seconds() / max(timed.elements, 1) * max(self.found.size, 1), 1e-9)

    def _as_timed(self, best: Trial[Plan]) -> Plan:
        """Return a plan with what its passes took; all others are expected to take as much longer than simulated."""
        (plan,), (peak,) = best.plans, best.peaks
        plan = replace(plan, peak_bytes=peak or plan.peak_bytes)
        if not plan.seconds or not plan.baseline_seconds:
            return plan
        self.found.pace = best.seconds / plan.seconds
        return plan.measured(best.seconds, plan.baseline_seconds * self.found.pace)


def ways_of(
    groups: Sequence[FollowedModule],
    costs: Sequence[LayerCost],
    among: Collection[int],
    operators: Mapping[int, Sequence[OperatorCost]],
    saved: Mapping[int, Sequence[int]],
    batch: int,
) -> list[tuple[Variant, ...]]:
    """Return the ways to run each group, the first of them without replay; see [Note: the first passes].

    The groups, and what each cost, are in the order of the leanest pass; plans may replay those in `among`, by number.
    By number, `operators` are those of a group with their times, and `saved` the bytes that a compiled one saves beside
    its inputs as it is.  Copies wait until they have `batch` bytes.
    """
    times = Counter(group.group for group in groups)
    found = list[tuple[Variant, ...]]()
    for group, cost in zip(groups, costs, strict=True):
        number = group.group
        ways: tuple[Variant, ...] = (Variant(cost),)
        # One that runs several times would have one way for all of them.
        once = number in among and times[number] == 1
        if once and saved.get(number):
            ways = Variant(_run_once(cost, saved[number])), Variant(cost, ())
        elif once and operators.get(number):
            ways = replay_ways(cost, correct_times(operators[number], cost.forward))
        found.append(tuple(way.map(lambda cost: cost.in_batches(batch)) for way in ways))
    return found


def _run_once(again: LayerCost, sizes: Sequence[int]) -> LayerCost:
    """Return what a compiled group costs as it is, by what it costs if it is run again, and the bytes that it saves."""
    return replace(
        again,
        saved=(*again.saved, *map(Saved, sizes)),
        backward=max(again.backward - again.forward, again.forward),
        host_backward=max(again.host_backward - again.host_forward, 0.0),
        # What was dropped was there for a time, in both directions.
        forward_temporary=max(again.forward_temporary - sum(sizes), 0),
        backward_temporary=max(again.backward_temporary - sum(sizes), 0),
    )


def _kind(module: Module) -> Hashable:
    """Return what groups that cost the same have in common; only a flag or a text tells kinds of attention apart."""
    attributes = (value for inner in module.modules() for value in vars(inner).values())
    flags = tuple(value for value in attributes if value is None or type(value) in (bool, str))
    return type(module), tuple(weight.shape for weight in module.parameters()), flags


def _larger(operator: OperatorCost, factor: float) -> OperatorCost:
    """Return what an operator costs for inputs with `factor` times as many elements."""
    return replace(
        operator,
        seconds=factor * operator.seconds,
        sizes=tuple(math.ceil(factor * nbytes) for nbytes in operator.sizes),
        returned=math.ceil(factor * operator.returned),
        gradient=math.ceil(factor * operator.gradient),
    )
