"""The stages of a rank, what is measured of them in the first steps of a schedule, and the plans that follow.

The first steps are the first passes of a model, see `script` [Note: the first passes]: of all stages and microbatches
at once.  Every rank makes the plans of all ranks, from what they have exchanged.  Before there is a plan, everything is
offloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf
from typing import Any

from torch.nn import Module, Parameter

from .._text import register
from .._warnings import warn
from ..device.base import Backend, usable
from ..engine.passes import ModelPass
from ..engine.statistics import Reason
from ..model.follow import ModelState, handle_of, refuse_scripted
from ..model.groups import Names, find_modules
from ..model.replays import OperatorTimes
from ..model.steering import PassSettings, Steering
from ..planner import Variant, plan_pipeline
from ..replay.policy import Policy
from ..schedule.costs import LayerCost, Link, Saved, StageCost
from ..schedule.orders import Event, Order, When
from ..schedule.plan import Action, Do, Plan
from ..schedule.schedules import GroupSchedule, leanest
from ..tune.costs import measured_link, probed_link, stage_cost, ways_of
from ..tune.exchange import Ranks
from ..tune.meter import Shown, StepMeter, TimedPass, saved_sizes, shared_bytes
from ..tune.script import Plans, Script, Stage, Trial, fits
from .conductor import Conductor

# A stage

GROWN = 64  # a group may save this part more than in the plan


def has_grown(now: int, before: int) -> bool:
    """Return whether a group saves so much more than before that another plan is made."""
    return now > before + before // GROWN


@lru_cache(maxsize=256)
def _forward_plan(layers: int, offloaded: frozenset[int] | None) -> Plan:
    """Return the plan of a forward that offloads some layers, which that of the rank frees; None: all, at once."""
    chosen = range(layers) if offloaded is None else sorted(k for k in offloaded if k < layers)
    calls = [(Event(When.FORWARD_START, k), Action(Do.OFFLOAD, k)) for k in chosen]
    if offloaded is None:
        calls += [(Event(When.FORWARD_END, k), Action(Do.RELEASE, k)) for k in chosen]
    return Plan.of(max(layers, 1), calls, rank=0)


class RankStage(Steering):
    """One stage of a rank: steers the forwards of its module; `policy` says what is saved of recomputed groups.

    Entries of `layers` and `keep` that are `missing` here may mean something in another stage.  A module without
    groups, or one that is offloaded already, is a `ValueError`.
    """

    def __init__(self, stage: Any, conductor: Conductor, layers: Any, keep: Any, policy: Policy | None) -> None:
        self.index, self._conductor = int(stage.stage_index), conductor
        module = getattr(stage, "submod", None)
        if not isinstance(module, Module):
            raise ValueError(f"stage {self.index} has no module.")
        title = f"the module of stage {self.index}"
        refuse_scripted(module, f"stage {self.index}")
        if handle_of(module) is not None:
            raise ValueError(f"{title} is offloaded already: call remove() of its handle before offload(schedule).")
        names = Names(module, part=True)
        try:
            modules = find_modules(names, layers, keep)
        except ValueError as error:
            raise ValueError(f"{title}: {error}") from None
        self.missing, self.facts = names.missing, conductor.facts[self.index]
        state = ModelState(modules, conductor.engine)
        policies = {} if policy is None else dict.fromkeys(range(len(state.groups)), policy)
        super().__init__(state, GroupSchedule(), policies)
        self.saved: tuple[tuple[int, ...], ...] = ()  # by group: storages in forwards followed whole, at most
        self._sequence: tuple[int, ...] = ()  # of the groups that saved them
        self._replayed: frozenset[int] = frozenset()  # groups, in such a forward
        self._ran: frozenset[int] = frozenset()  # groups that ever ran
        self._outside = 0  # bytes that are saved outside of the groups or kept, at most
        self.timing = False  # the operators of recomputed groups are timed
        self._operators = OperatorTimes(conductor.engine.backend)
        self._gradients: tuple[int, ...] = ()  # bytes that the first backward of each group allocates for them
        self.ways: dict[str, tuple[Variant, ...]] = {}  # to run each group, by name, the first of them without replay

    def recompute(self, policies: Mapping[str, Policy]) -> None:
        """Recompute other groups from the next forward on, by their names, also those that were skipped."""
        self._always = {each.group: policies[each.name] for each in self.state.groups if each.name in policies}
        self.saved = ()

    @property
    def known(self) -> bool:
        """Whether the groups of the latest forward are those of which `saved` is: a forward may skip groups."""
        return bool(self.saved) and self._sequence == self.state.order

    @property
    def traced(self) -> bool:
        """Whether the operators of all groups are known that are replayed, or what compiled ones save."""
        return self._operators.groups >= self._replayed.intersection(self.state.order)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each group saves."""
        return tuple(map(sum, self.saved))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups, in the order of the latest forward."""
        return self.state.names()

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings | None:
        """Return how the forward of a microbatch is followed.

        Of other forwards only the metadata inference is followed.  It calls the module; a loss may call a part of it.
        """
        conductor = self._conductor
        microbatch = conductor.forward_of(self.index)
        if microbatch is None and (alone or not conductor.training):
            return None
        if microbatch is None:  # the metadata inference of the schedule
            return PassSettings(lambda order: leanest(len(order)), self._always)
        offloaded, scoped = None, False
        if microbatch.planned:
            offloaded = conductor.offloaded(microbatch.stage, microbatch.number)
            if conductor.scoped and not self._adopts and not self.state.log.records:
                every = self._ran.issubset(self.state.order)  # otherwise those that were skipped may run again
                if every and conductor.idle and not self._always:
                    return None
                scoped = True
        begun = partial(conductor.pass_begins, microbatch)
        plan_for = lambda order: _forward_plan(len(order), offloaded)  # noqa: E731
        return PassSettings(plan_for, self._always, scoped, self._operators if self.timing else None, begun)

    def pass_ends(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Learn the order of the groups, and what they save."""
        super().pass_ends(done, sequence)
        if done.model is None:  # the metadata inference, whose inputs nothing else references
            return
        saved = saved_sizes(done.layers)
        if done.partly:
            self._conductor.changed |= not self.known or any(map(has_grown, map(sum, saved), self.sizes))
            return
        kept = (done.kept_outside.get(reason, (0, 0))[1] for reason in (Reason.OUTSIDE, Reason.KEPT))
        self._outside = max(self._outside, sum(kept) + shared_bytes(done.layers))
        if not self.saved or self._sequence != tuple(sequence):
            self.saved, self._sequence = tuple(saved), tuple(sequence)
            layers = zip(sequence, done.layers, strict=True)
            self._replayed = frozenset(group for group, layer in layers if layer.recomputed)
            self._ran = self._ran.union(sequence)
        else:  # a plan serves groups that save less, too, such as experts that get fewer tokens
            self.saved = tuple(max(pair, key=sum) for pair in zip(self.saved, saved, strict=True))

    def plan(self) -> Plan:
        """Return which groups of the first microbatch are offloaded, as a plan of this stage alone."""
        order, plan = self.state.order, self._conductor.plan
        offloaded = None if plan is None else self._conductor.offloaded(self.index, 0)
        because, nbytes = "" if plan is None else plan.because, self.state.log.bytes_of(order)
        found = _forward_plan(len(order), offloaded)
        return replace(found, rank=None, names=self.names, nbytes=nbytes, because=because)

    # Costs

    def note_gradients(self) -> None:
        """Note the bytes of the gradients that the weights of each group do not have yet."""
        seen, found = set[Parameter](), list[int]()
        for group in self.state.order:
            new = set(self.state.groups[group].module.parameters()) - seen
            missing = (weight for weight in new if weight.requires_grad and weight.grad is None)
            found.append(sum(getattr(weight, "_local_tensor", weight).nbytes for weight in missing))
            seen |= new
        self._gradients = tuple(found)

    def cost(self, order: Order, other_bytes: int = 0, meter: StepMeter | None = None) -> StageCost:
        """Return what the stage costs as its groups run now, in a step that was measured."""
        return stage_cost(self.index, self.saved, self.facts, order, self._outside, other_bytes, self._gradients, meter)

    def find_ways(self, cost: StageCost) -> None:
        """Find the ways to run each group."""
        groups, operators = self.state.order, self._operators
        batch = self.state.engine.backend.batch
        found = ways_of(groups, cost.groups, groups, operators.costs(), operators.saved, batch)
        self.ways = dict(zip(self.names, found, strict=True))

    def grow(self, plan: Plan) -> None:
        """Let the groups save as much more as one of them does than in a plan."""
        part = plan.part(self.index)
        if plan.names[part] == self.names:
            sizes = zip(self.sizes, plan.nbytes[part], strict=True)
            factor = max([1.0, *(now / planned for now, planned in sizes if planned)])
            grown = partial(LayerCost.with_bytes, factor=factor)
            self.ways = {name: tuple(way.map(grown) for way in ways) for name, ways in self.ways.items()}

    def outgrows(self, plan: Plan, cost: StageCost) -> bool:
        """Return whether there are other groups than when a plan was made with a cost, or larger tensors."""
        part, kept = plan.part(self.index), self.facts.boundary + self._outside
        # What a recomputed group saves may be counted with the group before it, which has a size to compare with.
        sizes = (pair for pair in zip(self.sizes, plan.nbytes[part], strict=False) if pair[1] or not self.ways)
        pairs = (kept, cost.boundary_bytes + cost.output_bytes), *sizes
        return plan.names[part] != self.names or any(has_grown(*pair) for pair in pairs)


