"""What offloading a model did, as data and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from .._folding import fold, fold_names, numberless
from .._tables import Cell, Printable, Table, bytes_or_dash
from ..engine.statistics import Reason
from ..schedule.timeline import milliseconds, percent, size
from .groups import WEIGHTS, Amounts, GroupReport, HeldStorage, add_amounts, merge_held, sum_groups

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
class Report(Printable):
    """What offloading did; ``print`` gives tables and advice, and a notebook shows them.

    Parameters
    ----------
    groups : tuple of GroupReport
        Groups in execution order.
    outside : mapping of Reason to (int, int), or None
        What was saved outside of the groups and kept: number of tensors and bytes, by reason; None if not known.
    outside_modules : mapping of str to int
        Bytes of it by the name of the innermost module, with ``*`` for numbers, empty unless a step was recorded.
    passes, step_passes : int
        Forward passes since the statistics began; those in the recorded step, its microbatches.
    peak_resident_bytes : int or None
        Largest number of bytes of saved activations on the device since the statistics began; None if what kept groups
        save is not followed.
    host_bytes, host_bytes_high_water : int
        Pinned memory in bytes: allocated now, and the largest part of it ever in use.
    held : tuple of HeldStorage
        Storages that are not freed because something else refers to them.
    expected_bytes, dropped_bytes : int or None
        Bytes that the plan frees on the device before the end of the forward, and the part of them that was freed then.
    later_bytes : int
        Bytes of offloaded groups that the plan frees on the device in backward.
    waiting_passes : int
        Earlier passes whose backward was still to come when the forward ended: several forwards before one backward.
    step_seconds : float or None
        Duration of the recorded step, from its first group to the end of the recording.
    because, next_choice : str
        Why the plan is what it is; what the next better choice is.
    expected : str
        Peak and time of a pass that are expected with the plan; empty if they are not known.
    refused : mapping of str to str
        By the name of a group that should be recomputed in backward and is not: why.
    proven_bytes, samples : int
        Bytes that were computed again and compared in all bits, in first calls; values of which samples were compared
        in later ones, without a difference.
    arguments : mapping of str to object, or None
        The arguments of `offload`; entries of ``layers`` and ``keep`` are strings, classes and ``...``.
    kept_modules : tuple of str
        Names of the modules in ``keep``.
    record : str
        The call that records a step.
    times : bool
        Whether durations are those of a real device; otherwise there is no advice about time.
    caches : bool
        Whether the model may return a cache of keys and values; False where its ``config.use_cache`` is.
    advice : tuple of Advice
        Sentences on what to change.
    """

    groups: tuple[GroupReport, ...] = ()
    outside: Amounts | None = None
    outside_modules: Mapping[str, int] = field(default_factory=dict)
    passes: int = 0
    peak_resident_bytes: int | None = 0
    host_bytes: int = 0
    host_bytes_high_water: int = 0
    held: tuple[HeldStorage, ...] = ()
    expected_bytes: int | None = None
    dropped_bytes: int | None = None
    later_bytes: int = 0
    waiting_passes: int = 0
    step_seconds: float | None = None
    step_passes: int = 0
    because: str = ""
    next_choice: str = ""
    expected: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    proven_bytes: int = 0
    samples: int = 0
    arguments: Mapping[str, Any] | None = None
    kept_modules: tuple[str, ...] = ()
    record: str = "handle.recording()"
    times: bool = True
    caches: bool = True
    advice: tuple[str, ...] = ()

    @property
    def r(self) -> float | None:
        """Fraction `dropped_bytes` / `expected_bytes`; None if unknown or if nothing should be freed.

        It is what was freed when the forward ended, where the peak lies unless backward needs more.
        """
        drop = self.dropped_bytes
        return None if drop is None or not self.expected_bytes else drop / self.expected_bytes

    @property
    def coverage(self) -> float | None:
        """Share of `computed_bytes` that lies in groups, kept, offloaded or recomputed; None if unknown.

        What modules in ``keep`` save does not count.
        """
        if self.outside is None:
            return None
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
        return add_amounts([self.totals.kept, self.outside or {}])

    @property
    def activation_bytes(self) -> int:
        """Bytes of all activations that were saved, in the groups and outside."""
        return self.totals.activation_bytes + GroupReport("outside", kept=self.outside or {}).activation_bytes

    @property
    def computed_bytes(self) -> int:
        """Bytes of all activations that were saved or are recomputed; only of those saved if not all are known."""
        return self.activation_bytes + self.totals.bytes_recomputed * self._knows_recomputed

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
        sums = ("totals", "kept", "activation_bytes", "computed_bytes", "coverage", "r")
        found: dict[str, Any] = _plain({**vars(self), **{name: getattr(self, name) for name in sums}})
        return found

    def _content(self) -> tuple[list[Table], tuple[str, ...]]:
        facts = Table(("", ""), tuple(_facts(self)), left=2)
        tables = _groups_table(self), facts, _kept_table(self), _held_table(self)
        return [table for table in tables if table.rows], self.advice


def _plain(value: Any, key: object = None) -> Any:
    """Return a value ready for JSON; `key` is that of an entry of a mapping."""
    if isinstance(key, Reason):
        return {"tensors": value[0], "bytes": value[1]}
    if isinstance(value, GroupReport):
        sums = ("bytes_kept", "activation_bytes", "stall_seconds")
        return _plain({**vars(value), **{name: getattr(value, name) for name in sums}})
    if isinstance(value, HeldStorage):
        return {**vars(value), "holders": list(map(str, value.holders))}
    if isinstance(value, Mapping):
        return {key.name.lower() if isinstance(key, Reason) else key: _plain(each, key) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    if isinstance(value, Advice):
        return str(value)
    return "..." if value is ... else value.__name__ if isinstance(value, type) else value


@dataclass(frozen=True)
class Column:
    """A column of numbers, shown if the sum is not 0, or `always`; equal in the groups of a line but for `times`."""

    title: str
    value: Callable[[GroupReport], float | None]
    show: Callable[[float], Cell] = bytes_or_dash
    always: bool = False
    times: bool = False

    def mean(self, groups: Sequence[GroupReport]) -> Cell:
        """Return the cell of a line for several groups."""
        values = [value for group in groups if (value := self.value(group)) is not None]
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
    numbers = (column.value(group) for column in COLUMNS if not column.times)
    return numberless(group.name), group.kind, group.calls, group.offloaded_calls, stalled, *numbers


def _groups_table(report: Report) -> Table:
    """Return the table of groups, with their sums."""
    groups, totals = report.groups, report.totals
    folded = fold(groups, _key)
    possible = [column for column in COLUMNS if report.times or not column.times]
    columns = [column for column in possible if column.value(totals) or (column.always and groups)]
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
        part, whole = line[0].offloaded_calls, line[0].calls
        rows.append(row(name, f"{part} of {whole}" if 0 < part < whole else "yes" if line[0].offloaded else "no", line))
    if groups:
        rows.append(row("total", report.offloaded_share, (totals,)))
    header = (*compress(("group", "kind", "offload", "calls"), shown), *(column.title for column in columns))
    note = "\n".join(_notes(report, folded=len(folded) < len(groups)))
    return Table(header, tuple(rows), left=2 + kinds, sums=bool(groups), note=note)


def _notes(report: Report, *, folded: bool) -> Iterator[str]:
    if folded:
        yield "A line for several groups has the values of each of them."
    kept = sum(group.bytes_wasted for group in report.groups if not group.offloaded)
    for nbytes, because in (
        (report.totals.bytes_wasted - kept, "groups that are kept share the storages"),
        (kept, "the plan offloaded their groups, and they were kept because the execution order changed"),
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
    if (peak := report.peak_resident_bytes) is not None:
        # Some of them may count already: those that were to be freed only behind the peak.
        held = f", and up to {size(totals.bytes_not_freed)} more that were not freed" if totals.bytes_not_freed else ""
        yield "at the peak", f"{size(peak)} on the device, of what can be offloaded{held}"
    if report.waiting_passes:
        yield "in flight", f"{report.waiting_passes} more, whose backward was still to come when this forward ended"
    if report.r is not None:
        drop = f"{size(report.dropped_bytes or 0)} freed of {size(report.expected_bytes or 0)} that should be"
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
