"""What a rank of a pipeline offloaded in its latest step, and the table of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..report.tables import Printable, Table, bytes_or_dash
from ..schedule.timeline import size

__all__ = ["PipelineReport", "PipelineTable"]


@dataclass(frozen=True)
class PipelineReport(Printable):
    """What one rank did in its latest step; ``print`` shows it.

    Parameters
    ----------
    rank : int
        In the pipeline.
    stages : tuple of int
        Its stages.
    chunks, offloaded : int
        Groups of all microbatches of all stages, and those that the plan offloads.
    saved_bytes, offloaded_bytes : int
        What they save in a step, and what the plan offloads of it.
    peak_bytes : int
        Largest number of bytes of saved tensors on the device at a time, in the steps since `offload` or
        `reset_statistics`.  On an accelerator that of the first step with the plan; later steps do not count what is
        kept.
    expected_bytes : int, optional
        The same in the plan; None as long as there is no plan.
    boundary_bytes : int
        Bytes of the outputs that the schedule keeps for one microbatch of each stage, if the stage does not save them.
        They are not offloaded.
    on_demand : int
        Storages that backward needed before the plan had reloaded them.
    host_bytes : int
        Page-locked host memory.
    because : str
        Why this plan, or that there is none yet.
    """

    rank: int
    stages: tuple[int, ...]
    chunks: int
    offloaded: int
    saved_bytes: int
    offloaded_bytes: int
    peak_bytes: int
    expected_bytes: int | None
    boundary_bytes: int
    on_demand: int
    host_bytes: int
    because: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return {**vars(self), "stages": list(self.stages)}

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        late = f"{self.on_demand} storages were reloaded when backward needed them: compute waited."
        kept = f"The schedule keeps {size(self.boundary_bytes)} of outputs on the device for each microbatch in flight."
        sentences = self.because, late if self.on_demand else "", kept if self.boundary_bytes else ""
        return _table([self]), list(filter(None, sentences))


@dataclass(frozen=True)
class PipelineTable(Printable):
    """The reports of all ranks of a pipeline; ``print`` gives a line for each."""

    reports: tuple[PipelineReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return ``"ranks"``, a list with the report of each rank, for JSON."""
        return {"ranks": [report.to_dict() for report in self.reports]}

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        return _table(self.reports), ()


def _table(reports: Sequence[PipelineReport]) -> list[Table]:
    header = ("rank", "stages", "offload", "offloaded", "kept", "peak", "peak in plan", "host memory")
    rows = [
        (
            str(report.rank),
            ", ".join(map(str, report.stages)),
            f"{report.offloaded} of {report.chunks}",
            bytes_or_dash(report.offloaded_bytes),
            bytes_or_dash(report.saved_bytes - report.offloaded_bytes),
            bytes_or_dash(report.peak_bytes),
            "-" if report.expected_bytes is None else bytes_or_dash(report.expected_bytes),
            bytes_or_dash(report.host_bytes),
        )
        for report in reports
    ]
    note = "Bytes of a step; peaks are of saved tensors. A group of one microbatch counts once in 'offload'."
    return [Table(header, tuple(rows), left=3, note=note)]