# All ranks


@dataclass(frozen=True)
class RankCosts:
    """What one rank knows before all of them plan."""

    plan: Plan  # that keeps everything
    costs: Mapping[int, StageCost]  # by stage
    link: Link
    limit: int | None = None  # bytes of device memory
    # By stage and group: the ways to run it, the first of them without replay; none if not measured.
    ways: Mapping[int, Sequence[tuple[Variant, ...]]] = field(default_factory=dict)


register(RankCosts, StageCost, LayerCost, Saved, Link, Variant)


def agreed(pipelines: Sequence[Sequence[RankCosts | None]]) -> list[RankCosts] | None:
    """Return what the ranks of pipelines that run the same stages plan with; None if one of them has no whole step.

    The costs are those of the first pipeline; of memory it is the least, and of links the slowest.
    """
    found = []
    for copies in zip(*pipelines, strict=True):
        known = [each for each in copies if each is not None]
        if len(known) < len(copies):
            return None
        limit = min((each.limit for each in known if each.limit is not None), default=None)
        found.append(replace(known[0], limit=limit, link=Link.slowest(each.link for each in known)))
    return found


@dataclass(frozen=True)
class Limits:
    """What the arguments of `offload` allow; None for no limit."""

    fraction: float | None = None  # of the bytes of each microbatch
    max_inflight: int | None = None  # groups that are copied at a time
    delta_bytes_per_rank: int | None = None  # fewer on each rank than on the one before
    memory_budget: int | None = None  # bytes of device memory of each rank
    may_recompute: bool = False  # where the memory is not enough

    @property
    def by_hand(self) -> bool:
        """Whether they say how much is offloaded."""
        given = self.fraction, self.max_inflight, self.delta_bytes_per_rank
        return self.memory_budget is None and given != (None, None, None)


