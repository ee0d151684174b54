"""Reports as text, Markdown or HTML: the same tables and sentences in three notations."""

from __future__ import annotations

import html as html_escapes
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine.statistics import mebibytes
from .folding import fold, name_of_all, numberless

if TYPE_CHECKING:
    from .report import GroupReport, Report

__all__ = [
    "Table",
    "as_html",
    "as_markdown",
    "as_text",
    "html",
    "markdown",
    "milliseconds",
    "percent",
    "size",
    "text",
    "text_table",
]

MOST_HELD = 12


def size(nbytes: int) -> str:
    """Return a size as people read it."""
    if nbytes >= 2**20:
        return mebibytes(nbytes)
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes} bytes"


def milliseconds(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{seconds * 1e3:.2f} ms"


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction as people read it."""
    return f"{fraction * 100:.{digits}f} %"


@dataclass(frozen=True)
class Table:
    """A table: the first `left` columns are text, the others numbers; the last row may be of sums."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    sums: bool = False
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A column of numbers: its title, what it shows of a row of some groups, and whether it is shown if all is 0."""

    title: str
    of: Callable[[GroupReport], float | None]
    show: Callable[[float], str]
    always: bool = False


def _count(number: float) -> str:
    return str(int(number)) if number else "-"


def _bytes(number: float) -> str:
    return size(int(number)) if number else "-"


COLUMNS = (
    Column("saved", lambda group: group.bytes_saved, _bytes, always=True),
    Column("offloaded", lambda group: group.bytes_offloaded, _bytes, always=True),
    Column("kept", lambda group: group.bytes_kept, _bytes),
    Column("on demand", lambda group: group.reloaded_on_demand, _count),
    Column("not freed", lambda group: group.bytes_not_freed, _bytes),
    Column("forward", lambda group: group.forward_seconds, milliseconds),
    Column("backward", lambda group: group.backward_seconds, milliseconds),
    Column("stalled", lambda group: group.stall_seconds, milliseconds),
)


def _key(group: GroupReport) -> tuple[object, ...]:
    """Return what rows have in common that are shown as one; compute is never quite equal, and left out."""
    stalled = group.stall_seconds
    return (
        numberless(group.name),
        group.kind,
        group.calls,
        group.leaves,
        group.bytes_saved,
        group.bytes_offloaded,
        group.bytes_kept,
        group.reloaded_on_demand,
        group.bytes_not_freed,
        None if stalled is None else round(stalled * 1e4),
    )


def groups_table(report: Report, *, all_groups: bool) -> Table:
    """Return the table of groups, with their sums."""
    totals = report.totals
    folded = [(group,) for group in report.groups] if all_groups else fold(report.groups, _key)
    columns = [column for column in COLUMNS if column.of(totals) or (column.always and report.groups)]
    if totals.stall_seconds is not None:  # 0.00 ms is news
        columns = [column for column in COLUMNS if column in columns or column.title == "stalled"]
    kinds = len({group.kind for group in report.groups}) > 1
    calls = any(group.calls != 1 for group in report.groups)
    header = ("group", *(("kind",) if kinds else ()), "leaves", *(("calls",) if calls else ()))
    rows = []
    for groups in folded:
        first = groups[0]
        name = name_of_all([group.name for group in groups])
        cells = [f"{name} ({len(groups)} groups)" if len(groups) > 1 else name]
        cells += [first.kind] if kinds else []
        cells += ["yes" if first.leaves else "no"]
        cells += [str(first.calls)] if calls else []
        rows.append((*cells, *(_mean(column, groups) for column in columns)))
    if report.groups:
        leaving = f"{len(report.leaving)} of {len(report.groups)}"
        cells = ["total", *([""] if kinds else []), leaving, *([str(totals.calls)] if calls else [])]
        rows.append((*cells, *(_mean(column, (totals,)) for column in columns)))
    return Table(
        header=(*header, *(column.title for column in columns)),
        rows=tuple(rows),
        left=2 + kinds,
        sums=bool(report.groups),
        note="\n".join(_notes(report, folded=len(folded) < len(report.groups))),
    )


def _notes(report: Report, *, folded: bool) -> Iterator[str]:
    totals = report.totals
    if folded:
        yield "A line for several groups shows what each of them has."
    staying = sum(group.bytes_in_vain for group in report.groups if not group.leaves)
    for nbytes, because in (
        (totals.bytes_in_vain - staying, "groups that stay share it"),
        (staying, "its groups were expected to leave, and stay because the pass took another course"),
    ):
        if nbytes:
            yield (
                f"{size(nbytes)} of what was offloaded is kept as well, because {because}: these bytes were copied in "
                "vain, and are not reloaded."
            )
    if report.step_passes > 1:
        passes = f"the {report.step_passes} forward passes of the recorded step"
        yield f"Times are sums over {passes}; bytes are of the last."


def _mean(column: Column, groups: Sequence[GroupReport]) -> str:
    values = [value for group in groups if (value := column.of(group)) is not None]
    return column.show(sum(values) / len(values)) if values else "-"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    totals = report.totals
    yield "passes", str(report.passes)
    yield "at the peak", f"{size(report.peak_resident_bytes)} of saved activations on the device"
    if report.r is not None:
        expected, dropped = size(report.expected_bytes or 0), size(report.dropped_bytes or 0)
        yield "R", f"{percent(report.r, 2)}: of {expected} that should be gone, {dropped} are"
    if totals.bytes_offloaded:
        ahead, demand = totals.reloaded_ahead, totals.reloaded_on_demand
        yield "reloaded", f"{size(totals.bytes_reloaded)}: {ahead} storages ahead, {demand} on demand"
    yield "host memory", f"{size(report.host_bytes)} held, at most {size(report.host_bytes_high_water)} in use"
    if report.step_seconds:
        stalled = totals.stall_seconds or 0.0
        share = percent(stalled / report.step_seconds)
        yield "step", f"{milliseconds(report.step_seconds)}, {milliseconds(stalled)} of it stalled ({share})"
    if report.order:
        yield "order", report.order


def _kept_table(report: Report) -> Table:
    from .report import WEIGHTS

    inside = report.totals.kept
    rows = []
    for reason in sorted(report.kept, key=lambda reason: reason in WEIGHTS):  # no activations: behind the others
        count, nbytes = report.kept[reason]
        within = inside.get(reason, (0, 0))[1]
        words = f"{reason.value} (stays in any case)" if reason in WEIGHTS else reason.value
        rows.append((words, str(count), _bytes(within), _bytes(nbytes - within)))
    header = ("kept on the device", "tensors", "in groups", "outside")
    return Table(header, tuple(rows), left=1)


def _held_table(report: Report, *, all_groups: bool) -> Table:
    from .held import merge_held

    merged = merge_held(report.held)
    rows: list[tuple[str, str, str]] = []
    for groups, nbytes, holders in merged if all_groups else merged[:MOST_HELD]:
        lines = tuple(map(str, holders)) or ("autograd of another graph, or C++",)
        rows.append((name_of_all(groups), lines[0], size(nbytes)))
        rows += [("", line, "") for line in lines[1:]]
    left_out = len(merged) - MOST_HELD
    note = f"and {left_out} more" if left_out > 0 and not all_groups else ""
    return Table(("not freed, copied from", "because of", "bytes"), tuple(rows), left=2, note=note)


def _tables(report: Report, *, all_groups: bool) -> list[Table]:
    tables = [groups_table(report, all_groups=all_groups)]
    tables.append(Table(("", ""), tuple(_facts(report)), left=2))
    tables += [_kept_table(report), _held_table(report, all_groups=all_groups)]
    return [table for table in tables if table.rows]


def text(report: Report, *, all_groups: bool = False) -> str:
    """Return a report for a terminal; see `Report.to_text`."""
    return as_text(_tables(report, all_groups=all_groups), report.advice)


def markdown(report: Report, *, all_groups: bool = False) -> str:
    """Return a report in Markdown; see `Report.to_markdown`."""
    return as_markdown(_tables(report, all_groups=all_groups), report.advice)


def html(report: Report, *, all_groups: bool = False) -> str:
    """Return a report in HTML; see `Report.to_html`."""
    return as_html(_tables(report, all_groups=all_groups), report.advice)


def as_text(tables: Sequence[Table], sentences: Sequence[str] = ()) -> str:
    """Return tables, and a list of sentences behind them, for a terminal."""
    blocks = ["\n".join(text_table(table)) for table in tables]
    if sentences:
        blocks.append("\n".join(f"- {sentence}" for sentence in sentences))
    return "\n\n".join(blocks)


def text_table(table: Table) -> Iterator[str]:
    """Yield the lines of a table for a terminal."""
    shown = [table.header, *table.rows] if any(table.header) else list(table.rows)
    widths = [max(len(row[k]) for row in shown) for k in range(len(table.header))]

    def line(row: Sequence[str]) -> str:
        columns = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if k < table.left else cell.rjust(width) for k, (cell, width) in columns]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    if any(table.header):
        yield line(table.header)
        yield rule
    body = table.rows[:-1] if table.sums else table.rows
    yield from map(line, body)
    if table.sums:
        yield rule
        yield line(table.rows[-1])
    if table.note:
        yield table.note


def as_markdown(tables: Sequence[Table], sentences: Sequence[str] = ()) -> str:
    """Return tables, and a list of sentences behind them, in Markdown."""
    blocks = []
    for table in tables:
        sides = [":---" if k < table.left else "---:" for k in range(len(table.header))]
        lines = [_markdown_row(table.header), _markdown_row(sides, raw=True)]
        last = len(table.rows) - 1 if table.sums else None
        lines += [_markdown_row(row, bold=k == last) for k, row in enumerate(table.rows)]
        blocks.append("\n".join(lines))
        if table.note:
            blocks.append(_markdown_text(table.note))
    if sentences:
        blocks.append("\n".join(f"- {_markdown_text(sentence)}" for sentence in sentences))
    return "\n\n".join(blocks)


def _markdown_row(cells: Sequence[str], *, raw: bool = False, bold: bool = False) -> str:
    shown = cells if raw else [_markdown_text(cell).replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(f"**{cell}**" if bold and cell else cell for cell in shown) + " |"


def _markdown_text(words: str) -> str:
    """Escape what Markdown would take for its own, but for the code between backticks."""
    words = " ".join(words.split())
    parts = words.split("`") if words.count("`") % 2 == 0 else [words.replace("`", "\\`")]
    return "`".join(part if k % 2 else re.sub(r"([\\*_<>\[\]#~$])", r"\\\1", part) for k, part in enumerate(parts))


def as_html(tables: Sequence[Table], sentences: Sequence[str] = ()) -> str:
    """Return tables, and a list of sentences behind them, in HTML."""
    blocks = [_html_table(table) for table in tables]
    if sentences:
        blocks.append("<ul>" + "".join(f"<li>{_html_text(sentence)}</li>" for sentence in sentences) + "</ul>")
    return '<div class="actoffload-report">' + "\n".join(blocks) + "</div>"


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        shown = (
            f'<{tag} style="text-align: {"left" if k < table.left else "right"}">{_html_text(cell)}</{tag}>'
            for k, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = table.rows[:-1] if table.sums else table.rows
    parts = [f"<thead>{row(table.header, 'th')}</thead>"] if any(table.header) else []
    parts.append(f"<tbody>{''.join(row(cells, 'td') for cells in body)}</tbody>")
    if table.sums:
        parts.append(f"<tfoot>{row(table.rows[-1], 'th')}</tfoot>")
    note = f"<p>{_html_text(table.note)}</p>" if table.note else ""
    return f"<table>{''.join(parts)}</table>{note}"


def _html_text(words: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html_escapes.escape(words))
