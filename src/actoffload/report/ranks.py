"""Reports of ranks: what one rank of a pipeline did, and the table of all ranks, of a model or of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .._text import Printable, Table, fold, line_name, name_pattern, percent, size, size_or_dash
from .report import Report

Cells = Mapping[str, int | str]  # of one rank, by the title of the column; numbers are bytes, which are added up


def gather_reports(report: Report | PipelineReport, group: dist.ProcessGroup | None = None) -> RankReports:
    """Return the reports of all ranks, in every rank; ``print`` shows them as a table.

    A collective: every rank of the process group calls it between two steps.  Without an initialized process group the
    result has this report alone, as that of rank 0.

    Parameters
    ----------
    report : Report or PipelineReport
        From `OffloadHandle.report` or `PipelineHandle.report` of this rank.
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
    kinds = Report, PipelineReport
    given: Any = report if isinstance(report, kinds) else type(report).__name__
    ranks, gathered = [0], [given]
    if dist.is_available() and dist.is_initialized():
        if dist.get_rank(group) < 0:
            wrong = "This rank is not in the process group given to gather_reports"
            raise ValueError(f"{wrong}: call it in the ranks of the group only.")
        ranks = dist.get_process_group_ranks(group)
        gathered = [None] * len(ranks)
        dist.all_gather_object(gathered, given, group=group)
    for rank, each in zip(ranks, gathered, strict=True):
        if not isinstance(each, kinds):
            wrong = f"gather_reports got an object of type {each} in rank {rank}"
            raise TypeError(f"{wrong}; expected a Report: pass handle.report().")
    return RankReports(tuple(gathered), tuple(ranks))


@dataclass(frozen=True)
class RankReports(Printable):
    """The reports of several ranks; ``print`` gives a table, and a notebook shows it.

    Ranks with the same numbers share a line.  Of models, a column has the bytes offloaded in the latest pass from all
    groups of a kind, whose names differ in numbers only; it is empty if the rank has no such groups.

    Parameters
    ----------
    reports, ranks : tuple of Report or PipelineReport, tuple of int
        One for each rank, in the order of their process group; their global ranks, or empty for 0, 1, 2 and so on.
    """

    reports: tuple[Report | PipelineReport, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(len(self.reports))))
        if len(self.ranks) != len(self.reports):
            counts = f"{len(self.reports)} reports and {len(self.ranks)} ranks"
            raise ValueError(f"RankReports got {counts}; expected a rank for each report.")

    @property
    def offloaded(self) -> tuple[dict[str, int], ...]:
        """Offloaded bytes of each rank of a model, by column of groups."""
        return tuple(_by_kind(report) for report in self.reports if isinstance(report, Report))

    def _content(self) -> tuple[str, list[Table], list[str]]:
        found = [_cells(report) if isinstance(report, Report) else _pipeline_cells(report) for report in self.reports]
        titles = list(dict.fromkeys(title for cells in found for title in cells))
        lines = [tuple(_text(cells.get(title, "")) for title in titles) for cells in found]
        table = []
        for same in fold(zip(map(str, self.ranks), lines, strict=True), lambda row: row[1]):
            table.append((line_name([rank for rank, _ in same], "ranks"), *same[0][1]))
        if several := len(lines) > 1:
            table.append(("total", *(_sum([cells[title] for cells in found if title in cells]) for title in titles)))
        note = ""
        if any(isinstance(report, PipelineReport) for report in self.reports):
            note = "Bytes of a step; peaks are of saved tensors. A group of one microbatch counts once in 'offload'."
        return "", [Table(("rank", *titles), tuple(table), left=2, sums=several, note=note)], []


def _text(cell: int | str) -> str:
    return cell if isinstance(cell, str) else size_or_dash(cell)


def _sum(column: list[int | str]) -> str:
    numbers = [cell for cell in column if isinstance(cell, int)]
    return size_or_dash(sum(numbers)) if len(numbers) == len(column) else ""


def _by_kind(report: Report) -> dict[str, int]:
    """Return the offloaded bytes of groups by their names without numbers."""
    sums = Counter[str]()
    for group in report.groups:
        sums[name_pattern(group.name)] += group.bytes_offloaded
    return dict(sums)


def _cells(report: Report) -> Cells:
    offloaded = report.totals.bytes_offloaded
    return {
        "offload": report.offloaded_share,
        "offloaded": offloaded,
        "not offloaded": max(0, report.activation_bytes - offloaded),
        "freed": "-" if report.r is None else percent(report.r, 2),
        # No sum of peaks: each device has its own, at another time.
        "at the peak": size_or_dash(report.peak_resident_bytes),
        "host memory": report.host_bytes,
        **_by_kind(report),
    }


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

    def _content(self) -> tuple[str, Sequence[Table], list[str]]:
        late = f"{self.on_demand} storages were reloaded when backward needed them: compute waited."
        kept = f"The schedule keeps {size(self.boundary_bytes)} of outputs on the device for each microbatch in flight."
        sentences = self.because, late if self.on_demand else "", kept if self.boundary_bytes else ""
        title, tables, _ = RankReports((self,), (self.rank,))._content()
        return title, tables, list(filter(None, sentences))


def _pipeline_cells(report: PipelineReport) -> Cells:
    return {
        "stages": ", ".join(map(str, report.stages)),
        "offload": f"{report.offloaded} of {report.chunks}",
        "offloaded": report.offloaded_bytes,
        "kept": report.saved_bytes - report.offloaded_bytes,
        "peak": size_or_dash(report.peak_bytes),
        "peak in plan": "-" if report.expected_bytes is None else size_or_dash(report.expected_bytes),
        "host memory": report.host_bytes,
    }
