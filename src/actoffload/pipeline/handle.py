"""The handle of a schedule: its steps are measured first, planned together with the other ranks, and then follow."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._warnings import warn
from ..model.handle import Handle
from ..report.build import counted
from ..report.report import GroupReport, RankReports, Report, gather_reports
from ..schedule.orders import Computation
from ..schedule.plan import Plan
from ..tune.exchange import LostRankError, Settings, disagreement_of
from ..tune.script import Plans, Steps
from .first_steps import FirstSteps
from .follow import follow, handle_of, is_schedule, unfollow

logger = logging.getLogger("actoffload")

MEASURING = "This is done in the first steps, which are measured: everything is offloaded."
NOT_MET = "So nothing is offloaded on this rank. Call actoffload.offload(schedule) on every rank before the first step."
LOST = (
    "So this rank offloads from here on what it offloads now. Run the same number of steps on every rank, and call "
    "remove() of the handles on all of them."
)


class PipelineHandle(Handle):
    """Offloading of the stages of one rank; made by `offload`, ended with `remove` or by leaving its ``with`` block.

    ``print(handle)`` shows the plan of this rank.  The handle may be dropped; offloading lasts as long as the schedule.
    """

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[Any],
        first: FirstSteps,
        settings: Settings,
    ) -> None:
        self._conductor = first.conductor
        super().__init__(first.conductor.engine, first.stages)
        # Weak references: the schedule and its stages refer to this object.
        self._followed = [weakref.ref(each) for each in (*stages, schedule)]
        self._first, self._settings = first, settings
        self._script: Steps[Plans] | None = first.run()  # None once the plans are final
        self._number = 0  # of steps with backward that began
        follow(schedule, stages, self, self._step, self._conductor.computing)

    @classmethod
    def of(cls, schedule: Any) -> PipelineHandle | None:
        """Return the handle of the schedule that `offload` was called with; None for one that is not offloaded."""
        if not is_schedule(schedule):
            raise TypeError(f"PipelineHandle.of got {schedule!r}; expected the schedule that offload was called with.")
        handle: PipelineHandle | None = handle_of(schedule)
        return handle

    def remove(self) -> None:
        """End offloading on this rank and free the host memory; call it on every rank, between two steps.

        A second call does nothing.
        """
        if not self._removed:
            if self._script is not None and self._number:  # the others wait for this rank from the first step on
                self._first.ranks.leave()
            unfollow([each for ref in self._followed if (each := ref()) is not None])
            super().remove()

    # Steps

    @contextmanager
    def _step(self, schedule: Any) -> Iterator[None]:
        """Follow one step of the schedule."""
        # A step runs no backward in `eval`, and none without a loss.
        training = getattr(schedule, "_has_backward", True) and torch.is_grad_enabled()
        if training:
            self._before()
        self._conductor.begin(training=training)
        failed = True
        try:
            yield
            failed = False
        finally:
            changed = self._conductor.end(failed=failed)
            if training:
                self._first.end(failed=failed, changed=changed)

    def _before(self) -> None:
        """Begin a step; see `exchange` [Note: exchanges]."""
        self._number += 1
        try:
            if self._number == 1:
                # Find the ranks that run the same stages, and compare the arguments of all.
                stages = (ref() for ref in self._followed)
                wrong = disagreement_of(self._first.ranks.meet(self._settings, stages))
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
        self._first.ranks.leave()
        self._script = None
        if self._number == 1:
            self.remove()
        warn(f"{problem} {NOT_MET if self._number == 1 else LOST}")

    def _keep(self, plans: Plans) -> None:
        """Follow the plans that are final."""
        self._script = None
        self._first.follow(plans)
        plan = self.plan
        if plan is not None and self._engine.backend.times:
            self._engine.fit(plan.host_bytes)
        if self._first.rank == 0:
            logger.info("The plans of all ranks of the pipeline:\n\n%s", "\n\n".join(map(str, plans)))

    # What was chosen

    @property
    def plan(self) -> Plan | None:
        """The plan of this rank; None until the first steps are measured."""
        return self._conductor.plan

    @property
    def settling(self) -> bool:
        """Whether steps are still measured, and the plan may change at the begin of the next one.

        It is True until the plans of all ranks are final, so ``while handle.settling: schedule.step(...)`` ends in all
        ranks after the same step.
        """
        return self.installed and self._script is not None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all ranks, in order; none until the first steps are measured."""
        return self._first.plans

    def __str__(self) -> str:
        return MEASURING if self.plan is None else str(self.plan)

    def __repr__(self) -> str:
        stages = ", ".join(str(stage.index) for stage in self._first.stages)
        return f"<PipelineHandle of rank {self._first.rank}, stages {stages}>"

    # What happened

    def report(self) -> Report:
        """Return what this rank saves and offloads in a step, and the peak since `offload` or `reset_statistics`.

        On an accelerator the statistics begin anew with each of the first steps, which are measured one by one.
        Raises a `RuntimeError` if no step has ended.
        """
        order, plan, counts = self._conductor.order, self.plan, counted(self.statistics())
        if not order:
            raise RuntimeError("There is nothing to report yet: no step of the schedule has ended. Run a step first.")
        forwards = Counter(step.stage for step in order if step.computation is Computation.FORWARD)
        numbers, recomputed = (Counter[int](), ()) if plan is None else (Counter(plan.offloaded), plan.recomputed)
        groups = []
        for stage in self._first.stages:
            index, sizes = stage.index, stage.sizes
            part = slice(0) if plan is None else plan.part(index)
            if plan is not None and not stage.saved:  # no step has run with it yet
                sizes = plan.nbytes[part]
            for k, (name, nbytes) in enumerate(zip(stage.names, sizes, strict=False), start=part.start or 0):
                saved: dict[str, Any] = {
                    "bytes_saved": nbytes * forwards[index],
                    "bytes_offloaded": nbytes * numbers[k],
                }
                calls = forwards[index], numbers[k], k in recomputed
                groups.append(GroupReport(name, f"stage {index}", *calls, **saved))
        if self._conductor.scoped:
            counts["peak_resident_bytes"] = self._first.peak
        because, times = MEASURING if plan is None else plan.because, self._engine.backend.times
        return Report(tuple(groups), because=because, times=times, **counts)

    def table(self) -> RankReports:
        """Return the reports of all ranks, in every rank; ``print`` shows them as a table.

        A collective: every rank of the pipeline calls it, between two steps.
        """
        return gather_reports(self.report(), self._first.ranks.group)
