"""The first steps of a schedule on one rank: what is measured in them, and what they showed.

`[Note: the first steps of a schedule]`  They are the first passes of a model, see `script` [Note: the first passes].
Nothing is known before the first step, and it must fit where any plan does.  So every group is replayed in backward, if
it may be, and what it needs for that is offloaded, freed where the group ends, and reloaded when its backward begins.
That step shows the order of the computations, and proves and times the operators of the groups.  Where time is
measured, the second step runs in the same way without proofs, for the times, the memory, and the rates of copies with
all ranks copying.

Then plans are tried: see `planning` [Note: trial of the plans].  The first step with a plan takes host memory, the next
one is timed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from ..device.base import Backend, StreamEvent, current_stream, usable
from ..model.replays import OperatorTimes
from ..model.tuning.metering import Stage
from ..model.tuning.script import TRACES, ways_of
from ..planner import Variant
from ..replay import saving
from ..schedule.costs import LayerCost, Link
from ..schedule.pipeline import SplitCost, StageCost
from ..schedule.pipeline_plan import PipelinePlan
from ..tune.costs import kept_outputs, measured_link, probed_link, stage_cost
from ..tune.meter import StageMemory, StepMeter
from .conductor import Conductor
from .planning import Limits, PipelineRanks, Plans, RankCosts, RankTrial, agreed, keep_best, plans_of
from .stages import RankStage, has_grown

Script: TypeAlias = Generator[tuple[Stage, Plans], None, Plans]
"""Yields what the next step is for, with the plans to follow from it on if there are others, and returns the last."""


class FirstSteps:
    """What the first steps of a rank showed."""

    def __init__(
        self, stages: Sequence[RankStage], conductor: Conductor, rank: int, exchange: PipelineRanks, limits: Limits
    ) -> None:
        self._stages, self._conductor = stages, conductor
        self._rank, self._exchange, self._limits = rank, exchange, limits
        self.known: list[RankCosts] = []  # by all ranks, when they planned
        self._backend: Backend = conductor.engine.backend
        self._lean: StepMeter | None = None  # of the latest step that offloaded everything
        self._meter: StepMeter | None = None  # of the present step, if it is measured
        self._begun: StreamEvent | None = None  # the begin of the present step, if it is timed
        self._timed: tuple[StreamEvent, StreamEvent, int] | None = None  # of the latest: begin, end, bytes of its peak
        self._gradients: dict[int, tuple[int, ...]] = {}  # by stage: bytes that the first backward allocates, by group
        self._operators = {each.index: OperatorTimes(self._backend) for each in stages}
        # By stage: what it costs without replay, and the ways to run its groups, by name.
        self._measured: dict[int, tuple[StageCost, dict[str, tuple[Variant, ...]]]] = {}

    def run(self) -> Script:
        """Yield what the next step is for, exchange what it showed, and return the plans to keep.

        See [Note: the first steps of a schedule] and [Note: trial of the plans].
        """
        timed, traces = self._backend.times, 1
        yield Stage.FIRST, ()
        if timed:
            yield Stage.LEAN, ()
        while True:
            traced = not timed or traces == TRACES or self._traced
            found = agreed(self._exchange.gather(self.measured() if traced else None))
            if found is not None:
                break
            traces += not traced
            self._lean = self._lean if traced else None  # it was measured in other groups
            yield (Stage.LEAN if timed and traced else Stage.FIRST), ()
        self.known = found
        plans = plans_of(found, self._limits)
        if not timed:
            return plans
        return (yield from keep_best(plans, found, self._limits, self._try))

    @property
    def _traced(self) -> bool:
        """Whether the operators of all groups are known that are replayed, or what compiled ones save."""
        return not self._limits.may_recompute or all(
            group.group in self._operators[stage.index].groups
            for stage in self._stages
            for group in stage.steering.groups
            if group.group in stage.steering.replayed
        )

    def _try(self, plans: Plans) -> Generator[tuple[Stage, Plans], None, list[RankTrial]]:
        """Yield steps with some plans until one was timed in all ranks; return what they saw."""
        self._timed = None
        idle = all(plan.idle for plan in plans)
        yield (Stage.PLAN if idle else Stage.FIRST), plans
        if not idle:
            yield Stage.PLAN, ()
        while True:
            found = [each for ranks in self._exchange.gather(self._tried()) for each in ranks]
            known = [each for each in found if each is not None]
            if len(known) == len(found):
                return known
            yield Stage.PLAN, ()

    def _tried(self) -> RankTrial | None:
        """Return what the latest step with a plan showed; None if there was none."""
        if self._timed is None:
            return None
        begun, ended, peak = self._timed
        if not self._backend.passed(ended):
            self._backend.synchronize(self._backend.current_device())
        return RankTrial(self._backend.elapsed(begun, ended), peak)

    def begin(self, stage: Stage) -> None:
        """Begin one of the first steps."""
        for each in self._stages:
            traces = stage is Stage.FIRST and self._limits.may_recompute and not self.known
            # A step in which operators are timed takes longer.
            each.steering.operators = self._operators[each.index] if traces else None
        if not self._backend.times:
            return
        self._backend.allocated()  # resets the peak
        engine = self._conductor.engine
        if stage is Stage.PLAN:
            # None of its groups is timed: that would take time of the host, which may be what counts.
            self._begun = self._now()
        if stage is Stage.LEAN:
            with engine.lock:
                engine.counters.reset()
            standing = dict[int, StageMemory]()
            for each in self._stages:
                self._gradients[each.index] = each.steering.gradients
                boundary, output = kept_outputs(each.index, self._conductor.learned)
                boundary += each.steering.outside
                standing[each.index] = StageMemory(boundary, output, sum(self._gradients[each.index]))
            self._meter = StepMeter(self._backend, engine.counters, standing)
            engine.record(self._meter)
            self._conductor.watching = self._meter.note

    def end(self, *, failed: bool) -> None:
        """End a step."""
        meter, begun, engine = self._meter, self._begun, self._conductor.engine
        self._meter = self._begun = self._conductor.watching = None
        if meter is not None and engine.recorder is meter:
            engine.record(None)
        if meter is not None and not failed:
            self._lean = meter
        if begun is not None and not failed:
            self._timed = begun, self._now(), (self._backend.allocated() or (0, 0))[1]

    def _now(self) -> StreamEvent:
        return self._backend.record_timed(current_stream(self._backend))

    def _limit(self, costs: Mapping[int, StageCost]) -> int | None:
        """Return the bytes of device memory that a plan may use; None if that is not known."""
        limit = self._backend.memory_limit()
        if limit is not None:
            saved = (each.nbytes for cost in costs.values() for group in cost.groups for each in group.saved)
            limit = usable(limit, max(saved, default=0))
        return min((each for each in (limit, self._limits.memory_budget) if each is not None), default=None)

    def measured(self, plan: PipelinePlan | None = None) -> RankCosts | None:
        """Return what this rank knows; None if no whole step was seen.

        Later, with the `plan` that is followed, groups save what their ways saved when these were measured.  Where one
        saves more than in the plan, all groups of its stage do: what replayed ones save otherwise is not seen.
        """
        learned, link = self._conductor.learned, self._link()
        if not learned.order or link is None or not all(stage.steering.known for stage in self._stages):
            return None
        names = {stage.index: stage.steering.names for stage in self._stages}
        costs = {stage.index: self._cost(stage) for stage in self._stages}
        if plan is None and self._limits.may_recompute:
            self._measured = {stage.index: self._with_ways(stage, costs[stage.index]) for stage in self._stages}
        if not all(set(names[stage]) <= set(known) for stage, (_, known) in self._measured.items()):
            return RankCosts(self._rank, learned.order, names, costs, link, self._limit(costs))
        if plan is not None:
            self._grow(plan)
        ways = dict[int, list[tuple[Variant, ...]]]()
        for stage, (before, known) in self._measured.items():  # of the groups that run now
            at = [[*known].index(name) for name in names[stage]]
            ways[stage] = [known[name] for name in names[stage]]
            costs[stage] = replace(
                costs[stage],
                groups=tuple(before.groups[k] for k in at),
                splits=tuple(before.splits[k] for k in at) if before.splits else (),
                gradient_bytes=tuple(before.gradient_bytes[k] for k in at) if before.gradient_bytes else (),
            )
        return RankCosts(self._rank, learned.order, names, costs, link, self._limit(costs), ways or None)

    def _cost(self, stage: RankStage) -> StageCost:
        """Return what a stage costs as its groups run now."""
        steering, learned, lean = stage.steering, self._conductor.learned, self._lean
        gradients = self._gradients.get(stage.index, ())
        gradients = gradients if len(gradients) == len(steering.saved) else ()
        other = lean.other_bytes if lean is not None and stage is self._stages[0] else 0
        return stage_cost(stage.index, steering.saved, learned, steering.outside, other, gradients, lean)

    def _with_ways(self, stage: RankStage, cost: StageCost) -> tuple[StageCost, dict[str, tuple[Variant, ...]]]:
        """Return what a stage costs without replay, and the ways to run each of its groups, by name.

        Backward comes to a replayed group with all that it saves, from which it replays.
        """
        operators, groups = self._operators[stage.index], stage.steering.groups
        among, batch = {group.group for group in groups}, self._backend.batch
        found = ways_of(groups, cost.groups, among, operators.costs(), operators.saved, batch)
        ways, splits = list[tuple[Variant, ...]](), list[SplitCost]()
        for k, (whole, (own, *others)) in enumerate(zip(cost.groups, found, strict=True)):
            if cost.splits:
                seconds = cost.splits[k].input_seconds - max(whole.backward - own.cost.backward, 0.0)
                splits.append(replace(cost.splits[k], input_seconds=max(seconds, 0.0)))
            again = list[Variant]()
            for way in others:
                saved = tuple(replace(each, needed_at=0.0) for each in way.cost.saved)
                again.append(replace(way, cost=replace(way.cost, saved=saved)))
            ways.append((own, *again))
        plain = replace(cost, groups=tuple(group[0].cost for group in ways), splits=tuple(splits))
        return plain, dict(zip(stage.steering.names, ways, strict=True))

    def _grow(self, plan: PipelinePlan) -> None:
        """Let the groups of each stage save as much more as one of them does than in a plan."""
        for stage in self._stages:
            index = stage.index
            if index not in self._measured or plan.names[index] != stage.steering.names:
                continue
            sizes = zip(stage.steering.sizes, plan.nbytes[index], strict=True)
            factor = max([1.0, *(now / planned for now, planned in sizes if planned)])
            cost, ways = self._measured[index]
            grown = partial(LayerCost.with_bytes, factor=factor)
            more = {name: tuple(way.map(grown) for way in group) for name, group in ways.items()}
            self._measured[index] = replace(cost, groups=tuple(group[0].cost for group in more.values())), more

    def settle(self, plan: PipelinePlan) -> None:
        """Replay what a plan says from the next step on."""
        if not self._limits.may_recompute:
            return
        for stage in self._stages:
            names = plan.names[stage.index]
            saves = zip(names, plan.saves.get(stage.index, (None,) * len(names)), strict=True)
            stage.steering.recompute({name: saving(outputs) for name, outputs in saves if outputs is not None})

    def _link(self) -> Link | None:
        """Return the rates of copies, as they were with all ranks copying."""
        if not self._backend.times:
            return Link(getattr(self._backend, "d2h", float("inf")), getattr(self._backend, "h2d", float("inf")))
        if self._lean is None:
            return None
        self._lean.wait()
        room = self._conductor.engine.host_room()
        return measured_link(self._lean) or probed_link(self._backend, room) or Link(float("inf"), float("inf"))

    def outdated(self, plan: PipelinePlan) -> bool:
        """Return whether there are other groups than when a plan was made, or larger tensors."""
        mine = next(each for each in self.known if each.rank == self._rank)
        for stage in self._stages:
            stage.steering.grow()
        for stage in self._stages:
            sizes = stage.steering.sizes
            planned = plan.nbytes.get(stage.index, sizes)
            # What a recomputed group saves may be counted with the group before it, which has a size to compare with.
            known = (pair for pair in zip(sizes, planned, strict=False) if pair[1] or not self._measured)
            if plan.names[stage.index] != stage.steering.names or any(has_grown(*pair) for pair in known):
                return True
            kept, cost = self._conductor.learned.boundary.get(stage.index, 0), mine.costs[stage.index]
            if has_grown(kept + stage.steering.outside, cost.boundary_bytes + cost.output_bytes):
                return True
        return False
