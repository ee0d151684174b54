"""Which plans are tried one after the other, for a model and for all ranks of a pipeline.

`[Note: trials of plans]`  The first passes measure groups and copies, each for itself.  Whether a whole pass takes as
long as was simulated, and no more memory, is known only when it has run.  So a plan is tried.  If it takes more memory
than its limit, one for as much less is tried.  Last, every group is replayed as a whole, as activation checkpointing
would do it, and the faster of the two is kept: no predicted time counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .._text import size

__all__ = ["Trial", "fits", "try_plans"]

TRIES = 3  # plans of a kind that are tried because those before took more than the limit

P = TypeVar("P")
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Trial(Generic[P]):
    """A plan that has run."""

    plan: P
    seconds: float  # of a whole pass or step
    over: float = 0.0  # bytes by which it exceeded its limit


T = TypeVar("T", bound=Trial[Any])


def try_plans(
    plan: P | None,
    run: Callable[[P], Generator[Asked, Answer, T]],
    smaller: Callable[[Sequence[T]], P | None],
    best: T | None = None,
) -> Generator[Asked, Answer, T | None]:
    """Run a plan, and smaller ones as long as the limit is exceeded; return the best trial.

    Parameters
    ----------
    plan : plan, optional
        The first one; None for no plan.
    run : callable
        Returns a generator of passes with a plan, which returns their trial.
    smaller : callable
        From the trials so far to the next plan; None if there is no other.
    best : Trial, optional
        Of other plans.  If it is faster, no smaller plan follows.
    """
    trials = list[T]()
    before = best
    while plan is not None:
        trials.append((yield from run(plan)))
        trial = trials[-1]
        # The limit comes first; where two exceed it alike, or none does, the faster is better.
        better = best is None or (trial.over, trial.seconds) < (best.over, best.seconds)
        best = trial if better else best
        slower = before is not None and not before.over and trial.seconds >= before.seconds
        plan = None if not trial.over or slower or len(trials) == TRIES else smaller(trials)
    return best


def fits(peak: int, limit: int | None) -> str:
    """Return why a plan keeps everything."""
    if limit is None:
        return "Nothing is offloaded: the memory of the device is not known."
    return f"Fits: {size(peak)} of {size(limit)}; nothing to do."
