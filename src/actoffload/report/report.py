"""What offloading a model did, as data and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from .._folding import fold, fold_names, numberless
from ..engine.statistics import Reason
from ..schedule.timeline import milliseconds, percent, size
from .groups import (
    WEIGHTS,
    Amounts,
    GroupReport,
    HeldStorage,
    StepFacts,
    add_amounts,
    amounts_to_dict,
    merge_held,
    sum_groups,
)
from .tables import Cell, Printable, Table, bytes_or_dash

__all__ = ["Advice", "Report"]

MOST_HELD = 12


class Advice(str):
    """A sentence on what to change; its attribute `change` has the arguments of `offload` that do it.

    It is empty where the program has to be changed, and where nothing can be.
    """

    change: Mapping[str, Any]
    nbytes: int  # that the sentence is about

    def __new__(cls, sentence: str, nbytes: int = 0, **change: Any) -> Advice:
        """Return the sentence; the arguments are those of `offload`."""
        made = super().__new__(cls, sentence)
        made.change, made.nbytes = change, nbytes
        return made


@dataclass(frozen=True)
class Report(StepFacts, Printable):
    """What offloading did; ``print`` gives tables and advice, and a notebook shows them.

    The parameters of `StepFacts` are parameters too.

    Parameters
    ----------
    groups : tuple of GroupReport
        Groups in execution order.
    outside, outside_modules : mapping of Reason to (int, int), mapping of str to int
        What was saved outside of the groups and kept: number of tensors and bytes, by reason; and bytes by the name of
        the innermost module, with ``*`` for numbers, empty unless a step was recorded.
    passes, step_passes : int
        Forward passes since the statistics began; those in the recorded step, its microbatches.
    num_layers : int or None
        Number of groups of a kind that are offloaded; an upper limit if a fraction was given; None if the plan does not
        go by kinds.
    peak_resident_bytes : int or None
        Largest number of bytes of saved activations on the device since the statistics began; None if what kept groups
        save is not followed.
    host_bytes, host_bytes_high_water : int
        Pinned memory in bytes: allocated now, and the largest part of it ever in use.
    largest_bytes : int
        Bytes that can be offloaded, as saved by the largest pass since the statistics began; 0 if that is not known.
    held : tuple of HeldStorage
        Storages that are not freed because something else refers to them.
    expected_bytes, dropped_bytes : int or None
        Bytes that the plan frees on the device before the end of the forward, and the part of them that was freed then.
    later_bytes : int
        Bytes of offloaded groups that the plan frees on the device in backward.
    waiting_passes, waiting_bytes : int
        Earlier passes whose backward was still to come when the forward of the latest ended, and their bytes of saved
        activations on the device: those of several forwards before one backward, or of a pipeline.
    step_seconds : float or None
        Duration of the recorded step, from its first group to the end of the recording.
    order, advice : str, tuple of Advice
        A note on the execution order, for instance that it changed; sentences on what to change.
    """

    groups: tuple[GroupReport, ...] = ()
    outside: Amounts = field(default_factory=dict)
    outside_modules: Mapping[str, int] = field(default_factory=dict)
    passes: int = 0
    num_layers: int | None = None
    peak_resident_bytes: int | None = 0
    host_bytes: int = 0
    host_bytes_high_water: int = 0
    largest_bytes: int = 0
    held: tuple[HeldStorage, ...] = ()
    expected_bytes: int | None = None
    dropped_bytes: int | None = None
    later_bytes: int = 0
    waiting_passes: int = 0
    waiting_bytes: int = 0
    step_seconds: float | None = None
    step_passes: int = 0
    order: str = ""
    advice: tuple[str, ...] = ()

    @property
    def small(self) -> bool:
        """Whether the pass saved less than half of `largest_bytes`, so that its bytes are no reason for advice."""
        return 2 * self.totals.bytes_saved < self.largest_bytes

    @property
    def r(self) -> float | None:
        """Fraction `dropped_bytes` / `expected_bytes`; None if unknown or if nothing should be freed.

        It is what was freed when the forward ended, where the peak lies unless backward needs more.
        """
        drop = self.dropped_bytes
        return None if drop is None or not self.expected_bytes else drop / self.expected_bytes

    @property
    def share_in_groups(self) -> float | None:
        """Share of `computed_bytes` in the latest pass that lies in groups; None if there are none."""
        outside = self.activation_bytes - self.totals.activation_bytes
        everything = self.computed_bytes - self.outside.get(Reason.KEPT, (0, 0))[1]  # as `keep` asks for
        return (self.computed_bytes - outside) / everything if everything else None

    @property
    def totals(self) -> GroupReport:
        """The sums over all groups; offloaded if any group is."""
        return sum_groups(self.groups, "total")

    @property
    def kept(self) -> dict[Reason, tuple[int, int]]:
        """What was kept by reason, in the groups and outside, most bytes first: number of tensors, and bytes."""
        return add_amounts([self.totals.kept, self.outside])

    @property
    def activation_bytes(self) -> int:
        """Bytes of all activations that were saved, in the groups and outside."""
        return self.totals.activation_bytes + GroupReport("outside", kept=self.outside).activation_bytes

    @property
    def computed_bytes(self) -> int:
        """Bytes of all activations that were saved or are recomputed; only of those saved if not all are known."""
        again = self.totals.bytes_recomputed if self._knows_recomputed else 0
        return self.activation_bytes + again

    @property
    def _knows_recomputed(self) -> bool:
        return all(group.bytes_recomputed for group in self.groups if group.recomputed)

    @property
    def counted(self) -> str:
        """What `computed_bytes` counts, in words."""
        if not self.totals.recomputed:
            return "activations"
        return "saved and recomputed activations" if self._knows_recomputed else "saved activations"

    @property
    def offloaded_groups(self) -> tuple[GroupReport, ...]:
        """The groups that the plan offloads."""
        return tuple(group for group in self.groups if group.offloaded)

    @property
    def offloaded_share(self) -> str:
        """How many of the groups that ran the plan offloads, as text; a group that is called twice counts twice."""
        return f"{self.totals.offloaded_calls} of {self.totals.calls}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything under its name, ready for JSON: reasons are their names in lower case."""
        return {
            **vars(self),
            "groups": [group.to_dict() for group in self.groups],
            "totals": self.totals.to_dict(),
            "outside": amounts_to_dict(self.outside),
            "outside_modules": dict(self.outside_modules),
            "kept": amounts_to_dict(self.kept),
            "held": [{**vars(held), "holders": list(map(str, held.holders))} for held in self.held],
            "activation_bytes": self.activation_bytes,
            "computed_bytes": self.computed_bytes,
            "arguments": None if self.arguments is None else {k: _plain(v) for k, v in self.arguments.items()},
            "small": self.small,
            "kept_modules": list(self.kept_modules),
            "refused": dict(self.refused),
            "r": self.r,
            "advice": list(self.advice),
        }

    def _content(self) -> tuple[list[Table], tuple[str, ...]]:
        facts = Table(("", ""), tuple(_facts(self)), left=2)
        tables = _groups_table(self), facts, _kept_table(self), _held_table(self)
        return [table for table in tables if table.rows], self.advice