def plans_of(measured: Sequence[RankCosts], limits: Limits, *, whole: bool = False) -> Plans:
    """Return the plans of all ranks: what the arguments ask for if that fits, otherwise the fastest that fit.

    With `whole`, every group is replayed as a whole, and offloaded only where a rank would exceed its memory; there are
    none if no group has another way.
    """
    variants = {stage: ways for each in measured for stage, ways in each.ways.items()}
    if whole and not any(len(group) > 1 for groups in variants.values() for group in groups):
        return ()
    costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
    stages, link = [costs[stage] for stage in sorted(costs)], Link.slowest(each.link for each in measured)
    ranks = [each.plan for each in measured]
    plan = partial(plan_pipeline, ranks, stages, link, max_inflight=limits.max_inflight)
    if limits.by_hand and not whole:
        plans = plan(fraction=limits.fraction, delta_bytes_per_rank=limits.delta_bytes_per_rank)
        if not exceed(plans, measured):
            return plans
    least = min((each.limit for each in measured if each.limit is not None), default=None)
    budgets = [least if each.limit is None else each.limit for each in measured]
    fraction = 0.0 if least is None else None  # without a limit nothing is offloaded
    plans = plan(variants=variants, whole=whole, budgets=budgets, fraction=fraction)
    return tuple(
        found if not found.idle or found.because else replace(found, because=fits(found.peak_bytes or 0, budget))
        for found, budget in zip(plans, budgets, strict=True)
    )


