"""What offloading did, as data and as tables: of each group, of a pass, and of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist

from .._text import (
    Table,
    fold,
    fold_names,
    line_name,
    milliseconds,
    name_pattern,
    numberless,
    percent,
    size,
    size_or_dash,
)
from ..engine.statistics import Reason
from .holders import HeldStorage, merge_held

Amounts = Mapping[Reason, tuple[int, int]]  # by reason: number of tensors, and their bytes
WEIGHTS = frozenset({Reason.PARAMETER, Reason.BUFFER})  # saved by autograd, but no activations: always kept
FOLLOWED = frozenset({Reason.HOST_FULL, Reason.SHARED})  # in `GroupReport.bytes_saved` already: they can be offloaded

# Groups


@dataclass(frozen=True)
class GroupReport:
    """One group, a chosen module whose saved tensors are offloaded together.

    Seconds are of the recorded step, all other numbers of the reported pass.  Sizes are in bytes.

    Parameters
    ----------
    name, kind : str
        Dotted name of the module; its kind, usually its class.
    calls, calls_offloaded, recomputed : int, int, bool
        Number of calls, 0 if it did not run; those that the plan offloads; whether it is recomputed in backward.
    bytes_saved : int
        Bytes that can be offloaded, also if the group is kept.  A storage counts in the first group that saved it.
    bytes_offloaded, bytes_recomputed : int
        Bytes copied to the host; bytes that backward computes again, and the group does not save.
    kept : mapping of Reason to (int, int)
        Saved tensors that cannot be offloaded, by reason: their number and their bytes.
    reloaded_ahead, reloaded_on_demand, bytes_reloaded : int
        Storages reloaded by the schedule; storages reloaded only when backward needed them; bytes reloaded.
    bytes_not_freed : int
        Bytes that were offloaded and are still on the device because something refers to their storage.
    forward_seconds, backward_seconds, stall_seconds : float or None
        Compute time on the device without stalls, and time for which compute waited for copies of this group.  None
        unless a step was recorded.
    """

    name: str
    kind: str = ""
    calls: int = 1
    calls_offloaded: int = 0
    recomputed: bool = False
    bytes_saved: int = 0
    bytes_offloaded: int = 0
    bytes_recomputed: int = 0
    kept: Amounts = field(default_factory=dict)
    reloaded_ahead: int = 0
    reloaded_on_demand: int = 0
    bytes_reloaded: int = 0
    bytes_not_freed: int = 0
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    stall_seconds: float | None = None

    @property
    def offloaded(self) -> bool:
        """Whether the plan offloads a call of the group."""
        return self.calls_offloaded > 0

    @property
    def bytes_kept(self) -> int:
        """Bytes of activations that cannot be offloaded; weights do not count."""
        return sum(nbytes for reason, (_, nbytes) in self.kept.items() if reason not in WEIGHTS)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all activations: those that were saved, whether they can be offloaded or not, and the recomputed."""
        kept = sum(nbytes for reason, (_, nbytes) in self.kept.items() if reason not in WEIGHTS | FOLLOWED)
        return self.bytes_saved + self.bytes_recomputed + kept


def sum_groups(groups: Iterable[GroupReport], name: str) -> GroupReport:
    """Return the sums over groups, as a group; seconds are None if they are None in all groups."""
    groups = tuple(groups)
    kinds = {group.kind for group in groups}
    recomputed = any(group.recomputed for group in groups)
    total: dict[str, Any] = {"kept": add_amounts(group.kept for group in groups), "recomputed": recomputed}
    for number in {entry.name for entry in fields(GroupReport)} - {"name", "kind", *total}:
        known = [value for group in groups if (value := getattr(group, number)) is not None]
        total[number] = sum(known) if known or "seconds" not in number else None
    return GroupReport(name, kinds.pop() if len(kinds) == 1 else "", **total)


def add_amounts(amounts: Iterable[Mapping[Reason, Sequence[int]]]) -> dict[Reason, tuple[int, int]]:
    """Return the sums by reason, most bytes first."""
    sums: dict[Reason, tuple[int, int]] = {}
    for amount in amounts:
        for reason, (count, nbytes) in amount.items():
            before = sums.get(reason, (0, 0))
            sums[reason] = before[0] + count, before[1] + nbytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1][1], -item[1][0], item[0].value)))


# A pass


