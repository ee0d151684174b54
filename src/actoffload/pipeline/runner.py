"""The steps of a schedule on one rank: measure first, then plan together with the other ranks, then follow the plan."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .._torch.tensors import leaves
from .._warnings import warn
from ..engine import eligibility
from ..report.report import GroupReport, Report
from ..schedule.pipeline import Computation, PipelinePlan, Step, read_order
from ..tune.exchange import LostRankError
from ..tune.script import Steps
from .conductor import Conductor
from .first_steps import FirstSteps
from .follow import actions_of, unfollow
from .planning import Limits, PipelineRanks, Plans, Settings, decision, disagreement, plans_of
from .stages import RankStage, replicas_of

logger = logging.getLogger("actoffload")

MEASURING = "This is done in the first steps, which are measured: everything is offloaded."
NOT_MET = "So nothing is offloaded on this rank. Call actoffload.offload(schedule) on every rank before the first step."
LOST = (
    "So this rank offloads from here on what it offloads now. Run the same number of steps on every rank, and call "
    "remove() of the handles on all of them."
)


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
        self._settings, self._limits, self.exchange, self.rank = settings, limits, exchange, rank
        self._first = FirstSteps(self.stages, conductor, rank, exchange, limits)
        self._script: Steps[Plans] | None = self._first.run()  # None once the plans are final
        self._peak = 0  # the same in the latest step in which all groups were followed
        self.number = 0  # of steps with backward that began
        self.installed = True

    # Steps

    @contextmanager
    def step(self, schedule: Any) -> Iterator[None]:
        """Follow one step of the schedule."""
        # A step runs no backward in `eval`, and none without a loss.
        training = getattr(schedule, "_has_backward", True) and torch.is_grad_enabled()
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
        for tensor in leaves(inputs):
            eligibility.mark_kept(tensor)
        with self.conductor.computing(stage, step):
            yield

    def _before(self) -> None:
        """Begin a step; see `planning` [Note: exchanges]."""
        self.number += 1
        try:
            if self.number == 1:
                # Find the ranks that run the same stages, and compare the arguments of all.
                replicas = replicas_of(ref() for ref in self._followed)
                wrong = disagreement(self.exchange.meet(self._settings, replicas))
                if wrong:
                    self.remove()
                    raise ValueError(wrong)
            if self._script is not None:
                self._first.begin(next(self._script))
        except StopIteration as stop:
            if stop.value is None:
                self._lose("The first steps were interrupted.")
            else:
                self._keep(stop.value)
        except LostRankError as lost:
            self._lose(str(lost))

    def _lose(self, problem: str) -> None:
        """Go on without the other ranks: without offloading where they were never met."""
        self.exchange.leave()
        self._script = None
        if self.number == 1:
            self.remove()
        warn(f"{problem} {NOT_MET if self.number == 1 else LOST}")

    def _keep(self, plans: Plans) -> None:
        """Follow the plans that are final."""
        self._script = None
        self._first.follow(plans)
        plan, engine = self.conductor.plan, self.conductor.engine
        if plan is not None and engine.backend.times:
            engine.fit(plan.host_bytes)
        if self.rank == 0:
            logger.info("%s", decision(self.plans))

    # Later

    def _after(self, *, failed: bool, changed: bool) -> None:
        """Take what a step showed; plan anew if it ran another order than the plan has, or saved other bytes."""
        conductor, plan = self.conductor, self.conductor.plan
        self._first.end(failed=failed)
        if not failed and plan is not None and not conductor.scoped:
            self._peak = conductor.engine.statistics().peak_resident_bytes
        outdated = any(stage.steering.changed for stage in self.stages)
        for stage in self.stages:
            stage.steering.changed = False
        # Where the time of the host counts, groups that are kept are followed in one step with a new plan, and no more.
        followed = plan is not None and not (failed or changed or outdated)
        conductor.scoped = followed and conductor.engine.backend.times
        if not failed and plan is not None and (changed or self._first.outdated(plan)):
            self._plan_anew(plan)

    def _plan_anew(self, before: PipelinePlan) -> None:
        """Plan for what this rank does now, with what the others have sent."""
        if before.saves and self.exchange.replicas:  # they would recompute something else
            return
        mine = self._first.measured(before)
        if mine is None:
            return
        self._first.known = [mine if each.rank == self.rank else each for each in self._first.known]
        microbatches = {step.microbatch for step in mine.order}
        known = [  # the order of a rank that ran other ones is not known
            each if {step.microbatch for step in each.order} == microbatches else replace(each, order=())
            for each in self._first.known
        ]
        try:
            found = plans_of(known, self._limits)
        except ValueError as error:  # the other ranks wait for this one, which can go on with the plan that it has
            warn(f"The plan stays as it is, although this rank now runs something else: {error}")
            return
        self._first.follow(found)

    @property
    def plans(self) -> Plans:
        """The plans of all ranks."""
        return self._first.plans

    @property
    def settling(self) -> bool:
        """Whether steps are still measured."""
        return self.installed and self._script is not None

    def order(self) -> tuple[Step, ...]:
        """Return what this rank computes: the order that ran wins over the one that the schedule has."""
        schedule = self._followed[-1]()
        return self.conductor.learned.order or read_order(actions_of(schedule, self.rank))

    def report(self) -> Report:
        """Return what this rank did since its statistics were reset."""
        learned, plan = self.conductor.learned, self.conductor.plan
        if not learned.order:
            raise RuntimeError("There is nothing to report yet: no step of the schedule has ended. Run a step first.")
        statistics = self.conductor.engine.statistics()
        forwards = Counter(step.stage for step in learned.order if step.computation is Computation.FORWARD)
        chunks = Counter((chunk.stage, chunk.group) for chunk in (() if plan is None else plan.transfers))
        groups = []
        for stage in self.stages:
            index, sizes = stage.index, stage.steering.sizes
            if plan is not None and not stage.steering.saved:  # no step has run with it yet
                sizes = plan.nbytes[index]
            again = () if plan is None else plan.saves.get(index, ())
            for k, (name, nbytes) in enumerate(zip(stage.steering.names, sizes, strict=False)):
                number, recomputed = chunks[index, k], bool(again) and again[k] is not None
                saved: dict[str, Any] = {"bytes_saved": nbytes * forwards[index], "bytes_offloaded": nbytes * number}
                groups.append(GroupReport(name, f"stage {index}", forwards[index], number, recomputed, **saved))
        return Report(
            groups=tuple(groups),
            passes=statistics.passes,
            peak_resident_bytes=self._peak if self.conductor.scoped else statistics.peak_resident_bytes,
            host_bytes=statistics.host_bytes,
            host_bytes_high_water=statistics.host_bytes_high_water,
            because=MEASURING if plan is None else plan.because,
            times=self.conductor.engine.backend.times,
        )

    def remove(self) -> None:
        """Follow the schedule no longer, and end offloading in its stages."""
        if self.installed:
            if self.settling and self.number:  # the others wait for this rank from the first step on
                self.exchange.leave()
            self.installed = False
            unfollow([each for ref in self._followed if (each := ref()) is not None])
            for stage in self.stages:
                stage.handle.remove()
            self.conductor.engine.close()
