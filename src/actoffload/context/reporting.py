"""What the passes of a context did, for its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..engine.engine import Engine
from ..engine.passes import Pass
from ..engine.statistics import TimelineRecorder
from ..report.build import PassHistory, PassStatistics, build
from ..report.groups import Holder, StepFacts
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
        self._number = 0  # of passes
        self._latest: tuple[int, PassStatistics] | None = None  # the number of a pass
        self._recorder: TimelineRecorder | None = None
        self._recorded = 0, 0  # passes before the recorded step and after it
        self._holders: dict[int, tuple[Holder, ...]] | None = None

    def begin(self, current: Pass) -> None:
        """Follow a pass that begins."""
        self._number = number = self._number + 1
        self._history.add(current)

        def forward_ended(done: Pass) -> None:
            if self._latest is None or self._latest[0] <= number:  # several passes may be in one backward
                self._latest = number, self._history.before(done, PassStatistics.of(done))
                self._history.note(self._latest[1])
                self._find_holders(self._latest[1])

        current.forward_ended = forward_ended

    def reset(self) -> None:
        """Compare the passes from here on with each other, and not with earlier ones."""
        self._history.reset()

    def _find_holders(self, latest: PassStatistics) -> None:
        recorder, self._holders = self._engine.recorder, None
        if recorder is not None:
            with recorder.apart():
                self._holders = find_all_holders([held.address for held in latest.held]) if latest.held else {}

    @contextmanager
    def recording(self, recorder: TimelineRecorder) -> Iterator[None]:
        """Keep the recorder of a step for the report."""
        before = self._number
        yield
        self._recorder, self._recorded = recorder, (before, self._number)

    def report(self) -> Report:
        """Return the report of the latest pass."""
        if self._latest is None:
            raise RuntimeError(
                "There is nothing to report yet: no backward has begun in this context. Run a training step first."
            )
        _, latest = self._latest
        names = [f"layer {layer.index}" for layer, _ in latest.groups]
        recorder, (before, after) = self._recorder, self._recorded
        engine, arguments = self._engine, dict[str, Any](max_host_bytes=self._engine.max_host_bytes)
        if engine.roles.planned:
            arguments["num_layers"] = len(engine.plan.offloaded)
        return build(
            names,
            ["layer"] * len(names),
            latest,
            engine.statistics(),
            recorded=None if recorder is None else StepTimeline(recorder.timeline(), names),
            holders=self._holders,
            facts=StepFacts(
                arguments=arguments,
                because="" if engine.roles.planned else UNPLANNED,
                record="context.record_timeline()",
            ),
            num_layers=arguments.get("num_layers"),
            largest_bytes=self._history.largest(latest),
            step_passes=after - before,
        )