@dataclass(frozen=True)
class Report:
    """What offloading did in a pass, or in a step of a pipeline; ``print`` gives tables and advice.

    `dataclasses.asdict` makes a dict of all fields, ready for JSON.

    Parameters
    ----------
    groups : tuple of GroupReport
        Groups in execution order.  Of a pipeline, each of them with all microbatches, and its stage as the kind.
    outside : mapping of Reason to (int, int), or None
        What was saved outside of the groups and kept: number of tensors and bytes, by reason; None if not known.
    passes, step_passes : int
        Forward passes since the statistics began; those in the recorded step, its microbatches.
    peak_resident_bytes : int
        Largest number of bytes of saved activations on the device since the statistics began.
    host_bytes, host_bytes_high_water : int
        Pinned memory in bytes: allocated now, and the largest part of it ever in use.
    held : tuple of HeldStorage
        Storages that are not freed because something else refers to them.
    expected_bytes, dropped_bytes : int or None
        Bytes that the plan frees on the device before the end of the forward, and the part of them that was freed then.
    step_seconds : float or None
        Duration of the recorded step, from its first group to the end of the recording.
    because, next_choice : str
        Why the plan is what it is; what a smaller peak would cost.
    peak_bytes, baseline_peak_bytes : int or None
        Peak of device memory that is expected of a pass with the plan, and without offloading and recomputation.
    seconds, baseline_seconds : float or None
        The same for the time of a pass.
    proven_bytes, samples : int
        Bytes that were computed again and compared in all bits, in first calls; values of which samples were compared
        in later ones, without a difference.
    times : bool
        Whether durations are those of a real device; otherwise there is no advice about time.
    advice : tuple of str
        Sentences on what to change.
    """

    groups: tuple[GroupReport, ...] = ()
    outside: Amounts | None = None
    passes: int = 0
    peak_resident_bytes: int = 0
    host_bytes: int = 0
    host_bytes_high_water: int = 0
    held: tuple[HeldStorage, ...] = ()
    expected_bytes: int | None = None
    dropped_bytes: int | None = None
    step_seconds: float | None = None
    step_passes: int = 0
    because: str = ""
    next_choice: str = ""
    peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    seconds: float | None = None
    baseline_seconds: float | None = None
    proven_bytes: int = 0
    samples: int = 0
    times: bool = True
    advice: tuple[str, ...] = ()

    @property
    def r(self) -> float | None:
        """Fraction `dropped_bytes` / `expected_bytes` at the end of the forward; None if nothing should be freed."""
        drop = self.dropped_bytes
        return None if drop is None or not self.expected_bytes else drop / self.expected_bytes

    @property
    def coverage(self) -> float | None:
        """Share of `activation_bytes` that lies in groups, without what modules in ``keep`` save; None if unknown."""
        if self.outside is None:
            return None
        everything = self.activation_bytes - self.outside.get(Reason.KEPT, (0, 0))[1]
        return self.totals.activation_bytes / everything if everything else None

    @property
    def totals(self) -> GroupReport:
        """The sums over all groups; offloaded if any group is."""
        return sum_groups(self.groups, "total")

    @property
    def kept(self) -> dict[Reason, tuple[int, int]]:
        """What was kept by reason, in the groups and outside, most bytes first: number of tensors, and bytes."""
        return add_amounts([self.totals.kept, self.outside or {}])

    @property
    def activation_bytes(self) -> int:
        """Bytes of all activations, in the groups and outside."""
        return self.totals.activation_bytes + GroupReport("outside", kept=self.outside or {}).activation_bytes

    @property
    def slower(self) -> float | None:
        """Part of a pass by which the plan makes it longer, as 0.1 for 10 %; None if that is not known."""
        known = self.times and self.seconds and self.baseline_seconds
        return (self.seconds or 0.0) / (self.baseline_seconds or 1.0) - 1 if known else None

    @property
    def stalled(self) -> float | None:
        """Part of the recorded step for which compute stalled; None if that is not known."""
        waited = self.totals.stall_seconds
        return None if not self.times or not self.step_seconds or waited is None else waited / self.step_seconds

    @property
    def gain(self) -> str:
        """What is saved against no offloading, and what that costs in time, in sentences; empty if not known."""
        totals, peak, without = self.totals, self.peak_bytes, self.baseline_peak_bytes
        if not totals.offloaded and not totals.recomputed:
            return "Nothing is offloaded or recomputed." if totals.calls else ""
        if self.dropped_bytes is None:
            return ""
        less = totals.bytes_saved + totals.bytes_recomputed - totals.bytes_not_freed - self.peak_resident_bytes
        # A larger peak than without offloading is that of several passes.
        less, when = (less, "") if less > 0 else (self.dropped_bytes, " at the end of the forward")
        saved = f"Saves {size(less)} of {size(self.activation_bytes)} of activations{when}. " if less else ""
        if self.times and peak and without and peak < without:
            saved = f"Saves {size(without - peak)}: the peak is {size(peak)} instead of about {size(without)}. "
        if self.slower is not None:
            both = f"{milliseconds(self.seconds or 0.0)} instead of about {milliseconds(self.baseline_seconds or 0.0)}"
            saved += f"A pass takes {both} ({self.slower * 100:+.1f} %)."
        return saved.strip()

    def __str__(self) -> str:
        facts = Table(("", ""), tuple(_facts(self)), left=2)
        tables = _groups_table(self), facts, _kept_table(self), _held_table(self)
        advice = "\n".join(f"- {sentence}" for sentence in self.advice)
        return "\n\n".join(filter(None, [self.gain, *(str(table) for table in tables if table.rows), advice]))


