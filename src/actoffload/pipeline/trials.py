"""Try the plans of a pipeline, and plan anew where a step takes longer than planned.

`[Note: trials of plans]`  The first steps measure groups and copies, each for itself.  Whether a whole step takes as
long as was simulated for them is known only when it has run.  So each plan is tried.  If a step takes longer than
expected, all ranks plan again as if copies took longer.  If plans that should cost nothing cost time all the same,
nothing is offloaded in the end.  Where memory or the arguments ask for a cost, the fastest plan of those tried is kept.
Every rank decides from the same numbers, and so the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..schedule.pipeline_plan import PipelinePlan
from ..schedule.timeline import milliseconds
from .exchange import Measured, Tried
from .planning import FREE, Limits, plans_of

__all__ = ["Plans", "Trials"]

TRIES = 4
"""Plans that are tried at most."""

SLOWER, SLOWEST = 1.25, 4.0
"""Factor of the time of copies with each further plan, and the largest one."""


@dataclass(frozen=True)
class Plans:
    """The plans of all ranks, and the bytes of saved tensors that each has on its device at a time."""

    of_ranks: tuple[PipelinePlan, ...]
    peaks: Sequence[int]

    @property
    def actions(self) -> list[object]:
        """What they do."""
        return [(plan.transfers, plan.saves) for plan in self.of_ranks]

    @property
    def does_something(self) -> bool:
        """Whether a rank offloads or recomputes anything."""
        return any(plan.transfers or plan.saves for plan in self.of_ranks)

    @property
    def expected(self) -> float:
        """Time of a step over that of one without offloading, as simulated."""
        times = [(plan.seconds, plan.baseline_seconds) for plan in self.of_ranks]
        return max(seconds / without if seconds and without else 1.0 for seconds, without in times)

    @property
    def seconds(self) -> float:
        """Time of a step, as simulated."""
        return max(plan.seconds or 0.0 for plan in self.of_ranks)

    def taking(self, seconds: float | None) -> Plans:
        """Return the same plans, of steps that take as long as was measured without offloading, if it was."""
        if seconds is None:
            return self
        measured = (replace(plan, seconds=seconds, baseline_seconds=seconds) for plan in self.of_ranks)
        return replace(self, of_ranks=tuple(measured))

    def saying(self, because: str) -> Plans:
        """Return the same plans with a further reason."""
        plans = (replace(plan, because=f"{plan.because} {because}".strip()) for plan in self.of_ranks)
        return replace(self, of_ranks=tuple(plans))


@dataclass(frozen=True)
class _Trial:
    """A step with plans and, where all ranks have room, one without offloading, in seconds of the slowest rank."""

    plans: Plans
    seconds: float
    without: float | None

    @property
    def is_as_planned(self) -> bool:
        """Whether the step took no longer than expected."""
        if self.without is None:
            return self.seconds <= self.plans.seconds * (1 + FREE)
        return self.seconds <= (self.plans.expected + FREE) * self.without

    def __str__(self) -> str:
        if self.without is None:
            return f"a step took {milliseconds(self.seconds)}, planned were {milliseconds(self.plans.seconds)}"
        return f"a step took {milliseconds(self.seconds)}, without offloading {milliseconds(self.without)}"


class Trials:
    """The plans of a pipeline, one after the other until one is kept.

    Parameters
    ----------
    measured : sequence of Measured
        Of all ranks.
    limits : Limits
        What the arguments allow.

    Attributes
    ----------
    plans : Plans
        Those to try next, or to keep if trials have ended.
    ended : bool
        Whether they have.
    """

    def __init__(self, measured: Sequence[Measured], limits: Limits) -> None:
        self._measured, self._limits, self._slower = measured, limits, 1.0
        self._done: list[_Trial] = []
        self.plans = Plans(*plans_of(measured, limits))
        self.ended = not self.plans.does_something

    def add(self, tried: Sequence[Tried]) -> None:
        """Take what the trial of `plans` showed on all ranks."""
        without = max((of.without for of in tried if of.without is not None), default=None)
        self._done.append(now := _Trial(self.plans, max(of.seconds for of in tried), without))
        if now.is_as_planned:
            self.ended = True
            if now is not self._done[0]:
                self.plans = self.plans.saying(f"With more offloaded {self._done[0]}.")
            return
        further = self._further() if len(self._done) < TRIES else None
        self.ended = further is None
        self.plans = self._best() if further is None else further

    def _further(self) -> Plans | None:
        """Return other plans, for slower copies; None if they do nothing any more."""
        while self._slower < SLOWEST:
            self._slower *= SLOWER
            plans = Plans(*plans_of(self._measured, self._limits, self._slower))
            if not plans.does_something:
                return None
            if plans.actions != self.plans.actions:
                return plans
        return None

    def _best(self) -> Plans:
        """Return what to keep if no plan takes as long as expected."""
        first, limits = self._done[0], self._limits
        given = (
            limits.memory_budget is not None or limits.fraction is not None or limits.delta_bytes_per_rank is not None
        )
        nothing = Plans(*plans_of(self._measured, replace(limits, fraction=0.0)))
        if not given and not nothing.does_something:
            because = f"Nothing is offloaded, because {first}, although copies should have taken no time."
            return nothing.taking(first.without).saying(because)
        best = min(self._done, key=lambda trial: trial.seconds)
        tried = "With this plan" if len(self._done) == 1 else f"With this plan, the fastest of {len(self._done)},"
        return best.plans.saying(f"{tried} {best}.")
