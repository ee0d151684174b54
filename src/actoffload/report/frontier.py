"""Time against peak memory for the plans of a model, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..planner import GroupPlan
from ..schedule.timeline import mebibytes, milliseconds
from .plots import plot_frontier
from .tables import Printable, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Frontier"]


@dataclass(frozen=True)
class Frontier(Printable):
    """The plans that are worth having: each is expected to be faster than all with a smaller peak.

    ``print`` gives a table; a notebook shows it.

    Parameters
    ----------
    plans : tuple of GroupPlan
        From the smallest peak on.
    present : GroupPlan
        The plan that is used.
    """

    plans: tuple[GroupPlan, ...]
    present: GroupPlan

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        rows = [self._row(plan, "") for plan in self.plans]
        rows.append(self._row(self.present, "present plan"))
        header = "", "peak", "forward and backward", "x no offload", "offloaded", "recomputed"
        return [Table(header, tuple(rows), left=1)], []

    @staticmethod
    def _row(plan: GroupPlan, name: str) -> tuple[str, ...]:
        seconds, baseline = plan.seconds, plan.baseline_seconds
        return (
            name,
            "-" if plan.peak_bytes is None else mebibytes(plan.peak_bytes),
            "-" if seconds is None else milliseconds(seconds),
            "-" if seconds is None or not baseline else f"{seconds / baseline:.3f}",
            mebibytes(plan.offloaded_bytes),
            mebibytes(sum(plan.recomputed_nbytes)),
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw time against peak, with the present plan marked; needs matplotlib.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default.  It is returned.
        """
        return plot_frontier(self.plans, self.present, ax)

    def figure(self) -> Figure:
        """Return a new figure with what `plot` draws."""
        return self.plot().figure  # type: ignore[return-value]  # a figure of its own is no SubFigure
