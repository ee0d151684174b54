"""The first passes of a model: measure two, and choose the fastest plan that fits.

`[Note: the first passes]`  Nothing is known before the first pass, and it must fit where any plan does.  So it is the
leanest there is: every group is replayed in backward, and what it needs for that is offloaded.  It traces and proves
the groups and times their operators.  The next pass runs in the same way without proofs, and is measured by group:
bytes, times, and the rates of copies.  Events would measure a host that is slower than the device, so the device is
kept busy before each group while the host queues it.  From both passes follows what each group costs in every other
way.  A compiled group has no operators to time: one of each kind is not replayed in that pass.  If everything fits
without, one more pass keeps everything, to know its peak; then nothing is installed.

Otherwise the planner chooses the fastest plan that fits, and it is tried: see `trials` [Note: trials of plans].  Its
first pass takes host memory, and its second is timed.  One that takes longer than was simulated runs once more, because
the host may have paused, and the faster of the two counts.  If one takes more memory than the limit, all plans are
expected to take as much more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeAlias

from ...device.base import current_stream
from ...planner import OperatorCost, Variant, replay_ways
from ...planner.variants import within
from ...replay import Policy
from ...schedule.costs import LayerCost, Link, Saved
from ...schedule.execution_order import GroupKey
from ...schedule.plan import Plan
from ...schedule.simulate import simulate
from ...tune.costs import gradient_bytes, layer_costs
from ...tune.trials import Trial, fits, try_plans
from ..follow import FollowedModule, ModelState
from .findings import NO_LINK, Findings, Room
from .metering import Peak, Stage, TimedPass

__all__ = ["Script", "Steps", "representatives", "timed_operators"]

FULL = 0.9  # part of the most elements of inputs so far, with which a pass counts
PATIENCE = 6  # passes that are run until one counts
HOST_GAPS = 0.05  # part of the host memory that buffers of other sizes may leave unused
LONGER = 0.05  # part of the simulated time by which a pass takes longer that is timed once more
PROBE = 2**20  # bytes of a copy that measures the link
TRACES = 2  # passes in which groups are traced

Steps: TypeAlias = Generator[Stage, TimedPass, Plan]


class Script:
    """Finds out what the first passes show, and the plan that follows from it.

    It does not reference the `Tuner`, which holds the generator that `run` returns: no cycle keeps either alive.

    Parameters
    ----------
    state, policies
        As in `Tuner`.
    found : Findings
        Takes what the passes show; it has what is known before them.
    room_of_all : callable
        From the room of this rank to the room with which a plan fits in all ranks.
    """

    def __init__(
        self,
        state: ModelState,
        found: Findings,
        policies: Mapping[int, Policy],
        room_of_all: Callable[[Room], Room],
    ) -> None:
        self._state, self._policies, self._room_of_all = state, policies, room_of_all
        self._backend, self._host_room = state.engine.backend, state.engine.host_room
        self.found = found
        self._most = 0  # elements of inputs so far

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
        """Return whether the operators of a replayed group are not known, or what a compiled one saves then.

        Of several compiled groups of a kind both are measured in the next pass.
        """
        ran = {key.group: self._state.groups[key.group] for key in self._state.plans.order}
        kinds, seen = Counter(map(kind_of, ran.values())), {key.group for key in traced[-1].sequence}
        compiled = {k: group for k, group in ran.items() if group.is_compiled}
        known = {k for k, group in compiled.items() if k in seen or kinds[kind_of(group)] > 1}
        known |= traced[-1].graphless  # [guard: groups that are frozen]
        known.update(*(timed.operators.groups for timed in traced if timed.operators is not None))
        return not known >= ran.keys() & self._policies.keys()

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
            called = timed.sequence or stage is Stage.FIRST or (stage is Stage.PLAN and idle(self.found.plan))
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
        assert lean.meter is not None
        if not lean.sequence:
            names = self._state.names()
            return Plan(max(len(names), 1), names=names, because="No group has run.")
        names = self._state.names(lean.sequence)
        found.outside = lean.outside()
        found.link = found.link or self._probed_link()
        room = self._host_room()
        if room is not None:  # [guard: plans for the host memory that there is]
            found.host_limit = room // found.in_flight
        found.names, found.ways = names, self._ways(traced, lean)
        whole = [group[0].cost for group in found.ways]
        if found.limit is not None:
            # Earlier passes, whose backward is still to come, may keep everything; so far they were replayed.
            more = sum(cost.nbytes for cost in whole) - sum(map(sum, lean.sizes))
            found.limit = max(found.limit - lean.waiting * max(more, 0), 0)
        kept = simulate(Plan(len(names)), whole, found.link or NO_LINK)
        found.bare = Peak(kept.device_peak_bytes + found.excess, found.size, found.allocated_before)
        if found.limit is None or found.bare.nbytes <= found.limit:
            nbytes = tuple(cost.nbytes for cost in whole)
            plan = Plan(len(names), names=names, nbytes=nbytes, because=fits(found.bare.nbytes, found.limit))
            plan = replace(plan, seconds=kept.step_time, baseline_seconds=kept.baseline)
            return found.expected(replace(plan, peak_bytes=kept.device_peak_bytes))
        return found.chosen()

    def _ways(self, traced: Sequence[TimedPass], lean: TimedPass) -> list[tuple[Variant, ...]]:
        """Return the ways to run each group, the first of them without replay."""
        assert lean.meter is not None
        sequence, groups = lean.sequence, [self._state.groups[key.group] for key in lean.sequence]
        compiled = {k for k, group in enumerate(groups) if group.is_compiled}
        kinds = list(map(kind_of, groups))
        costs = layer_costs(lean.meter, lean.sizes, kinds, compiled, self.found.allocated_before)
        alike: dict[Hashable, list[int]] = {}
        for k in sorted(compiled, key=lambda k: costs[k].nbytes):
            alike.setdefault(kinds[k], []).append(k)
        operators: dict[int, list[OperatorCost]] = {}
        for each in traced:
            operators |= timed_operators(each, lean.elements)
        found = list[tuple[Variant, ...]]()
        for k, (key, cost) in enumerate(zip(sequence, costs, strict=True)):
            # One that runs several times would have one way for all of them.
            once = key.group in self._policies and sum(other.group == key.group for other in sequence) == 1
            if once and k in compiled:
                least, most = alike[kinds[k]][0], alike[kinds[k]][-1]
                again = costs[least] if least != most else _run_again(cost, traced[-1], key, lean.elements)
                again = cost if cost.nbytes < costs[most].nbytes else again  # temporaries depend on the neighbours
                own, again = (_moved(each, cost) for each in (costs[most], again))
                host = min(again.host_backward, own.host_backward + again.host_forward)
                again = replace(again, forward=own.forward, host_backward=host)
                found.append((Variant(own), Variant(again, ())) if again.nbytes < own.nbytes else (Variant(cost),))
            elif once and operators.get(key.group):
                found.append(replay_ways(cost, within(tuple(operators[key.group]), cost.forward)))
            else:
                found.append((Variant(cost),))
        batch = self._backend.batch
        return [tuple(way.map(lambda cost: cost.in_batches(batch)) for way in group) for group in found]

    def _probed_link(self) -> Link | None:
        """Return the rates of one copy in each direction, where the leanest pass has copied nothing."""
        backend = self._backend
        room = self._host_room()
        if room is not None and room < PROBE:  # no host memory for offloading
            return None
        device, stream = backend.current_device(), backend.new_stream(backend.current_device())
        try:
            host = backend.empty_host(PROBE)
        except RuntimeError:  # the host has no page-locked memory
            return None
        copies = [(host, backend.empty_device((PROBE,), (1,), host.dtype, device))]
        backend.wait_stream(stream, current_stream(backend))
        rates = []
        for copy in (backend.to_host, backend.to_device):
            copy(copies, stream)  # to warm up
            begun = backend.record_timed(stream)
            copy(copies, stream)
            ended = backend.record_timed(stream)
            backend.synchronize(device)
            rates.append(PROBE / max(backend.elapsed(begun, ended), 1e-9))
        return Link(*rates)

    def _fitted(self, plan: Plan) -> Steps:
        """Try plans, and the same with whole replay, and return the best; see `trials` [Note: trials of plans]."""
        found, best = self.found, (yield from try_plans(plan, partial(self._try, first=True), self._smaller))
        assert best is not None
        plan = found.plan = best.plan
        if idle(plan):
            because = fits(plan.peak_bytes or 0, found.limit) if not best.over else plan.because
            return replace(plan, because=because)
        plan = found.plan = self._as_timed(plan, best.seconds)
        if found.in_flight > 1 or plan.peak_bytes is None:
            return plan
        run = partial(self._try, first=False)  # nothing is offloaded for the first time
        other = yield from try_plans(self._whole(plan), run, partial(self._whole, plan), best)
        if other is None or other is best:
            found.plan = plan
            return plan
        return other.plan.measured(other.seconds, plan.baseline_seconds)

    def _try(self, plan: Plan, *, first: bool) -> Generator[Stage, TimedPass, Trial[Plan]]:
        """Run passes with a plan, the `first` of which takes host memory and is not timed."""
        found, passes, refused = self.found, list[TimedPass](), False
        found.plan = plan
        if first:
            found.host_bytes = plan.offloaded_bytes * found.in_flight
            passes.append((yield from self._pass(Stage.PLAN)))
            found.host_bytes, refused = None, passes[0].refused > 0
        if refused:
            # Tensors stayed on the device for lack of host memory: the plan is for less than it seemed to have.
            held = min(self._host_room() or plan.offloaded_bytes, plan.offloaded_bytes * found.in_flight)
            found.host_limit = int((1 - HOST_GAPS) * held) // found.in_flight
        elif not first or not (idle(plan) or self._take_peak(plan, passes) > self._limit):
            passes.append((yield from self._pass(Stage.PLAN)))
            expected = plan.seconds or inf
            if self._seconds(passes[-1]) > (1 + LONGER) * expected:  # [guard: passes in which the host paused]
                passes.append((yield from self._pass(Stage.PLAN)))
        peak = self._take_peak(plan, passes)
        if peak and idle(plan):
            found.bare = Peak(peak, found.size, found.allocated_before)
        plan = replace(plan, peak_bytes=peak) if peak else plan
        timed = passes[first and len(passes) > 1 :]
        return Trial(plan, min(map(self._seconds, timed)), max(peak - self._limit, int(refused)))

    @property
    def _limit(self) -> float:
        return self.found.limit or inf

    def _smaller(self, trials: Sequence[Trial[Plan]]) -> Plan | None:
        """Return a plan that takes less than those before, by what they have shown; None if there is no other."""
        plan = self.found.chosen()
        return None if does_the_same(plan, trials[-1].plan) else plan

    def _whole(self, plan: Plan, trials: Sequence[Trial[Plan]] = ()) -> Plan | None:
        """Return a plan in which every group is replayed as a whole; None if it is the same as `plan`, or too large.

        The leanest pass was whole replay, so what plans with other ways took beyond their prediction is left out.
        """
        found, excess = self.found, math.ceil(sum(trial.over for trial in trials))
        ways = found.ways
        last = [(replace(group[-1], saves=None),) if len(group) > 1 else group for group in ways]
        if last == list(ways):
            return None
        costs = replace(found, ways=last).chosen(excess=excess)
        longest = [(costs.holds and group[-1].held) or group[-1].cost for group in ways]
        again = (cost.backward - group[0].cost.backward for cost, group in zip(longest, ways, strict=True))
        whole = replace(
            costs,
            saves=tuple(group[-1].saves for group in ways),
            recomputed_nbytes=tuple(max(group[0].cost.nbytes - group[-1].cost.nbytes, 0) for group in ways),
            recompute_seconds=sum(max(each, 0.0) for each in again),
            baseline_seconds=plan.baseline_seconds,
            because=plan.because,
        )
        peak = (whole.peak_bytes or inf) - found.excess
        return None if does_the_same(whole, plan) or peak > self._limit - excess else whole

    def _take_peak(self, plan: Plan, passes: Sequence[TimedPass]) -> int:
        """Return the peak of passes with a plan, and expect all plans to take as much more; 0 if it is not known."""
        found = self.found
        # [guard: peaks of passes with smaller inputs or less memory before]
        peaks = (Peak(each.peak, each.elements, each.allocated) for each in passes if each.peak)
        peak = max((each.at(found.size, found.allocated_before) for each in peaks), default=0)
        if not peak or plan.peak_bytes is None or found.in_flight > 1:
            return 0
        found.excess += max(peak - plan.peak_bytes, 0)  # [guard: room for what passes take]
        return peak

    def _seconds(self, timed: TimedPass) -> float:
        """Return the seconds of a pass as with inputs of the size that the plan is for."""
        return max(timed.seconds() / max(timed.elements, 1) * max(self.found.size, 1), 1e-9)

    def _as_timed(self, plan: Plan, seconds: float) -> Plan:
        """Return a plan with the measured seconds of a pass; all others are expected to take as much longer."""
        if not plan.seconds or not plan.baseline_seconds:
            return plan
        self.found.pace *= seconds / plan.seconds
        return plan.measured(seconds, plan.baseline_seconds * seconds / plan.seconds)


def idle(plan: Plan | None) -> bool:
    """Return whether a plan keeps everything."""
    return plan is not None and not (plan.offloaded or plan.recomputed)


def does_the_same(plan: Plan, other: Plan) -> bool:
    """Return whether two plans do the same, whatever is expected of them."""
    return (plan.steps, plan.saves, plan.holds) == (other.steps, other.saves, other.holds)


def _moved(cost: LayerCost, to: LayerCost) -> LayerCost:
    """Return the cost of a group at the place of another of its kind."""
    return replace(cost, other_bytes=to.other_bytes, gap_forward=to.gap_forward, gap_backward=to.gap_backward)


def kind_of(group: FollowedModule) -> Hashable:
    """Return what groups have in common that cost the same: their type and the sizes of their weights."""
    module = group.module
    return type(module), tuple(weight.shape for weight in module.parameters())


def _run_again(cost: LayerCost, first: TimedPass, key: GroupKey, elements: int) -> LayerCost:
    """Return the cost of a compiled group that is run again as a whole, by what it saved in a pass where it was."""
    sizes = dict(zip(first.sequence, first.sizes, strict=True)).get(key)
    if sizes is None:
        return cost
    larger = elements / max(first.elements, 1)
    return replace(
        cost,
        saved=tuple(Saved(math.ceil(larger * nbytes)) for nbytes in sizes if nbytes),
        backward=cost.forward + cost.backward,
        host_backward=cost.host_forward + cost.host_backward,
        backward_temporary=cost.nbytes + max(cost.forward_temporary, cost.backward_temporary),
    )


def representatives(groups: Sequence[FollowedModule], among: Iterable[int]) -> Iterable[int]:
    """Return one compiled group of each kind: the last, at whose backward no other has new gradients."""
    compiled = (number for number in among if groups[number].ref() is not None and groups[number].is_compiled)
    return {kind_of(groups[number]): number for number in compiled}.values()


def timed_operators(timed: TimedPass, elements: int) -> dict[int, list[OperatorCost]]:
    """Return the operators of groups that a pass timed, as for inputs with as many elements."""
    assert timed.operators is not None
    larger = elements / timed.elements if elements and timed.elements else 1.0
    costs = timed.operators.costs()
    if larger == 1.0:
        return costs

    def scaled(operator: OperatorCost) -> OperatorCost:  # [guard: operators of inputs of another size]
        sizes = tuple(math.ceil(larger * nbytes) for nbytes in operator.sizes)
        seconds, returned = larger * operator.seconds, math.ceil(larger * operator.returned)
        gradient = math.ceil(larger * operator.gradient)
        return replace(operator, seconds=seconds, sizes=sizes, returned=returned, gradient=gradient)

    return {group: list(map(scaled, each)) for group, each in costs.items()}
