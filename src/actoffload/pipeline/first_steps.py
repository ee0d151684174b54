"""The first steps of a schedule on one rank: what is measured in them, and what they showed.

They are the first passes of a model, see `script` [Note: the first passes]: of all stages and microbatches at once.
Every rank makes the plans of all ranks, from what they have exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from .._text import register
from .._warnings import warn
from ..device.base import Backend, usable
from ..planner import Variant, plan_pipeline
from ..replay.policy import Policy
from ..schedule.costs import LayerCost, Link, Saved, StageCost
from ..schedule.plan import Plan
from ..tune.costs import measured_link, probed_link
from ..tune.exchange import Ranks
from ..tune.meter import StepMeter, TimedPass
from ..tune.script import Plans, Script, Stage, Trial, fits
from .conductor import Conductor
from .stages import RankStage


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

    def counts(self, timed: TimedPass) -> bool:
        """Return whether a whole step was seen."""
        return bool(self.plans) or (bool(self.conductor.order) and all(stage.known for stage in self.stages))

    def traced(self, traced: Sequence[TimedPass]) -> bool:
        """Return whether the operators of all groups are known that are replayed, or what compiled ones save."""
        return not self._limits.may_recompute or all(stage.traced for stage in self.stages)

    def planned(self, traced: Sequence[TimedPass], lean: TimedPass) -> Plans:
        """Exchange what the steps have shown, and return the plans that follow."""
        found = agreed(self.ranks.gather(self.measured()))
        assert found is not None
        self.known, self.limits = found, [each.limit or inf for each in found] if self.times else []
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

    def end(self, *, failed: bool, changed: bool) -> None:
        """End a step; plan anew if it ran another order than the plan has, or saved other bytes."""
        timed, conductor = self.timed, self.conductor
        engine, plan, conductor.watching = conductor.engine, conductor.plan, None
        if timed is not None and timed.ended is None:
            if timed.meter is not None and engine.recorder is timed.meter:
                engine.record(None)
            if failed:
                self.timed = None
            else:
                timed.end()
        if not failed and plan is not None and not conductor.scoped:
            self.peak = engine.statistics().peak_resident_bytes
        outdated = any(stage.changed for stage in self.stages)
        for stage in self.stages:
            stage.changed = False
        # Where the time of the host counts, groups that are kept are followed in one step with a new plan, and no more.
        followed = plan is not None and not (failed or changed or outdated)
        conductor.scoped = followed and self.times
        if not failed and plan is not None and (changed or self._outdated(plan)):
            self._plan_anew(plan)

    def _limit(self, costs: Mapping[int, StageCost]) -> int | None:
        """Return the bytes of device memory that a plan may use; None if that is not known."""
        limit = self._backend.memory_limit()
        if limit is not None:
            saved = (each.nbytes for cost in costs.values() for group in cost.groups for each in group.saved)
            limit = usable(limit, max(saved, default=0))
        return min((each for each in (limit, self._limits.memory_budget) if each is not None), default=None)

    def measured(self, plan: Plan | None = None) -> RankCosts | None:
        """Return what this rank knows; None if no whole step was seen.

        Later, with the `plan` that is followed, groups save what their ways saved when these were measured.  Where one
        saves more than in the plan, all groups of its stage do: what replayed ones save otherwise is not seen.
        """
        order, link = self.conductor.order, self._link()
        if not order or link is None or not all(stage.known for stage in self.stages):
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
        return RankCosts(rank, costs, link, self._limit(costs), ways)

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
        microbatches = {step.microbatch for step in mine.plan.order}
        known = [  # the order of a rank that ran other ones is not known
            each
            if {step.microbatch for step in each.plan.order} == microbatches
            else replace(each, plan=Plan(0, rank=each.plan.rank))
            for each in self.known
        ]
        try:
            self.follow(plans_of(known, self._limits))
        except ValueError as error:  # the other ranks wait for this one, which can go on with the plan that it has
            warn(f"The plan stays as it is, although this rank now runs something else: {error}")
