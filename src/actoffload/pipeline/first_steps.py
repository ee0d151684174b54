"""The first steps of a schedule on one rank: what is measured in them, and what they showed.

`[Note: the first steps of a schedule]`  Nothing is known before the first step, and it must not run out of memory.  So
everything is offloaded that can be, and freed where its group ends; each group is reloaded when its backward begins.
That step shows the order of the computations, what each group saves, and what the backward of the weights uses.  Where
time is measured, the second step is the same, for the times, and for the rates of copies with all ranks copying.

If everything fits in all ranks, the third step keeps everything, and nothing is followed from then on.  Otherwise,
where groups may be recomputed, two more steps recompute and offload everything: the first proves the programs of the
groups and times their operators, the second is measured.  Then plans are tried: see `planning` [Note: trial of the
plans].  The first step with a plan takes host memory, the next one is timed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..device.base import Backend, usable
from ..model.replays import OperatorTimes
from ..planner import OperatorCost, Variant, replay_ways
from ..planner.variants import within
from ..replay import policy_for, saving
from ..schedule.costs import LayerCost, Link
from ..schedule.pipeline import SplitCost, StageCost
from ..schedule.pipeline_plan import PipelinePlan
from ..tune.costs import kept_outputs, measured_link, stage_cost
from ..tune.meter import Standing, StepMeter
from .conductor import Conductor
from .planning import (
    Limits,
    Measured,
    PipelineRanks,
    Plans,
    Tried,
    act,
    agreed,
    keep_best,
    plans_of,
)
from .stages import RankStage, has_grown

__all__ = ["FirstSteps", "Script", "Stage"]

TRIES = 2  # to measure recomputation, where a rank ran other groups in the first time


class Stage(enum.Enum):
    """What a step is for."""

    FIRST = "the first one of its kind, which is not measured"
    LEAN = "everything is offloaded; its groups, copies and memory are measured"
    PLAN = "a plan is followed; the whole step is timed"


Script: TypeAlias = Generator[tuple[Stage, Plans], None, Plans]
"""Yields what the next step is for, with the plans to follow from it on if there are others, and returns the last."""


class FirstSteps:
    """What the first steps of a rank showed."""

    def __init__(
        self, stages: Sequence[RankStage], conductor: Conductor, rank: int, exchange: PipelineRanks, limits: Limits
    ) -> None:
        self._stages, self._conductor = stages, conductor
        self._rank, self._exchange, self._limits = rank, exchange, limits
        self.known: list[Measured] = []  # by all ranks, when they planned
        self._backend: Backend = conductor.engine.backend
        self._lean: StepMeter | None = None  # of the latest step that offloaded everything
        self._timed: StepMeter | None = None  # of the latest step with a plan
        self._meter: StepMeter | None = None  # of the present step
        self._stage = Stage.FIRST
        self.other_bytes = 0  # of device memory in the whole step, beside what stages have
        self._gradients: dict[int, tuple[int, ...]] = {}  # by stage: bytes that the first backward allocates, by group
        self._plain: Measured | None = None  # what was measured without recomputation
        self._operators: dict[int, OperatorTimes] = {}  # by stage: of its groups
        self._used: dict[tuple[int, int], frozenset[int]] = {}  # what was learned of it
        self._again: dict[int, list[tuple[Variant, ...]]] | None = None  # the ways to run them, as measured
        self._growth: dict[int, float] = {}  # by stage: bytes that its groups save now, over those measured
        self._peak = 0  # bytes of device memory in the latest step with a plan

    def run(self) -> Script:
        """Yield what the next step is for, exchange what it showed, and return the plans to keep.

        See [Note: the first steps of a schedule] and [Note: trial of the plans].
        """
        limits, timed = self._limits, self._backend.times
        yield from self._measure(Stage.FIRST, *((Stage.LEAN,) if timed else ()))
        plans = plans_of(self.known, limits)
        if not timed:
            return plans
        if limits.may_recompute and act(plans_of(self.known, Limits())):  # not everything fits
            for _ in range(TRIES):
                self._recompute()
                yield from self._measure(Stage.FIRST, Stage.LEAN)
                if all(each.again is not None for each in self.known):
                    break
                self._plain = None  # of other groups than those that ran
                for stage in self._stages:
                    stage.steering.recompute({})
                yield from self._measure(Stage.LEAN)
            plans = plans_of(self.known, limits)
        return (yield from keep_best(plans, self.known, limits, self._try))

    def _measure(self, *stages: Stage) -> Generator[tuple[Stage, Plans], None, None]:
        """Yield steps until all ranks have measured a whole one."""
        yield from ((stage, ()) for stage in stages)
        while (found := agreed(self._exchange.gather(self.measured()))) is None:
            yield stages[-1], ()
        self.known = found

    @property
    def mine(self) -> Measured:
        """What this rank knew when all of them planned."""
        return next(each for each in self.known if each.rank == self._rank)

    def _try(self, plans: Plans) -> Generator[tuple[Stage, Plans], None, list[Tried]]:
        """Yield steps with some plans until one was timed in all ranks; return what they saw."""
        self._timed = None
        yield (Stage.FIRST if act(plans) else Stage.PLAN), plans
        if act(plans):
            yield Stage.PLAN, ()
        while True:
            gathered = self._exchange.gather(self._tried())
            found = [each for ranks in gathered for each in ranks if each is not None]
            if len(found) == sum(map(len, gathered)):
                return found
            yield Stage.PLAN, ()

    def begin(self, stage: Stage) -> None:
        """Begin one of the first steps."""
        self._stage = stage
        if not self._backend.times:
            return
        self._backend.allocated()  # resets the peak
        engine = self._conductor.engine
        if stage is Stage.PLAN:
            # None of its groups is timed: that would take time of the host, which may be what counts.
            self._meter = StepMeter(self._backend, engine.counters)
        if stage is Stage.LEAN:
            with engine.lock:
                engine.counters.reset()
            standing = dict[int, Standing]()
            for each in self._stages:
                each.steering.operators = None  # a step in which operators are timed takes longer
                self._gradients[each.index] = each.steering.gradients
                boundary, output = kept_outputs(each.index, self._conductor.learned)
                boundary += each.steering.outside
                standing[each.index] = Standing(boundary, output, sum(self._gradients[each.index]))
            self._meter = StepMeter(self._backend, engine.counters, standing)
            engine.record(self._meter)
            self._conductor.watching = self._meter.note

    def end(self, *, failed: bool) -> None:
        """End a step."""
        meter, engine = self._meter, self._conductor.engine
        self._meter = self._conductor.watching = None
        if meter is None:
            return
        meter.end()
        if engine.recorder is meter:
            engine.record(None)
        if failed:
            return
        if self._stage is Stage.PLAN:
            self._timed, self._peak = meter, (self._backend.allocated() or (0, 0))[1]
            return
        self._lean = meter
        # With recomputation it has what stays for a weight backward, which the costs have, too.
        self.other_bytes = meter.other_bytes if self._plain is None else self.other_bytes

    def _tried(self) -> Tried | None:
        """Return what the latest step with a plan showed; None if there was none."""
        if self._timed is None:
            return None
        self._timed.wait()
        return Tried(self._timed.seconds(), self._peak)

    def limit(self) -> int | None:
        """Return the bytes of device memory that a plan may use; None if that is not known."""
        limit = self._backend.memory_limit()
        if limit is not None:
            groups = (group for stage in self._stages for group in stage.steering.saved)
            limit = usable(limit, max((nbytes for group in groups for _, nbytes in group), default=0))
        return min((each for each in (limit, self._limits.memory_budget) if each is not None), default=None)

    def measured(self, plan: PipelinePlan | None = None) -> Measured | None:
        """Return what this rank knows; None if no whole step was seen.

        With recomputation the groups save what their ways saved when these were measured.  Where one saves more than in
        the `plan` that is followed, all groups of its stage do: what those that are recomputed would save is not seen.
        """
        learned = self._conductor.learned
        if not learned.order or not self._known:
            return None
        names = {stage.index: stage.steering.names for stage in self._stages}
        link = self._link()
        if link is None:
            return None
        found = {}
        for k, stage in enumerate(self._stages):
            other, steering = 0 if k else self.other_bytes, stage.steering
            gradients = self._gradients.get(stage.index, ())
            gradients = gradients if len(gradients) == len(steering.saved) else ()
            found[stage.index] = stage_cost(
                stage.index, steering.saved, learned, steering.outside, other, gradients, self._lean
            )
        mine = Measured(self._rank, learned.order, names, found, link, self.limit())
        if self._plain is None or any(
            not set(names[stage]) <= set(before) for stage, before in self._plain.names.items()
        ):
            return mine
        if self._again is None:
            if self._plain.names != names:
                return mine
            self._again = self._variants(mine)
        if plan is not None:
            self._grow(plan)
        costs, again = dict[int, StageCost](), dict[int, list[tuple[Variant, ...]]]()
        for index, cost in self._plain.costs.items():  # of the groups that run now
            at = [self._plain.names[index].index(name) for name in names[index]]
            growth = self._growth.get(index, 1.0)
            again[index] = [tuple(_larger(way, growth) for way in self._again[index][k]) for k in at]
            groups = tuple(ways[0].cost for ways in again[index])
            halves = zip((cost.splits[k] for k in at if cost.splits), groups, strict=False)
            kept = ((half, min(math.ceil(half.kept * growth), group.nbytes)) for half, group in halves)
            costs[index] = replace(
                found[index],
                groups=groups,
                splits=tuple(replace(half, kept=nbytes) for half, nbytes in kept),
                gradient_bytes=tuple(cost.gradient_bytes[k] for k in at) if cost.gradient_bytes else (),
                other_bytes=cost.other_bytes,
            )
        return replace(self._plain, order=learned.order, names=names, costs=costs, again=again)

    def _grow(self, plan: PipelinePlan) -> None:
        """Count by how much groups save more than in a plan."""
        for stage in self._stages:
            if plan.names[stage.index] != stage.steering.names:
                continue
            sizes = zip(stage.steering.sizes, plan.nbytes[stage.index], strict=True)
            factors = (now / planned for now, planned in sizes if planned)
            self._growth[stage.index] = self._growth.get(stage.index, 1.0) * max(1.0, *factors)

    def _recompute(self) -> None:
        """Recompute everything in the next steps, and time the operators."""
        self._plain = self.mine
        learned = self._conductor.learned
        self._used, learned.used = learned.used, {}
        for stage in self._stages:
            stage.steering.recompute(dict.fromkeys(stage.steering.names, policy_for(True)))
            self._operators[stage.index] = stage.steering.operators = OperatorTimes(self._backend)

    def settle(self, plan: PipelinePlan) -> None:
        """Recompute what a plan says from the next step on."""
        if self._plain is None:
            return
        learned = self._conductor.learned
        learned.used = {}  # of groups that are recomputed in another way, which save other tensors
        for stage in self._stages:
            names, measured = plan.names[stage.index], self._plain.names[stage.index]
            saves = plan.saves.get(stage.index, (None,) * len(names))
            policies = {
                name: saving(outputs) for name, outputs in zip(names, saves, strict=True) if outputs is not None
            }
            stage.steering.recompute(policies)
            for k, name in enumerate(names):
                key = stage.index, measured.index(name) if name in measured else -1
                if name not in policies and key in self._used:
                    learned.used[stage.index, k] = self._used[key]

    def _variants(self, found: Measured) -> dict[int, list[tuple[Variant, ...]]]:
        """Return the ways to run each group, the first one without recomputation."""
        assert self._plain is not None
        again: dict[int, list[tuple[Variant, ...]]] = {}
        for stage in self._stages:
            operators = self._operators[stage.index].costs()
            ran = {name: key.group for name, key in zip(stage.steering.names, stage.steering.order, strict=True)}
            plain, whole = self._plain.costs[stage.index], found.costs[stage.index]
            splits = whole.splits or (None,) * len(whole.groups)
            groups = zip(found.names[stage.index], plain.groups, whole.groups, splits, strict=True)
            again[stage.index] = [
                tuple(
                    way.map(lambda cost: cost.in_batches(self._backend.batch))
                    for way in _ways(before, cost, operators.get(ran[name], ()), split)
                )
                for name, before, cost, split in groups
            ]
        return again

    def _link(self) -> Link | None:
        """Return the rates of copies, as they were with all ranks copying."""
        if not self._backend.times:
            return Link(getattr(self._backend, "d2h", float("inf")), getattr(self._backend, "h2d", float("inf")))
        if self._lean is None:
            return None
        self._lean.wait()
        return measured_link(self._lean) or Link(float("inf"), float("inf"))

    def outdated(self, plan: PipelinePlan) -> bool:
        """Return whether there are other groups than when a plan was made, or larger tensors."""
        for stage in self._stages:
            stage.steering.grow()
        for stage in self._stages:
            sizes = stage.steering.sizes
            planned = plan.nbytes.get(stage.index, sizes)
            # What a recomputed group saves may be counted with the group before it, which has a size to compare with.
            known = (pair for pair in zip(sizes, planned, strict=False) if pair[1] or self._again is None)
            if plan.names[stage.index] != stage.steering.names or any(has_grown(*pair) for pair in known):
                return True
            kept, cost = self._conductor.learned.boundary.get(stage.index, 0), self.mine.costs[stage.index]
            if has_grown(kept + stage.steering.outside, cost.boundary_bytes + cost.output_bytes):
                return True
        return False

    @property
    def _known(self) -> bool:
        """Whether the groups of the latest forwards are those whose bytes are known."""
        return all(stage.steering.known for stage in self._stages)


def _larger(way: Variant, factor: float) -> Variant:
    """Return a way to run a group that saves `factor` times as much."""
    again = None if way.read_again is None else math.ceil(way.read_again * factor)
    return replace(way, cost=way.cost.with_bytes(factor), read_again=again)


def _ways(
    plain: LayerCost, whole: LayerCost, operators: Sequence[OperatorCost], split: SplitCost | None
) -> tuple[Variant, ...]:
    """Return the ways to run a group: without recomputation, and those that follow from recomputing all of it.

    Backward comes to a recomputed group with all that it saves, from which it recomputes.  The weight backward of a
    split backward reads what it reads where all is recomputed, and at most all that a way saves beyond that.
    """
    if plain.nbytes <= whole.nbytes:
        return (Variant(plain),)
    _, *ways = replay_ways(whole, within(operators, plain.forward)) if operators else (None, Variant(whole, ()))
    found = [Variant(plain)]
    for way in ways:
        saved = tuple(replace(each, needed_at=0.0) for each in way.cost.saved)
        kept = None if split is None else split.kept + max(way.cost.nbytes - whole.nbytes, 0)
        found.append(replace(way, cost=replace(way.cost, saved=saved), read_again=kept))
    return tuple(found)
