"""Compare later passes of a model with the first ones that ran with its plan."""

from __future__ import annotations

from collections import deque
from statistics import median

from ...device.base import Backend
from .lockstep import WINDOW
from .timed_pass import TimedPass

__all__ = ["PATIENCE", "Drift"]

MOVED = 0.10  # change of a cost from which on another plan is looked for
PATIENCE = 64  # passes before a plan is replaced, doubled each time


class Drift:
    """Whether passes cost what they did when their plan was chosen.

    One pass of each `WINDOW` is timed.  Passes are compared by their seconds for each element of the inputs, so that
    inputs of other sizes do not count as a change.
    """

    def __init__(self) -> None:
        self._passes: deque[TimedPass] = deque(maxlen=WINDOW)  # one of each window
        self._pace: float | None = None  # seconds for each element of the inputs when the plan was new
        self._until = 0  # pass up to which the plan is kept
        self._patience = PATIENCE

    def restart(self, number: int) -> None:
        """Compare with passes that come now: pass `number` is the first with another plan."""
        self._passes.clear()
        self._pace = None
        self._until = number + self._patience
        self._patience *= 2

    def times(self, number: int) -> bool:
        """Return whether a pass is timed: one of each window, and all until the first of them has ended."""
        return number % WINDOW == 0 or not self._passes

    def add(self, timed: TimedPass) -> None:
        """Take a pass whose backward has ended."""
        self._passes.append(timed)

    def moved(self, number: int, size: int, backend: Backend) -> bool:
        """Return whether costs have changed, and for some passes already.

        Parameters
        ----------
        number : int
            Of the pass that comes now.
        size : int
            Number of elements of the inputs that the plan is for.
        backend : Backend
            On which the passes ran.
        """
        done = [timed for timed in self._passes if timed.ended and backend.passed(timed.ended)]
        if len(done) < WINDOW:
            return False
        now, sizes = median(timed.pace(backend) for timed in done), sorted(timed.elements for timed in done)
        if self._pace is None:
            self._pace = now
        if number < self._until:
            return False
        settled = sizes[-1] <= sizes[0] * (1 + MOVED)  # else inputs vary, and a plan for some is as good as any
        return (settled and _differ(sizes[0], size)) or _differ(now, self._pace)


def _differ(now: float, before: float) -> bool:
    return abs(now - before) > MOVED * before
