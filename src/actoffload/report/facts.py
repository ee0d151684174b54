"""What is known of whole passes, of the plan and of the arguments, beside what the latest pass shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..schedule.timeline import milliseconds

__all__ = ["StepFacts", "pass_time"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What is known beside the latest pass: whole passes with and without offloading, the plan, the arguments.

    Parameters
    ----------
    pass_seconds_without, pass_seconds_with : float or None
        Median duration of whole passes without offloading and with the present plan; None if not measured.
    measured_passes : (int, int) or None
        The first and the last of the passes that were measured, counted from 1.
    because, next_choice : str
        Why the plan is what it is; what the next better choice is.
    expected : str
        Peak and time of a pass that are expected with the plan; empty if they are not known.
    refused : mapping of str to str
        By the name of a group that should be recomputed in backward and is not: why.
    proven_bytes, samples : int
        Bytes that were computed again and compared in all bits, in first calls; values of which samples were compared
        in later ones, without a difference.
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

    pass_seconds_without: float | None = None
    pass_seconds_with: float | None = None
    measured_passes: tuple[int, int] | None = None
    because: str = ""
    next_choice: str = ""
    expected: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    proven_bytes: int = 0
    samples: int = 0
    coverage: float | None = None
    arguments: Mapping[str, Any] | None = None
    kept_modules: tuple[str, ...] = ()
    record: str = "handle.recording()"
    times: bool = True

    @property
    def slowdown(self) -> float | None:
        """Duration of a pass divided by that without offloading; None if not measured."""
        if not self.pass_seconds_without or self.pass_seconds_with is None:
            return None
        return self.pass_seconds_with / self.pass_seconds_without

    def given(self, argument: str) -> Any:
        """Return an argument of `offload`; None if the arguments are not known."""
        return None if self.arguments is None else self.arguments.get(argument)

    def takes(self, argument: str) -> bool:
        """Whether what made the report takes an argument; all do if that is not known."""
        return self.arguments is None or argument in self.arguments


def pass_time(report: StepFacts) -> str:
    """Return what a pass takes with and without offloading, as a clause."""
    with_, without = (milliseconds(s or 0.0, 1) for s in (report.pass_seconds_with, report.pass_seconds_without))
    passes = report.measured_passes
    measured = "" if passes is None else f" (measured in passes {passes[0]} to {passes[1]})"
    return f"a pass takes {with_}, {report.slowdown or 0.0:.3f} x the {without} without offloading{measured}"