# Tables

TIMES = {"forward": "forward_seconds", "backward": "backward_seconds", "stalled": "stall_seconds"}  # by title


def _cells(line: Sequence[GroupReport]) -> dict[str, str]:
    """Return the cells, by title, of a line for groups that are alike; their times, which are never equal, as means."""
    group = line[0]
    part, whole = group.calls_offloaded, group.calls
    again = size(group.bytes_recomputed) if group.bytes_recomputed else "yes"  # as the plan shows it
    cells = {
        "kind": group.kind,
        "offload": f"{part} of {whole}" if 0 < part < whole else "yes" if group.offloaded else "no",
        "calls": str(whole),
        "saved": size_or_dash(group.bytes_saved),
        "offloaded": size_or_dash(group.bytes_offloaded),
        "recomputed": again if group.recomputed else "-",
        "excluded": size_or_dash(group.bytes_kept),
        "on demand": str(group.reloaded_on_demand or "-"),
        "not freed": size_or_dash(group.bytes_not_freed),
    }
    for title, time in TIMES.items():
        known = [seconds for each in line if (seconds := getattr(each, time)) is not None]
        cells[title] = milliseconds(sum(known) / len(known)) if known else "-"
    return cells


def _groups_table(report: Report) -> Table:
    """Return the table of groups, with their sums."""

    def look(group: GroupReport) -> tuple[object, ...]:
        cells = (cell for title, cell in _cells([group]).items() if title not in TIMES)
        return numberless(group.name), round((group.stall_seconds or 0.0) * 1e4), *cells

    groups, sums = report.groups, _cells([report.totals])
    kinds, calls = len({group.kind for group in groups}) > 1, any(group.calls != 1 for group in groups)
    wanted = {"kind": kinds, "calls": calls, **dict.fromkeys(TIMES, report.times)}
    shown = [title for title, cell in sums.items() if cell != "-" and wanted.get(title, True)]
    rows = []
    for line in fold(groups, look):
        cells = _cells(line)
        rows.append((line_name([group.name for group in line], "groups"), *(cells[title] for title in shown)))
    if groups:
        rows.append(("total", *(sums[title] for title in shown)))
    passes = f"Times are sums over the {report.step_passes} forward passes of the recorded step; bytes are of the last."
    note = passes if report.step_passes > 1 else ""
    return Table(("group", *shown), tuple(rows), left=2 + kinds, sums=bool(groups), note=note)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    totals = report.totals
    yield "passes", str(report.passes)
    if report.coverage is not None:
        yield "coverage", f"{percent(report.coverage)} of the activations lie in groups"
    yield from ((name, said) for name, said in (("plan", report.because), ("next choice", report.next_choice)) if said)
    # Some of them may count already: those that were to be freed only behind the peak.
    held = f", and up to {size(totals.bytes_not_freed)} more that were not freed" if totals.bytes_not_freed else ""
    yield "at the peak", f"{size(report.peak_resident_bytes)} on the device, of what can be offloaded{held}"
    if report.r is not None:
        drop = f"{size(report.dropped_bytes or 0)} of {size(report.expected_bytes or 0)} that the plan frees in forward"
        yield "freed", f"{percent(report.r, 2)}, {drop}"
    if totals.bytes_reloaded:  # steps of a pipeline do not say of which group
        ahead, demand = totals.reloaded_ahead, totals.reloaded_on_demand
        storages = "1 storage" if ahead == 1 else f"{ahead} storages"
        yield "reloaded", f"{size(totals.bytes_reloaded)}: {storages} ahead, {demand} on demand"
    if report.proven_bytes:
        since = f", and samples of {report.samples} values since then" if report.samples else ""
        yield "proven", f"{size(report.proven_bytes)} computed again have the same bits{since}"
    yield "host memory", f"{size(report.host_bytes)} allocated, at most {size(report.host_bytes_high_water)} in use"
    if report.step_seconds and report.times:
        stalled = totals.stall_seconds or 0.0
        share = f"{milliseconds(stalled)} of it stalled ({percent(stalled / report.step_seconds)})"
        yield "step", f"{milliseconds(report.step_seconds)}, {share}"


