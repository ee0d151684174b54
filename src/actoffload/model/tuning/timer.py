"""Time one pass of a model at a time."""

from __future__ import annotations

import threading
from typing import Any

from ...engine.engine import Engine
from ...engine.layer import tensors_in
from ..operator_costs import OperatorTimes
from .metering import Meter
from .stages import BY_GROUP
from .timed_pass import Stage, TimedPass

__all__ = ["PassTimer"]


class PassTimer:
    """Times the passes of a model, and has the one in progress, or the latest.

    Parameters
    ----------
    engine : Engine
        Of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._current: TimedPass | None = None
        self._thread = 0  # that runs its forward

    def begin(self, stage: Stage, number: int, elements: int, *, memory: bool = False) -> TimedPass:
        """Begin a pass, which is measured by group if its stage needs that; `memory`: its peak is read."""
        backend = self._engine.backend
        self._thread = threading.get_ident()
        timed = self._current = TimedPass.begin(stage, number, elements, backend, memory=memory)
        if stage in BY_GROUP:
            levels = stage not in (Stage.BARE, Stage.BARE_AGAIN)
            timed.meter = Meter(backend, self._engine.counters, memory=levels)
            self._engine.record(timed.meter)
        if stage is Stage.FIRST_AGAIN:
            timed.operators = OperatorTimes(backend)
        return timed

    def of_thread(self) -> TimedPass | None:
        """Return the pass whose forward the calling thread runs; None if it is not timed."""
        return self._current if self._thread == threading.get_ident() else None

    def forward_ends(self, output: Any) -> None:
        """Time the pass until the end of its backward."""
        timed = self.of_thread()
        if timed is not None:
            timed.watch(self._engine.backend, tensors_in(output))

    def take(self) -> TimedPass | None:
        """Return the pass, which is over, and forget it; None if a step was recorded in the middle of it."""
        timed, recorder = self._current, self._engine.recorder
        self.drop()
        return None if timed is not None and timed.meter is not None and timed.meter is not recorder else timed

    def drop(self) -> None:
        """Forget the pass, and read none of its events."""
        if isinstance(self._engine.recorder, Meter):
            self._engine.record(None)
        self._current = None
