"""The steps of a schedule on one rank: measure first, then plan together with the other ranks, then follow the plan."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._warnings import warn
from ..engine import eligibility
from ..engine.layer import tensors_in
from ..engine.statistics import Statistics
from ..report.ranks import PipelineReport
from ..schedule.pipeline import Computation, Step, read_order
from ..schedule.pipeline_plan import PipelinePlan
from ..tune.exchange import LostRankError
from .conductor import Conductor
from .first_steps import FirstSteps
from .follow import actions_of, runs_backward, unfollow
from .planning import Limits, Measured, Plans, Trial, Tried, act, agreed, costs_time, decision, is_slow, judge, plans_of
from .stages import PipelineRanks, RankStage, Settings, disagreement, replicas_of

__all__ = ["Runner"]

logger = logging.getLogger("actoffload")

MEASURING = "This is done in the first steps, which are measured: everything is offloaded."
NOT_MET = "So nothing is offloaded on this rank. Call actoffload.offload(schedule) on every rank before the first step."
LOST = (
    "So this rank offloads from here on what it offloads now. Run the same number of steps on every rank, and call "
    "remove() of the handles on all of them."
)


MOST_AGAIN = 2  # times that recomputation is measured, where a rank ran other groups in the first time


class Runner:
    """Follows the steps of a schedule; every rank of the pipeline has one.

    `followed` are the stages of the rank and the schedule; the settings are the arguments of this rank.
    """

    def __init__(
        self,
        followed: Sequence[Any],
        stages: Sequence[RankStage],
        conductor: Conductor,
        settings: Settings,
        limits: Limits,
        rank: int,
        exchange: PipelineRanks,
    ) -> None:
        # Weak references: the schedule and its stages refer to this object.
        self._followed = [weakref.ref(each) for each in followed]
        self.stages, self.conductor = tuple(stages), conductor
        self._settings, self._limits, self._exchange, self.rank = settings, limits, exchange, rank
        self._script = FirstSteps(self.stages, conductor, limits.memory_budget)
        self._alone = False  # another rank does not answer
        self._measured: list[Measured] = []  # of all ranks, when they planned
        self._measured_again = 0  # times that recomputation was measured
        self._trials: list[Trial] = []
        self._whole = False  # the plans that are tried replay everything as a whole
        self.plans: Plans = ()  # of all ranks
        self.because = MEASURING
        self._peak = 0  # the same in the latest step in which all groups were followed
        self.number = 0  # of steps with backward that began
        self.installed = True

    # Steps

    @contextmanager
    def step(self, schedule: Any) -> Iterator[None]:
        """Follow one step of the schedule."""
        training = runs_backward(schedule) and torch.is_grad_enabled()
        if training:
            self._before()
        self.conductor.begin(training=training)
        failed = True
        try:
            yield
            failed = False
        finally:
            changed = self.conductor.end(failed=failed)
            if training:
                self._after(failed=failed, changed=changed)

    @contextmanager
    def computing(self, stage: Any, step: Step, inputs: Any = ()) -> Iterator[None]:
        """Follow one computation of a stage; its inputs are kept, because the caller holds them during the step."""
        for tensor in tensors_in(inputs):
            eligibility.mark_kept(tensor)
        with self.conductor.computing(stage, step):
            yield

    def _before(self) -> None:
        """Begin a step; see [Note: exchanges]."""
        self.number += 1
        try:
            self._exchange_what_is_known()
            if not self._alone and (self.conductor.plan is None or self._script.trying):
                self._script.begin(self.number)
        except LostRankError as lost:
            self._lose(lost)

    def _exchange_what_is_known(self) -> None:
        """PipelineRanks the arguments before the first step, and plan when enough is measured."""
        if self.number == 1:
            self._meet()
        elif self._alone:
            return
        elif self._script.trying and self.number > self._script.steps:
            tried = [each for ranks in self._exchange.gather(self._script.tried()) for each in ranks]
            known = [each for each in tried if each is not None]
            if len(known) == len(tried):
                self._judge(known)
        elif not self.plans and self.number > self._script.steps:
            found = agreed(self._exchange.gather(self._script.measured(self.rank)))
            if found is not None:
                self._decide(found)

    def _meet(self) -> None:
        """Find the ranks that run the same stages, and compare the arguments of all."""
        wrong = disagreement(self._exchange.meet(self._settings, replicas_of(ref() for ref in self._followed)))
        if wrong:
            self.remove()
            raise ValueError(wrong)

    def _lose(self, lost: LostRankError) -> None:
        """Go on without the other ranks: without offloading where they were never met."""
        self._exchange.leave()
        self._alone, self._script.trying = True, False
        if self.number == 1:
            self.remove()
        warn(f"{lost} {NOT_MET if self.number == 1 else LOST}")

    def _decide(self, measured: list[Measured]) -> None:
        """Plan from what all ranks measured, and try the plan; or measure recomputation first, where it is needed."""
        self._measured = measured
        plans = plans_of(measured, self._limits)
        if self._may_measure_again and costs_time(measured, plans):
            self._measure_again()
        elif act(plans) and self.conductor.engine.backend.times:
            self._follow(plans)
            self._script.try_plan(self.number, bare=all(each.bare for each in measured))
        else:
            self._keep(plans)

    @property
    def _may_measure_again(self) -> bool:
        """Whether recomputation may be measured and was not; all ranks decide by what all of them know."""
        wanted = self._limits.may_recompute and any(each.again is None for each in self._measured)
        # Where groups come and go, what was measured is of no use.
        return wanted and self._measured_again < MOST_AGAIN

    def _measure_again(self) -> None:
        """Measure recomputation in the next steps, in which no plan is followed."""
        self._measured_again += 1
        self.plans, self._trials, self._script.trying = (), [], False
        self.conductor.follow(None)
        self._script.again(self._mine, self.number)

    def _judge(self, tried: Sequence[Tried]) -> None:
        """Keep plans, or try others; see [Note: trial of the plans]."""
        self._trials.append(Trial.of(self.plans, tried, whole=self._whole))
        if self._may_measure_again and is_slow(self._trials[-1], self._measured):
            self._measure_again()
            return
        verdict = judge(self._trials, self._measured, self._limits)
        if verdict.final:
            self._keep(verdict.plans)
            return
        self._whole = verdict.whole
        self._follow(verdict.plans)
        self._script.try_plan(self.number, bare=False)

    def _keep(self, plans: Plans) -> None:
        """Follow the plans that are final."""
        self._follow(plans)
        self._script.trying = False
        plan, engine = self.conductor.plan, self.conductor.engine
        if plan is not None and engine.backend.times:
            engine.trim(keep=plan.host_bytes)
        if self.rank == 0:
            logger.info("%s", decision(self.plans))

    def _after(self, *, failed: bool, changed: bool) -> None:
        """Take what a step showed; plan anew if it ran another order than the plan has, or saved other bytes."""
        conductor = self.conductor
        paused = conductor.paused
        self._script.end(failed=failed)
        if paused:
            return
        if not failed and conductor.plan is not None and not conductor.scoped:
            self._peak = conductor.engine.statistics().peak_resident_bytes
        outdated = any(stage.steering.changed for stage in self.stages)
        for stage in self.stages:
            stage.steering.changed = False
        # Where the time of the host counts, groups that are kept are followed in one step with a new plan, and no more.
        followed = conductor.plan is not None and not (failed or changed or outdated)
        conductor.scoped = followed and conductor.engine.backend.times
        plan = conductor.plan
        if not failed and plan is not None and (changed or self._script.outdated(plan, self._mine.costs)):
            self._plan_anew(plan)

    @property
    def _mine(self) -> Measured:
        """What this rank knew when it planned."""
        return next(each for each in self._measured if each.rank == self.rank)

    def _plan_anew(self, before: PipelinePlan) -> None:
        """Plan for what this rank does now, with what the others have sent."""
        if before.saves and self._exchange.replicas:  # they would recompute something else
            return
        mine = self._script.measured(self.rank, before)
        if mine is None:
            return
        self._measured = [mine if each.rank == self.rank else each for each in self._measured]
        microbatches = {step.microbatch for step in mine.order}
        try:
            found = plans_of([each.with_microbatches(microbatches) for each in self._measured], self._limits)
        except ValueError as error:  # the other ranks wait for this one, which can go on with the plan that it has
            warn(f"The plan stays as it is, although this rank now runs something else: {error}")
            return
        self._follow(found)

    def _follow(self, plans: Plans) -> None:
        """Follow the plan of this rank."""
        self.plans = plans
        found = next(plan for plan in self.plans if plan.rank == self.rank)
        self.conductor.follow(found)
        self._script.settle(found)
        self.conductor.scoped = False
        self.because = found.because

    @property
    def group(self) -> Any:
        """The process group of the pipeline; None for the default one."""
        return self._exchange.group

    @property
    def settling(self) -> bool:
        """Whether steps are still measured."""
        return self.installed and not self._alone and (not self.plans or self._script.trying)

    def order(self) -> tuple[Step, ...]:
        """Return what this rank computes: the order that ran wins over the one that the schedule has."""
        schedule = self._followed[-1]()
        return self.conductor.learned.order or read_order(actions_of(schedule, self.rank))

    def _saved_bytes(self, stage: RankStage) -> int:
        """Return what a microbatch of a stage saves; until a step has run with a new plan, what the plan expects."""
        if stage.steering.saved or self.conductor.plan is None:
            return sum(stage.steering.sizes)
        return sum(self.conductor.plan.nbytes[stage.index])

    def _peak_bytes(self, statistics: Statistics) -> int:
        """Return the highest bytes of saved tensors at a time, also where not all of them were seen."""
        if self._script.kept_bytes is not None:
            return self._script.kept_bytes
        return self._peak if self.conductor.scoped else statistics.peak_resident_bytes

    def report(self) -> PipelineReport:
        """Return what this rank did since its statistics were reset."""
        learned, plan = self.conductor.learned, self.conductor.plan
        if not learned.order:
            raise RuntimeError("There is nothing to report yet: no step of the schedule has ended. Run a step first.")
        statistics = self.conductor.engine.statistics()
        forwards = [step.stage for step in learned.order if step.computation is Computation.FORWARD]
        saved = {stage.index: self._saved_bytes(stage) for stage in self.stages}
        groups = {stage.index: len(stage.steering.names) for stage in self.stages}
        return PipelineReport(
            rank=self.rank,
            stages=tuple(saved),
            chunks=sum(groups[stage] for stage in forwards),
            offloaded=0 if plan is None else len(plan.transfers),
            saved_bytes=sum(saved[stage] for stage in forwards),
            offloaded_bytes=0 if plan is None else plan.offloaded_bytes,
            peak_bytes=self._peak_bytes(statistics),
            expected_bytes=None if plan is None else plan.saved_peak_bytes,
            boundary_bytes=sum(learned.boundary.values()),
            on_demand=statistics.reloaded_on_demand,
            host_bytes=statistics.host_bytes,
            because=self.because,
        )

    def remove(self) -> None:
        """Follow the schedule no longer, and end offloading in its stages."""
        if self.installed:
            if self.settling and self.number:  # the others wait for this rank from the first step on
                self._exchange.leave()
            self.installed = False
            unfollow([each for ref in self._followed if (each := ref()) is not None])
            for stage in self.stages:
                stage.handle.remove()
            self.conductor.engine.close()