def _kept_table(report: Report) -> Table:
    inside, rows = report.totals.kept, list[tuple[str, ...]]()
    for reason, (count, nbytes) in sorted(report.kept.items(), key=lambda item: item[0] in WEIGHTS):  # weights last
        within = inside.get(reason, (0, 0))[1]
        words = f"{reason.value} (always kept)" if reason in WEIGHTS else reason.value
        rows.append((words, str(count), size_or_dash(within), size_or_dash(nbytes - within)))
    return Table(("kept on the device", "tensors", "in groups", "outside"), tuple(rows), left=1)


def _held_table(report: Report) -> Table:
    rows = list[tuple[str, ...]]()
    for groups, nbytes, holders in merge_held(report.held):
        unnamed = "autograd of another graph, a library, or C++" if holders is not None else "not known: record a step"
        first, *more = list(map(str, holders or ())) or [unnamed]
        rows += [(fold_names(groups), first, size_or_dash(nbytes)), *(("", line, "") for line in more)]
    return Table(("not freed", "referenced by", "bytes"), tuple(rows), left=2)


# All ranks


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
    """
    given: Any = report if isinstance(report, Report) else type(report).__name__
    ranks, gathered = [0], [given]
    if dist.is_available() and dist.is_initialized():
        if dist.get_rank(group) < 0:
            raise ValueError("This rank is not in the process group: call gather_reports in its ranks only.")
        ranks = dist.get_process_group_ranks(group)
        gathered = [None] * len(ranks)
        dist.all_gather_object(gathered, given, group=group)
    for rank, each in zip(ranks, gathered, strict=True):
        if not isinstance(each, Report):
            wrong = f"gather_reports got an object of type {each} in rank {rank}"
            raise TypeError(f"{wrong}; expected a Report: pass handle.report().")
    return RankReports(tuple(gathered), tuple(ranks))


@dataclass(frozen=True)
class RankReports:
    """The reports of several ranks; ``print`` gives a table.

    Ranks with the same numbers share a line.  The last columns have the bytes that are offloaded from all groups of a
    kind, whose names differ in numbers only; they are empty if the rank has no such groups.

    `reports` are in the order of the process group, with global `ranks`.
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

    def __str__(self) -> str:
        found = [{**_rank_cells(each), **groups} for each, groups in zip(self.reports, self.offloaded, strict=True)]
        titles = list(dict.fromkeys(title for cells in found for title in cells))
        columns = {title: [cells[title] for cells in found if title in cells] for title in titles}
        sums = {title: sum(column) for title, column in columns.items() if not isinstance(column[0], str)}
        *lines, total = [
            tuple(cell if isinstance(cell := cells.get(title, ""), str) else size_or_dash(cell) for title in titles)
            for cells in (*found, sums)
        ]
        table = []
        for same in fold(zip(map(str, self.ranks), lines, strict=True), lambda row: row[1]):
            table.append((line_name([rank for rank, _ in same], "ranks"), *same[0][1]))
        several = len(lines) > 1
        table += [("total", *total)] if several else []
        return str(Table(("rank", *titles), tuple(table), left=2, sums=several))


def _rank_cells(report: Report) -> dict[str, Any]:
    """Return the cells of one rank by the title of the column; numbers are bytes, which are added up."""
    totals = report.totals
    return {
        "offload": _cells([totals])["offload"],
        "offloaded": totals.bytes_offloaded,
        "not offloaded": max(0, report.activation_bytes - totals.bytes_recomputed - totals.bytes_offloaded),
        "freed": "-" if report.r is None else percent(report.r, 2),
        # No sum of peaks: each device has its own, at another time.
        "at the peak": size_or_dash(report.peak_resident_bytes),
        "host memory": report.host_bytes,
    }
