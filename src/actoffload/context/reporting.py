"""What the passes of a context did, for its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..engine.engine import Engine
from ..engine.passes import Pass
from ..engine.statistics import TimelineRecorder
from ..report.build import PassHistory, PassStatistics, build
from ..report.groups import Holder
from ..report.holders import find_all_holders
from ..report.report import Report
from ..report.step_timeline import StepTimeline

__all__ = ["PassLog"]

UNPLANNED = "nothing is planned, and the program calls for each transfer"


class PassLog:
    """The latest pass of a context whose backward has begun, and the recorded step.  It does not reference passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._history = PassHistory()
        self._number = self._latest = 0  # of the passes that began; of the one to report
        self._statistics: PassStatistics | None = None  # of that
        self._recorder: TimelineRecorder | None = None
        self._recorded = 0  # passes in the recorded step
        self._holders: dict[int, tuple[Holder, ...]] | None = None

    def begin(self, current: Pass) -> None:
        """Follow a pass that begins."""
        self._number = number = self._number + 1
        self._history.add(current)

        def forward_ended(done: Pass) -> None:
            statistics = replace(PassStatistics.of(done), waiting=self._history.waiting(done))
            # Several passes may be in one backward.
            if self._history.is_full(statistics) and self._latest <= number:
                self._latest, self._statistics, recorder = number, statistics, self._engine.recorder
                self._holders = None
                if recorder is not None:
                    with recorder.apart():
                        self._holders = find_all_holders([held.address for held in statistics.held])

        current.forward_ended = forward_ended

    def reset(self) -> None:
        """Compare the passes from here on with each other, and not with earlier ones."""
        self._history.reset()

    @contextmanager
    def recording(self, recorder: TimelineRecorder) -> Iterator[None]:
        """Keep the recorder of a step for the report."""
        before = self._number
        yield
        self._recorder, self._recorded = recorder, self._number - before

    def report(self) -> Report:
        """Return the report of the latest pass that is no smaller one."""
        if self._statistics is None:
            raise RuntimeError(
                "There is nothing to report yet: no backward has begun in this context. Run a training step first."
            )
        names = [f"layer {layer.index}" for layer, _ in self._statistics.groups]
        engine, recorder = self._engine, self._recorder
        arguments = dict[str, Any](max_host_bytes=engine.max_host_bytes)
        if engine.roles.planned:
            arguments["num_layers"] = len(engine.plan.offloaded)
        return build(
            names,
            ["layer"] * len(names),
            self._statistics,
            engine.statistics(),
            recorded=None if recorder is None else StepTimeline(recorder.timeline(), names),
            holders=self._holders,
            arguments=arguments,
            because="" if engine.roles.planned else UNPLANNED,
            record="context.record_timeline()",
            step_passes=self._recorded,
        )
