"""The handle that `offload(schedule)` returns: the plan of the rank, what happened, and the end of offloading."""

from __future__ import annotations

from typing import Any

from ..engine.statistics import Statistics
from ..model.handle import OffloadHandle
from ..schedule.pipeline import Step
from ..schedule.pipeline_plan import PipelinePlan
from .exchange import gather
from .follow import is_schedule, observer_of
from .report import PipelineReport, PipelineTable
from .runner import Runner

__all__ = ["PipelineHandle"]


class PipelineHandle:
    """Offloading of the stages of one rank; made by `offload`, ended with `remove` or by leaving its ``with`` block.

    ``print(handle)`` shows the plan of this rank.  The handle may be dropped; offloading lasts as long as the schedule.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @classmethod
    def of(cls, schedule: Any) -> PipelineHandle | None:
        """Return a handle of the schedule that `offload` was called with; None for one that is not offloaded."""
        if not is_schedule(schedule):
            raise TypeError(f"PipelineHandle.of got {schedule!r}; expected the schedule that offload was called with.")
        found = observer_of(schedule)
        return cls(found) if isinstance(found, Runner) and found.installed else None

    def remove(self) -> None:
        """End offloading on this rank and free the host memory; call it on every rank, between two steps.

        A second call does nothing.
        """
        self._runner.remove()

    @property
    def installed(self) -> bool:
        """Whether this handle was not removed."""
        return self._runner.installed

    def __enter__(self) -> PipelineHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    # What was chosen

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan of this rank; None until the first steps are measured."""
        return self._runner.conductor.plan

    @property
    def settling(self) -> bool:
        """Whether steps are still measured, and the plan may change at the begin of the next one.

        It is True until the plans of all ranks are final, so ``while handle.settling: schedule.step(...)`` ends in all
        ranks after the same step.
        """
        return self._runner.settling

    @property
    def order(self) -> tuple[Step, ...]:
        """What this rank computes in a step, as it ran last; before the first step as the schedule says."""
        return self._runner.order()

    @property
    def plans(self) -> tuple[PipelinePlan, ...]:
        """The plans of all ranks, in order; none until the first steps are measured."""
        return self._runner.plans

    @property
    def stages(self) -> dict[int, OffloadHandle]:
        """The handle of each stage of this rank, by the index of the stage."""
        return {stage.index: stage.handle for stage in self._runner.stages}

    def __str__(self) -> str:
        plan = self.plan
        return self._runner.because if plan is None else str(plan)

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        return f"<PipelineHandle of rank {self._runner.rank}, stages {stages}>"

    # What happened

    def statistics(self) -> Statistics:
        """Return counts and bytes of all stages of this rank since `offload` or `reset_statistics` was called.

        On an accelerator they begin anew with each of the first steps, which are measured one by one.
        """
        return self._runner.conductor.engine.statistics()

    def reset_statistics(self) -> None:
        """Reset all counts and sums to zero, and the peaks to what is held now."""
        engine = self._runner.conductor.engine
        with engine.lock:
            engine.counters.reset()

    def report(self) -> PipelineReport:
        """Return what this rank did in the steps since `offload` or `reset_statistics` was called.

        Raises a `RuntimeError` if no step has ended.
        """
        return self._runner.report()

    def table(self) -> PipelineTable:
        """Return the reports of all ranks, in every rank; ``print`` shows them as a table.

        A collective: every rank of the pipeline calls it, between two steps.
        """
        return PipelineTable(tuple(gather(self.report(), self._runner.group)))
