"""The reports of all ranks as a table: of a model by rank and kind of group, of a pipeline by rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .._folding import fold, fold_names
from .._tables import Bytes, Cell, Printable, Table, bytes_or_dash
from ..schedule.timeline import percent, size
from .report import Report

__all__ = ["PipelineReport", "PipelineTable", "RankReports", "gather_reports"]

NUMBER = re.compile(r"(?<![^._])\d+(?![^._ ])")  # of a module: not the 1 of "fc1" nor that of "(part 1)"


def gather_reports(report: Report, group: dist.ProcessGroup | None = None) -> RankReports:
    """Return the reports of all ranks, in every rank; ``print`` shows them as a table.

    A collective: every rank of the process group calls it between two steps.  Without an initialized process group the
    result has this report alone, as that of rank 0.

    Parameters
    ----------
    report : Report
        From `OffloadHandle.report` of this rank.
    group : torch.distributed.ProcessGroup or None
        The ranks that take part; all by default.  With NCCL each must have called ``torch.cuda.set_device`` with a
        device of its own.

    Raises
    ------
    TypeError
        In every rank, if any rank passed something other than a report.
    ValueError
        If this rank is not in `group`.

    Examples
    --------
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    >>> handle = actoffload.offload(model, layers="*", num_layers=3)
    >>> model(torch.randn(1024, 512)).sum().backward()
    >>> actoffload.gather_reports(handle.report()).offloaded
    ({'*': 6291456},)
    """
    given: Any = report if isinstance(report, Report) else type(report).__name__
    ranks, gathered = [0], [given]
    if dist.is_available() and dist.is_initialized():
        if dist.get_rank(group) < 0:
            wrong = "This rank is not in the process group given to gather_reports"
            raise ValueError(f"{wrong}: call it in the ranks of the group only.")
        ranks = dist.get_process_group_ranks(group)
        gathered = [None] * len(ranks)
        dist.all_gather_object(gathered, given, group=group)
    for rank, each in zip(ranks, gathered, strict=True):
        if not isinstance(each, Report):
            wrong = f"gather_reports got an object of type {each} in rank {rank}"
            raise TypeError(f"{wrong}; expected a Report: pass handle.report().")
    return RankReports(tuple(gathered), tuple(ranks))


@dataclass(frozen=True)
class RankReports(Printable):
    """The reports of several ranks; ``print`` gives a table, and a notebook shows it.

    Ranks with the same numbers share a line.  A column has the bytes offloaded in the latest pass from all groups of a
    kind, whose names differ in numbers only; it is empty if the rank has no such groups.

    Parameters
    ----------
    reports, ranks : tuple of Report, tuple of int
        One for each rank, in the order of their process group; their global ranks, or empty for 0, 1, 2 and so on.
    """

    reports: tuple[Report, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(len(self.reports))))
        if len(self.ranks) != len(self.reports):
            counts = f"{len(self.reports)} reports and {len(self.ranks)} ranks"
            raise ValueError(f"RankReports got {counts}; expected a rank for each report.")

    @property
    def offloaded(self) -> tuple[dict[str, int], ...]:
        """Offloaded bytes of each rank, by column of groups."""
        sums = [Counter[str]() for _ in self.reports]
        for mine, report in zip(sums, self.reports, strict=True):
            for group in report.groups:
                mine[NUMBER.sub("*", group.name)] += group.bytes_offloaded
        return tuple(map(dict, sums))

    def to_dict(self) -> dict[str, Any]:
        """Return ``"ranks"``, a list with the rank, the offloaded bytes by column and the report of each, for JSON."""
        rows = zip(self.ranks, self.offloaded, self.reports, strict=True)
        return {"ranks": [{"rank": rank, "offloaded": mine, "report": report.to_dict()} for rank, mine, report in rows]}

    def _content(self) -> tuple[list[Table], tuple[str, ...]]:
        reports, offloaded = self.reports, self.offloaded
        counts = [(report.totals.offloaded_calls, report.totals.calls) for report in reports]
        # Title, a cell for each rank, and the sum.
        columns: list[tuple[str, list[Cell], Cell]] = [
            (
                "offload",
                [f"{part} of {whole}" for part, whole in counts],
                " of ".join(map(str, map(sum, zip(*counts, strict=True)))),
            )
        ]
        for title in dict.fromkeys(title for mine in offloaded for title in mine):
            cells = [bytes_or_dash(mine[title]) if title in mine else "" for mine in offloaded]
            columns.append((title, cells, bytes_or_dash(sum(mine.get(title, 0) for mine in offloaded))))
        left = [report.totals.bytes_offloaded for report in reports]
        rest = [max(0, report.activation_bytes - nbytes) for report, nbytes in zip(reports, left, strict=True)]
        for title, values in (("offloaded", left), ("not offloaded", rest)):
            columns.append((title, list(map(bytes_or_dash, values)), bytes_or_dash(sum(values))))
        if any(report.r is not None for report in reports):
            columns.append(("R", ["-" if report.r is None else percent(report.r, 2) for report in reports], ""))
        # No sum of peaks: each device has its own, at another time.
        columns.append(("at the peak", [bytes_or_dash(report.peak_resident_bytes or 0) for report in reports], ""))
        host = [report.host_bytes for report in reports]
        columns.append(("host memory", list(map(bytes_or_dash, host)), bytes_or_dash(sum(host))))
        lines, rows = fold(range(len(reports)), lambda k: tuple(_shown(cells[k]) for _, cells, _ in columns)), []
        for same in lines:
            ranks = fold_names([str(self.ranks[k]) for k in same]) + (f" ({len(same)} ranks)" if len(same) > 1 else "")
            rows.append((ranks, *(cells[same[0]] for _, cells, _ in columns)))
        several = len(reports) > 1
        rows += [("total", *(total for *_, total in columns))] if several else []
        notes = ["A line for several ranks has the values of each of them."] if len(lines) < len(reports) else []
        notes += ["Empty cell: the rank has no such groups."] if len(set(map(frozenset, offloaded))) > 1 else []
        header = ("rank", *(title for title, *_ in columns))
        return [Table(header, tuple(rows), left=2, sums=several, note=" ".join(notes))], ()


def _shown(cell: Cell) -> str:
    """Return what ranks in one line have in common, to one digit."""
    return size(int(cell.nbytes)) if isinstance(cell, Bytes) else cell


# Pipelines


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
        return _pipeline_table([self]), list(filter(None, sentences))


@dataclass(frozen=True)
class PipelineTable(Printable):
    """The reports of all ranks of a pipeline; ``print`` gives a line for each."""

    reports: tuple[PipelineReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return ``"ranks"``, a list with the report of each rank, for JSON."""
        return {"ranks": [report.to_dict() for report in self.reports]}

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        return _pipeline_table(self.reports), ()


def _pipeline_table(reports: Sequence[PipelineReport]) -> list[Table]:
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
