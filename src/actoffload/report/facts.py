"""What is known of whole steps and of the plan, beside what the latest pass shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..schedule.timeline import milliseconds

__all__ = ["StepFacts", "step_time"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What is known beside the latest pass: whole steps with and without offloading, the plan, the arguments.

    Parameters
    ----------
    step_seconds_without, step_seconds_with : float or None
        Median duration of whole steps without offloading and with the present plan; None if not measured.
    measured_steps : (int, int) or None
        The first and the last of the steps that were measured, counted from 1.
    because, next_choice : str
        Why the plan is what it is; what the next better choice is.
    expected : str
        Peak and time of a step that are expected with the plan; empty if they are not known.
    refused : mapping of str to str
        By the name of a group that should be recomputed in backward and is not: why.
    coverage : float or None
        Share of `Report.computed_bytes` that lies in groups, whether it is kept, offloaded or recomputed; None if
        unknown.  What modules in `keep` save does not count.
    arguments : mapping of str to object, or None
        The arguments of `offload`; entries of ``layers`` and ``keep`` are strings, classes and ``...``.
    kept_modules : tuple of str
        Names of the modules in `keep`.
    record : str
        The call that records a step.
    times : bool
        Whether durations are those of a real device; otherwise there is no advice about time.
    """

    step_seconds_without: float | None = None
    step_seconds_with: float | None = None
    measured_steps: tuple[int, int] | None = None
    because: str = ""
    next_choice: str = ""
    expected: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    coverage: float | None = None
    arguments: Mapping[str, Any] | None = None
    kept_modules: tuple[str, ...] = ()
    record: str = "handle.recording()"
    times: bool = True

    @property
    def slowdown(self) -> float | None:
        """Duration of a step divided by that without offloading; None if not measured."""
        if not self.step_seconds_without or self.step_seconds_with is None:
            return None
        return self.step_seconds_with / self.step_seconds_without


def step_time(report: StepFacts) -> str:
    """Return what a step takes with and without offloading, as a clause."""
    with_, without = (milliseconds(s or 0.0, 1) for s in (report.step_seconds_with, report.step_seconds_without))
    steps = report.measured_steps
    measured = "" if steps is None else f" (measured in steps {steps[0]} to {steps[1]})"
    return f"a step takes {with_}, {report.slowdown or 0.0:.3f} x the {without} without offloading{measured}"
