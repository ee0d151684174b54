"""What a rank of a pipeline offloaded in its latest step, and the table of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
        return asdict(self)

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        sentences = [self.because] if self.because else []
        if self.on_demand:
            sentences.append(f"{self.on_demand} storages were reloaded when backward needed them: compute waited.")
        if self.boundary_bytes:
            kept = size(self.boundary_bytes)
            sentences.append(
                f"The schedule keeps {kept} of outputs for each microbatch in flight, which are not saved."
            )
        return _table([self]), sentences


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
            str(of.rank),
            ", ".join(map(str, of.stages)),
            f"{of.offloaded} of {of.chunks}",
            bytes_or_dash(of.offloaded_bytes),
            bytes_or_dash(of.saved_bytes - of.offloaded_bytes),
            bytes_or_dash(of.peak_bytes),
            "-" if of.expected_bytes is None else bytes_or_dash(of.expected_bytes),
            bytes_or_dash(of.host_bytes),
        )
        for of in reports
    ]
    note = "Bytes of a step; peaks are of saved tensors. A group of one microbatch counts once in 'offload'."
    return [Table(header, tuple(rows), left=3, note=note)]
