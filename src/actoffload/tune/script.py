"""The first passes of a model, or the first steps of a pipeline: measure two, and keep the fastest plans that fit.

`[Note: the first passes]`  Nothing is known before the first pass, and it must fit where any plan does.  So it is the
leanest there is: every group is replayed in backward, and what it needs for that is offloaded.  It traces and proves
the groups and times their operators.  The next pass runs in the same way without proofs, and is measured by group:
bytes, times, and the rates of copies with all ranks copying.  Events would measure a host that is slower than the
device, so the device is kept busy before each group while the host queues it.  From both passes follows what each group
costs in every other way.  A compiled group has no operators to time: it runs again as a whole, and what it would save
otherwise is counted where it is dropped.  Then the planner chooses the fastest plan that fits, and it is tried.

`[Note: trials of plans]`  Groups and copies are measured each for itself.  Whether a whole pass takes as long as was
simulated, and no more memory, is known only when it has run.  If the first plan takes longer, it runs once more, as it
takes memory from the system and the host may pause in any pass, and the faster counts.  If a plan takes more memory
than its limit, one for as much less is tried.  Last, one pass replays every group as a whole, as checkpointing does.
That is kept if it is faster by `SCATTER`: the device has more to do there and the host less, and it is the time of the
host that varies.  It is left out where the device alone took as long in the leanest pass, which replays all.  So where
the first pass traces all groups, and not two plans in a row exceed the limit, five passes do: two, and three trials.

`[Note: ranks decide together]`  The ranks of a sharded or data-parallel model, and those of a pipeline, wait for each
other.  If each decided by itself, one would replay everything while another times its plan.  So all ranks run the same
script: each gathers from all what a pass has shown, and decides by nothing else.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, TypeVar

from .._text import milliseconds, register, size
from ..schedule.plan import Plan
from .exchange import Ranks
from .meter import Shown, TimedPass

TRACES = 2  # passes in which groups are traced
FULL = 0.9  # part of the most elements of inputs so far, with which a pass counts
PATIENCE = 6  # passes that are run until one counts
MISSED = 4  # passes in a row that do not count: cannot be timed, or may not fit with the plan that is tried
LONGER = 0.05  # part of the simulated time by which a pass takes longer that is timed once more
TRIES = 3  # plans of a kind that are tried because those before took more than the limit
SCATTER = 0.03  # part of its time by which whole replay is faster where it is kept

RECOMPUTING = "Recomputing every group, about what checkpointing does,"

T = TypeVar("T")
Plans = tuple[Plan, ...]


class Stage(enum.Enum):
    """What a pass of a model, or a step of a pipeline, is for."""

    FIRST = "everything is replayed and offloaded: groups are traced and proven, and their operators timed"
    LEAN = "everything is replayed and offloaded, measured by group"
    PLAN = "the plan, timed"


register(Shown)


class OutdatedError(Exception):
    """What was measured does not hold any more."""


@dataclass(frozen=True)
class Trial:
    """Plans that have run: the one of a model, or those of all ranks of a pipeline."""

    plans: Plans
    seconds: float  # of a whole pass or step
    peaks: Sequence[int]  # bytes of device memory for each plan; 0 if not known
    limits: Sequence[float]  # of these
    refused: bool = False  # there was less host memory than planned

    @property
    def excess(self) -> list[int]:
        """Bytes by which each plan took more than was predicted."""
        return [max(peak - (plan.peak_bytes or 0), 0) for peak, plan in zip(self.peaks, self.plans, strict=True)]

    @property
    def over(self) -> float:
        """Bytes by which one exceeded its limit, or its prediction if that is more."""
        each = zip(self.peaks, self.limits, self.plans, strict=True)
        return max(int(self.refused), *(peak - max(limit, plan.peak_bytes or 0) for peak, limit, plan in each))

    @property
    def idle(self) -> bool:
        """Whether everything is kept."""
        return all(plan.idle for plan in self.plans)


Steps: TypeAlias = Generator[Stage, None, T]


class Script(ABC):
    """What the first passes are for; classes for models and pipelines say what is measured, and how plans follow."""

    unit = "pass"
    times = True  # time is measured
    size = 0  # elements of the inputs that the plan is for
    missed = 0  # passes in a row that did not count, the same in all ranks
    untried = ""  # why whole replay is not tried, in a sentence
    limits: Sequence[float] = ()  # bytes of device memory for each plan; without them none is tried
    _most = 0  # elements of inputs so far

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.timed: TimedPass | None = None  # the pass that has ended, or the present step; None if it is not measured

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order: of one copy of a pipeline after the other."""
        return [each for copy in self.ranks.gather(value) for each in copy]

    @abstractmethod
    def shown(self, timed: TimedPass) -> Shown | None:
        """Return what a pass showed here; None if that cannot be used."""

    @abstractmethod
    def traced(self, traced: Sequence[TimedPass]) -> bool:
        """Return whether the operators of all groups are known that may be replayed."""

    @abstractmethod
    def planned(self, traced: Sequence[TimedPass], lean: TimedPass) -> Plans:
        """Return the plans that follow from what was measured, and set the limits of them."""

    @abstractmethod
    def replanned(self, excess: Sequence[int], best: Trial | None) -> Plans:
        """Return plans that leave `excess` bytes free, which count in their peaks; whole replay after the `best`."""

    @abstractmethod
    def follow(self, plans: Plans) -> None:
        """Follow plans from the pass on that begins now."""

    def fits(self) -> bool:
        """Return whether the pass that begins now fits with the plan that is tried."""
        return True

    def took(self, trial: Trial) -> None:  # noqa: B027
        """Note what plans without whole replay took."""

    # The passes

    def run(self) -> Steps[Plans]:
        """Yield what each pass is for, and return the plans to keep; see [Note: the first passes].

        Raises an `OutdatedError` if everything has to be measured anew.
        """
        traced, known = list[TimedPass](), False
        while not known and len(traced) < TRACES:
            traced.append((yield from self._pass(Stage.FIRST))[0])
            known = all(self.gather(self.traced(traced)))
        lean = traced[-1]
        if self.times:
            lean = (yield from self._pass(Stage.LEAN))[0]
            lean.wait()
        plans = self.planned(traced, lean)
        return (yield from self.keep_best(plans)) if self.limits else plans

    def _pass(self, stage: Stage) -> Steps[tuple[TimedPass, list[Shown]]]:
        """Yield a stage until a pass of it counts, and return that pass, and what it showed in all ranks.

        It has to call groups: the model may take another branch at times.  The plan is for the largest inputs: the last
        batch of an epoch is often smaller.  Where inputs are larger than all before, groups are traced and proven
        again, which takes time.  After some passes the largest counts.
        """
        passes = list[tuple[TimedPass, list[Shown]]]()
        while len(passes) < PATIENCE:
            fits = stage is not Stage.PLAN or all(self.gather(self.fits()))
            if not fits and self.missed >= MISSED:
                raise OutdatedError  # [guard: first steps that are outdated]
            self.missed += 1
            yield stage if fits else Stage.FIRST  # which replays and offloads everything
            if not fits:
                continue
            timed, self.timed = self.timed, None
            shown = self.gather(None if timed is None else self.shown(timed))
            known = [each for each in shown if each is not None]
            if timed is None or len(known) < len(shown):
                continue
            passes.append((timed, known))
            self.missed, before, elements = 0, self._most, _elements(known)
            self._most = max(before, elements)
            # [guard: inputs that are smaller than before, or larger -> True]
            alike = FULL * self._most <= elements <= before / FULL
            # [guard: passes that call no group -> True]
            if stage is Stage.FIRST or (alike and all(each.ran for each in known)):
                return passes[-1]
        found = max(passes, key=lambda each: (all(shown.ran for shown in each[1]), _elements(each[1])))
        self._most = _elements(found[1])  # those that are larger still are rare
        return found

    # Trials

    def _try(self, plans: Plans, once: bool) -> Steps[Trial]:
        """Run a pass with some plans, or two where it is slow, unless `once` does; see [Note: trials of plans]."""
        self.follow(plans)
        passes = [(yield from self._pass(Stage.PLAN))[1]]
        trial = self._trial(plans, passes)
        longest = (1 + LONGER) * max(plan.seconds or inf for plan in plans)
        if once or trial.over or trial.seconds <= longest:  # [guard: passes in which the host paused -> True]
            return trial
        return self._trial(plans, [*passes, (yield from self._pass(Stage.PLAN))[1]])

    def _trial(self, plans: Plans, passes: Sequence[Sequence[Shown]]) -> Trial:
        """Return what all passes with some plans took, and how long the fastest."""
        count, refused = len(plans), any(each.refused for each in passes[0])
        peaks = [max(each.peak for shown in passes for each in shown[k::count]) for k in range(count)]
        peaks = [0 if plan.peak_bytes is None else peak for plan, peak in zip(plans, peaks, strict=True)]
        return Trial(plans, min(map(self._seconds, passes)), peaks, self.limits, refused)

    def _seconds(self, shown: Sequence[Shown]) -> float:
        """Return the seconds of a pass as with inputs of the size that the plan is for."""
        seconds = max(each.seconds for each in shown)
        return max(seconds / max(_elements(shown), 1) * max(self.size, 1), 1e-9)

    def keep_best(self, plans: Plans) -> Steps[Plans]:
        """Try plans, and others that follow, and return the best; see [Note: trials of plans]."""
        best, _ = yield from self._fitted(plans, None)
        kept, whole = best, None
        if not best.idle:
            kept, whole = yield from self._fitted(self.replanned([0] * len(plans), best), best)
        because = self.untried
        if kept is not best:
            took = f"a {self.unit} takes {milliseconds(kept.seconds)}, with another plan {milliseconds(best.seconds)}"
            because = f"Every group is recomputed: {took}."
        elif whole is not None and not whole.over:
            because = f"{RECOMPUTING} takes {milliseconds(whole.seconds)} a {self.unit}."
        return tuple(self._described(best, kept, k, because) for k in range(len(plans)))

    def _fitted(self, plans: Plans, before: Trial | None) -> Steps[tuple[Trial, Trial | None]]:
        """Try plans, and smaller ones as long as the limit is exceeded; return the best trial, and the latest.

        With the best trial `before`, the plans are those of whole replay.
        """
        best, trial, excess = before, None, [0] * len(plans)
        known = [] if best is None else [[plan.work for plan in best.plans]]
        for _ in range(TRIES):
            work = [plan.work for plan in plans]
            if not plans or work in known:
                break
            known.append(work)
            trial = yield from self._try(plans, best is not None)
            excess = list(map(sum, zip(excess, trial.excess, strict=True)))
            if before is None:
                self.took(trial)
            # The limit comes first; where two exceed it alike, or none does, the faster is better.
            seconds = trial.seconds if before is None else (1 + SCATTER) * trial.seconds
            best = trial if best is None or (trial.over, seconds) < (best.over, best.seconds) else best
            if not trial.over or (before is not None and not before.over and seconds >= before.seconds):
                break
            plans = self.replanned(excess, before)
        assert best is not None
        return best, trial

    def _described(self, best: Trial, kept: Trial, number: int, because: str) -> Plan:
        """Return one of the plans to keep, with what was measured of it; others are expected to differ as much."""
        expected, plan = max(plan.seconds or 0.0 for plan in best.plans), best.plans[number]
        pace = best.seconds / expected if expected else 1.0
        # The pass without offloading takes no more than is left without recomputation.
        left = max(kept.seconds - getattr(kept.plans[number], "recompute_seconds", 0.0), 0.0)
        baseline = min(pace * (plan.baseline_seconds or 0.0), left)
        peak, limit = kept.peaks[number] or kept.plans[number].peak_bytes or 0, kept.limits[number]
        reason = (
            fits(peak, int(limit))
            if best.idle and plan.because and peak <= limit < inf
            else f"{plan.because} {because}".strip()
        )
        return replace(
            kept.plans[number],
            seconds=kept.seconds,
            baseline_seconds=best.seconds if best.idle else baseline,
            peak_bytes=peak,
            because=reason,
        )


def _elements(shown: Sequence[Shown]) -> int:
    """Return the elements of the inputs in the rank that has most: the others wait for it."""
    return max(each.elements for each in shown)


def fits(peak: int, limit: int | None) -> str:
    """Return why a plan keeps everything."""
    if limit is None:
        return "Nothing is offloaded: the memory of the device is not known."
    return f"Fits: {size(peak)} of {size(limit)}; nothing to do."
