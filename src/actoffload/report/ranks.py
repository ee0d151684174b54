"""The reports of all ranks in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .._text import Printable, Table, fold, line_name, name_pattern, percent, size_or_dash
from .report import Report


def gather_reports(report: Report, group: dist.ProcessGroup | None = None) -> RankReports:
    """Return the reports of all ranks, in every rank; ``print`` shows them as a table.

    A collective: every rank of the process group calls it between two steps.  Without an initialized process group the
    result has this report alone, as that of rank 0.

    Parameters
    ----------
    report : Report
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
    """The reports of several ranks; ``print`` gives a table.

    Ranks with the same numbers share a line.  The last columns have the bytes that are offloaded from all groups of a
    kind, whose names differ in numbers only; they are empty if the rank has no such groups.

    Parameters
    ----------
    reports, ranks : tuple of Report, tuple of int
        One for each rank, in the order of their process group; their global ranks.
    """

    reports: tuple[Report, ...]
    ranks: tuple[int, ...]

    @property
    def offloaded(self) -> tuple[dict[str, int], ...]:
        """Offloaded bytes of each rank, by column of groups."""
        found = []
        for report in self.reports:
            sums = Counter[str]()
            for group in report.groups:
                sums[name_pattern(group.name)] += group.bytes_offloaded
            found.append(dict(sums))
        return tuple(found)

    def _content(self) -> tuple[str, list[Table], list[str]]:
        found = [{**_cells(each), **groups} for each, groups in zip(self.reports, self.offloaded, strict=True)]
        titles = list(dict.fromkeys(title for cells in found for title in cells))
        lines = [tuple(_text(cells.get(title, "")) for title in titles) for cells in found]
        table = []
        for same in fold(zip(map(str, self.ranks), lines, strict=True), lambda row: row[1]):
            table.append((line_name([rank for rank, _ in same], "ranks"), *same[0][1]))
        if several := len(lines) > 1:
            table.append(("total", *(_sum([cells[title] for cells in found if title in cells]) for title in titles)))
        return "", [Table(("rank", *titles), tuple(table), left=2, sums=several)], []


def _text(cell: int | str) -> str:
    return cell if isinstance(cell, str) else size_or_dash(cell)


def _sum(column: list[int | str]) -> str:
    numbers = [cell for cell in column if isinstance(cell, int)]
    return size_or_dash(sum(numbers)) if len(numbers) == len(column) else ""


def _cells(report: Report) -> Mapping[str, int | str]:
    """Return the cells of one rank by the title of the column; numbers are bytes, which are added up."""
    totals = report.totals
    return {
        "offload": report.offloaded_share,
        "offloaded": totals.bytes_offloaded,
        "not offloaded": max(0, report.activation_bytes - totals.bytes_recomputed - totals.bytes_offloaded),
        "freed": "-" if report.r is None else percent(report.r, 2),
        # No sum of peaks: each device has its own, at another time.
        "at the peak": size_or_dash(report.peak_resident_bytes),
        "host memory": report.host_bytes,
    }