def _plain(value: Any) -> Any:
    """Return an argument ready for JSON."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return "..." if value is ... else value.__name__ if isinstance(value, type) else value


@dataclass(frozen=True)
class Column:
    """A column of numbers, shown if the sum is not 0, or `always`; equal in the groups of a line but for `times`."""

    title: str
    of: Callable[[GroupReport], float | None]
    show: Callable[[float], Cell] = bytes_or_dash
    always: bool = False
    times: bool = False

    def mean(self, groups: Sequence[GroupReport]) -> Cell:
        """Return the cell of a line for several groups."""
        values = [value for group in groups if (value := self.of(group)) is not None]
        return self.show(sum(values) / len(values)) if values else "-"


COLUMNS = (
    Column("saved", lambda group: group.bytes_saved, always=True),
    Column("offloaded", lambda group: group.bytes_offloaded, always=True),
    Column(
        "recomputed",
        lambda group: group.bytes_recomputed or -int(group.recomputed),
        lambda nbytes: "yes" if nbytes < 0 else bytes_or_dash(nbytes),  # as the plan shows them
    ),
    Column("excluded", lambda group: group.bytes_kept),
    Column("on demand", lambda group: group.reloaded_on_demand, lambda count: str(int(count) or "-")),
    Column("not freed", lambda group: group.bytes_not_freed),
    Column("forward", lambda group: group.forward_seconds, milliseconds, times=True),
    Column("backward", lambda group: group.backward_seconds, milliseconds, times=True),
    Column("stalled", lambda group: group.stall_seconds, milliseconds, times=True),
)


def _key(group: GroupReport) -> tuple[object, ...]:
    """Return what groups of one line have in common; compute times are never quite equal."""
    stalled = None if group.stall_seconds is None else round(group.stall_seconds * 1e4)
    numbers = (column.of(group) for column in COLUMNS if not column.times)
    return numberless(group.name), group.kind, group.calls, group.offloaded_calls, stalled, *numbers


def _groups_table(report: Report) -> Table:
    """Return the table of groups, with their sums."""
    groups, totals = report.groups, report.totals
    folded = fold(groups, _key)
    possible = [column for column in COLUMNS if report.times or not column.times]
    columns = [column for column in possible if column.of(totals) or (column.always and groups)]
    if totals.stall_seconds == 0.0 and report.times:  # 0.00 ms is worth a column
        columns.append(COLUMNS[-1])
    kinds, calls = len({group.kind for group in groups}) > 1, any(group.calls != 1 for group in groups)
    shown = (True, kinds, True, calls)

    def row(name: str, offloaded: str, line: Sequence[GroupReport]) -> tuple[Cell, ...]:
        texts = name, line[0].kind, offloaded, str(line[0].calls)
        return (*compress(texts, shown), *(column.mean(line) for column in columns))

    rows = []
    for line in folded:
        name = fold_names([group.name for group in line])
        name = f"{name} ({len(line)} groups)" if len(line) > 1 else name
        part = line[0].offloaded_calls, line[0].calls
        some = f"{part[0]} of {part[1]}" if part[0] < part[1] else "yes"
        rows.append(row(name, some if line[0].offloaded else "no", line))
    if groups:
        rows.append(row("total", report.offloaded_share, (totals,)))
    header = (*compress(("group", "kind", "offload", "calls"), shown), *(column.title for column in columns))
    note = "\n".join(_notes(report, folded=len(folded) < len(groups)))
    return Table(header, tuple(rows), left=2 + kinds, sums=bool(groups), note=note)


def _notes(report: Report, *, folded: bool) -> Iterator[str]:
    totals = report.totals
    if folded:
        yield "A line for several groups has the values of each of them."
    of_kept = sum(group.bytes_wasted for group in report.groups if not group.offloaded)
    for nbytes, because in (
        (totals.bytes_wasted - of_kept, "groups that are kept share the storages"),
        (of_kept, "the plan offloaded their groups, and they were kept because the execution order changed"),
    ):
        if nbytes:
            yield f"Wasted copies: {size(nbytes)} were offloaded but stay on the device, because {because}."
    if report.step_passes > 1:
        passes = f"the {report.step_passes} forward passes of the recorded step"
        yield f"Times are sums over {passes}; bytes are of the last."


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    totals = report.totals
    yield "passes", str(report.passes)
    if report.coverage is not None:
        yield "coverage", f"{percent(report.coverage)} of the {report.counted} lie in groups"
    if report.because:
        yield "plan", report.because
    if report.expected and report.times:
        yield "expected", report.expected
    if report.next_choice:
        yield "next choice", report.next_choice
    if report.peak_resident_bytes is not None:
        most = max(report.largest_bytes, report.peak_resident_bytes)
        highest = f"; the highest of {report.passes} passes" if totals.bytes_saved < most else ""
        # Some of them may count already: those that were to be freed only behind the peak.
        held = f", and up to {size(totals.bytes_not_freed)} more that were not freed" if totals.bytes_not_freed else ""
        peak = f"{size(report.peak_resident_bytes)} on the device, of what can be offloaded{held}{highest}"
        yield "at the peak", peak
    if report.waiting_passes:
        passes = "1 earlier pass" if report.waiting_passes == 1 else f"{report.waiting_passes} earlier passes"
        yield "in flight", f"{passes} had {size(report.waiting_bytes)} on the device when this forward ended"
    if report.r is not None:
        expected, dropped = size(report.expected_bytes or 0), size(report.dropped_bytes or 0)
        drop = f"{dropped} freed of {expected} that should be"
        drop += f" in forward, and {size(report.later_bytes)} are freed in backward" if report.later_bytes else ""
        yield "R", f"{percent(report.r, 2)}: {drop}"
    if totals.bytes_offloaded:
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
    if report.order:
        yield "order", report.order


def _kept_table(report: Report) -> Table:
    inside, rows = report.totals.kept, list[tuple[Cell, ...]]()
    for reason, (count, nbytes) in sorted(report.kept.items(), key=lambda item: item[0] in WEIGHTS):  # weights last
        within = inside.get(reason, (0, 0))[1]
        words = f"{reason.value} (always kept)" if reason in WEIGHTS else reason.value
        rows.append((words, str(count), bytes_or_dash(within), bytes_or_dash(nbytes - within)))
    return Table(("kept on the device", "tensors", "in groups", "outside"), tuple(rows), left=1)


def _held_table(report: Report) -> Table:
    merged = merge_held(report.held)
    rows: list[tuple[Cell, ...]] = []
    for groups, nbytes, holders in merged[:MOST_HELD]:
        lines = tuple(map(str, holders)) or ("autograd of another graph, or C++",)
        rows.append((fold_names(groups), lines[0], bytes_or_dash(nbytes)))
        rows += [("", line, "") for line in lines[1:]]
    note = f"and {len(merged) - MOST_HELD} more" if len(merged) > MOST_HELD else ""
    return Table(("not freed", "referenced by", "bytes"), tuple(rows), left=2, note=note)