def exceed(plans: Plans, measured: Sequence[RankCosts]) -> bool:
    """Return whether one of some plans takes more than its rank may; none does."""
    pairs = zip(plans, measured, strict=False)
    return any(each.limit is not None and (plan.peak_bytes or 0) > each.limit for plan, each in pairs)


# The first steps


class FirstSteps(Script):
    """What the first steps of a rank showed, and the plans that are followed."""

    unit = "step"

    def __init__(
        self, stages: Sequence[RankStage], conductor: Conductor, rank: int, ranks: Ranks, limits: Limits
    ) -> None:
        super().__init__(ranks)
        self.stages, self.conductor = tuple(stages), conductor
        self.rank, self._limits = rank, limits
        self.plans: Plans = ()  # of all ranks
        self.known: list[RankCosts] = []  # by all ranks, when they planned
        self._backend: Backend = conductor.engine.backend
        self.times = self._backend.times
        self._lean: StepMeter | None = None  # of the latest step that was measured by group
        self.peak = 0  # bytes of saved tensors in the latest step in which all groups were followed

    def shown(self, timed: TimedPass) -> Shown | None:
        """Return what a step showed here; None if no whole step was seen."""
        return timed.shown(timed.peak) if self.plans or self._seen else None

    @property
    def _seen(self) -> bool:
        return bool(self.conductor.order) and all(stage.known for stage in self.stages)

    def traced(self, traced: Sequence[TimedPass]) -> bool:
        """Return whether the operators of all groups are known that are replayed, or what compiled ones save."""
        return not self._limits.may_recompute or all(stage.traced for stage in self.stages)

    def planned(self, traced: Sequence[TimedPass], lean: TimedPass) -> Plans:
        """Exchange what the steps have shown, and return the plans that follow."""
        found = agreed(self.ranks.gather(self.measured()))
        assert found is not None
        limits = [inf if each.limit is None else each.limit for each in found]
        self.known, self.limits = found, limits if self.times else []
        return plans_of(found, self._limits)

    def replanned(self, excess: Sequence[int], best: Trial | None) -> Plans:
        """Return plans that leave `excess` bytes free, or none; after the trial of the best those of whole replay."""
        pairs = list(zip(self.known, excess, strict=True))
        less = [each if each.limit is None else replace(each, limit=max(each.limit - more, 0)) for each, more in pairs]
        found = plans_of(less, self._limits, whole=best is not None)
        if exceed(found, less):
            return ()
        return tuple(
            replace(plan, peak_bytes=(plan.peak_bytes or 0) + more)
            for plan, more in zip(found, excess[: len(found)], strict=True)
        )

    def follow(self, plans: Plans) -> None:
        """Follow plans from the step on that begins now."""
        if not self.times:  # the planner counts in units of its own
            plans = tuple(replace(plan, seconds=None, baseline_seconds=None) for plan in plans)
        self.plans, before = plans, self.conductor.plan
        found = next(plan for plan in plans if plan.rank == self.rank)
        self.conductor.follow(found)
        if before is not None and before.work == found.work:
            return
        self.conductor.scoped = False
        for stage in self.stages if self._limits.may_recompute else ():
            part = found.part(stage.index)
            saves = zip(found.names[part], found.saves[part], strict=False)
            stage.recompute({name: Policy(frozenset(outputs)) for name, outputs in saves if outputs is not None})

    def begin(self, stage: Stage) -> None:
        """Begin one of the first steps."""
        engine, meter = self.conductor.engine, None
        for each in self.stages:  # a step in which operators are timed takes longer
            each.timing = stage is Stage.FIRST and self._limits.may_recompute
        if stage is Stage.LEAN:
            engine.reset_statistics()
            self._lean = None
            for each in self.stages:
                each.note_gradients()
            self._lean = meter = StepMeter(self._backend, engine.counters, self._costs())
            self.conductor.watching = meter.note
        self.timed = TimedPass(engine, meter=meter, memory=stage is Stage.PLAN)

    def end(self, *, failed: bool) -> None:
        """End a step; plan anew if other groups ran than the plan has, or saved other bytes."""
        timed, conductor = self.timed, self.conductor
        engine, plan, conductor.watching = conductor.engine, conductor.plan, None
        if timed is not None and timed.ended is None:
            if timed.meter is not None and engine.recorder is timed.meter:
                engine.record(None)
            if failed:
                self.timed = None
            else:
                timed.end()
        planned = plan is not None and not failed
        if planned and not conductor.scoped:
            self.peak = engine.statistics().peak_resident_bytes
        # Where the time of the host counts, groups that are kept are followed in one step with a new plan, and no more.
        conductor.scoped, conductor.changed = planned and not conductor.changed and self.times, False
        if plan is not None and planned and self._outdated(plan):
            self._plan_anew(plan)

    def measured(self, plan: Plan | None = None) -> RankCosts | None:
        """Return what this rank knows; None if no whole step was seen.

        Later, with the `plan` that is followed, groups save what their ways saved when these were measured.  Where one
        saves more than in the plan, all groups of its stage do: what replayed ones save otherwise is not seen.
        """
        order, link = self.conductor.order, self._link()
        if link is None or not self._seen:
            return None
        costs, ways = self._costs(), dict[int, list[tuple[Variant, ...]]]()
        splits = [stage for stage, cost in costs.items() if cost.split]
        rank = Plan.of_rank(self.rank, order, {stage.index: stage.names for stage in self.stages}, splits)
        if plan is None and self._limits.may_recompute:
            for stage in self.stages:
                stage.find_ways(costs[stage.index])
        if self._limits.may_recompute and all(stage.ways.keys() >= {*stage.names} for stage in self.stages):
            for stage in self.stages:
                if plan is not None:
                    stage.grow(plan)
                ways[stage.index] = groups = [stage.ways[name] for name in stage.names]
                costs[stage.index] = replace(costs[stage.index], groups=tuple(group[0].cost for group in groups))
        saved = (each.nbytes for cost in costs.values() for group in cost.groups for each in group.saved)
        limit = usable(self._backend.memory_limit(), max(saved, default=0), self._limits.memory_budget)
        return RankCosts(rank, costs, link, limit, ways)

    def _costs(self) -> dict[int, StageCost]:
        """Return what each stage costs as its groups run now."""
        order, lean, found = self.conductor.order, self._lean, dict[int, StageCost]()
        for stage in self.stages:
            other = lean.other_bytes if lean is not None and not found else 0
            found[stage.index] = stage.cost(order, other, lean)
        return found

    def _link(self) -> Link | None:
        """Return the rates of copies, as they were with all ranks copying."""
        if not self._backend.times:
            return Link(getattr(self._backend, "d2h", float("inf")), getattr(self._backend, "h2d", float("inf")))
        if self._lean is None:
            return None
        room = self.conductor.engine.host_room()
        return measured_link(self._lean) or probed_link(self._backend, room) or Link(float("inf"), float("inf"))

    def _outdated(self, plan: Plan) -> bool:
        """Return whether there are other groups than when a plan was made, or larger tensors."""
        mine = next(each for each in self.known if each.plan.rank == self.rank)
        return any(stage.outgrows(plan, mine.costs[stage.index]) for stage in self.stages)

    def _plan_anew(self, before: Plan) -> None:
        """Plan for what this rank does now, with what the others have sent."""
        # Other ranks that run these stages would recompute something else.
        mine = None if before.saves and self.ranks.replicas else self.measured(before)
        if mine is None:
            return
        self.known = [mine if each.plan.rank == self.rank else each for each in self.known]
        try:
            self.follow(plans_of(self.known, self._limits))
        except ValueError as error:  # the other ranks wait for this one, which can go on with the plan that it has
            warn(f"The plan stays as it is, although this rank now runs something else: {error}")
