"""Which plans are tried one after the other, for a model and for all ranks of a pipeline.

`[Note: trials of plans]`  The first passes measure groups and copies, each for itself.  Whether a whole pass takes as
long as was simulated, and no more memory, is known only when it has run.  So a plan is tried.  If it takes more memory
than its limit, one for as much less is tried.  Last, every group is replayed as a whole, as activation checkpointing
would do it: no predicted time counts there.  A model leaves that out where its groups alone took longer in the leanest
pass, which replays all of them.  Whole replay is kept if it is faster by `SCATTER`: the device has more to do there and
the host less, and it is the time of the host that varies from pass to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .._text import milliseconds, size
from ..schedule.plan import AnyPlan

TRIES = 3  # plans of a kind that are tried because those before took more than the limit
SCATTER = 0.03  # part of its time by which whole replay is faster where it is kept

P = TypeVar("P", bound=AnyPlan)
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Trial(Generic[P]):
    """Plans that have run: the one of a model, or those of all ranks of a pipeline."""

    plans: tuple[P, ...]
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


def keep_best(
    plans: tuple[P, ...],
    run: Callable[[tuple[P, ...], bool], Generator[Asked, Answer, Trial[P]]],
    replanned: Callable[[Sequence[int], Trial[P] | None], tuple[P, ...]],
    unit: str,
) -> Generator[Asked, Answer, tuple[Trial[P], Trial[P], str]]:
    """Try plans as [Note: trials of plans] says; return the best trial without whole replay, and the best of all.

    Also return how long both took in a `unit`, in a sentence; empty if whole replay was not tried, or does not fit.

    `run` returns a generator of passes with plans, which returns their trial; its flag says whether it is whole replay.
    `replanned` is given the bytes by which each plan has to take less, and returns other plans, or none; after the
    trial of the best ones those with whole replay.
    """

    def follow(
        plans: tuple[P, ...], best: Trial[P] | None, trials: list[Trial[P]]
    ) -> Generator[Asked, Answer, Trial[P] | None]:
        """Run plans, and smaller ones as long as the limit is exceeded and no better ones are known."""
        before = best
        known = [] if best is None else [[plan.work for plan in best.plans]]
        while plans and [plan.work for plan in plans] not in known:
            trial = yield from run(plans, before is not None)
            trials.append(trial)
            known.append([plan.work for plan in plans])
            # The limit comes first; where two exceed it alike, or none does, the faster is better.
            seconds = trial.seconds if before is None else (1 + SCATTER) * trial.seconds
            better = best is None or (trial.over, seconds) < (best.over, best.seconds)
            best = trial if better else best
            slower = before is not None and not before.over and seconds >= before.seconds
            if not trial.over or slower or len(trials) == TRIES:
                break
            plans = replanned([max(each) for each in zip(*(trial.excess for trial in trials), strict=True)], before)
        return best

    whole = list[Trial[P]]()
    best = yield from follow(plans, None, [])
    assert best is not None
    if all(plan.idle for plan in best.plans):
        return best, best, ""
    kept = (yield from follow(replanned([0] * len(plans), best), best, whole)) or best
    if kept is not best:
        took = f"a {unit} takes {milliseconds(kept.seconds)}, with another plan {milliseconds(best.seconds)}"
        return best, kept, f"Every group is recomputed: {took}."
    took = f"{milliseconds(whole[-1].seconds)} a {unit}" if whole and not whole[-1].over else ""
    return best, kept, f"Recomputing every group, about what checkpointing does, takes {took}." * bool(took)


def fits(peak: int, limit: int | None) -> str:
    """Return why a plan keeps everything."""
    if limit is None:
        return "Nothing is offloaded: the memory of the device is not known."
    return f"Fits: {size(peak)} of {size(limit)}; nothing to do."
