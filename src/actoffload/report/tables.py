"""Write tables and sentences as text, Markdown or HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import SEPARATING_LINE, tabulate

__all__ = ["Table", "as_html", "as_markdown", "as_text"]


@dataclass(frozen=True)
class Table:
    """A table: the first `left` columns are text, the others numbers; with `sums` the last row has totals."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    sums: bool = False
    note: str = ""


def as_text(tables: Sequence[Table], sentences: Sequence[str] = ()) -> str:
    """Return tables, and a list of sentences behind them, for a terminal."""
    blocks = []
    for table in tables:
        grid = _grid(table, "simple" if any(table.header) else "plain", str, rule=True)
        blocks.append(f"{grid}\n{table.note}" if table.note else grid)
    if sentences:
        blocks.append("\n".join(f"- {sentence}" for sentence in sentences))
    return "\n\n".join(blocks)


def as_markdown(tables: Sequence[Table], sentences: Sequence[str] = ()) -> str:
    """Return tables, and a list of sentences behind them, in Markdown."""
    blocks = []
    for table in tables:
        blocks.append(_grid(table, "pipe", lambda cell: _markdown(cell).replace("|", "\\|"), bold="**{}**"))
        blocks += [_markdown(table.note)] if table.note else []
    if sentences:
        blocks.append("\n".join(f"- {_markdown(sentence)}" for sentence in sentences))
    return "\n\n".join(blocks)


def as_html(tables: Sequence[Table], sentences: Sequence[str] = ()) -> str:
    """Return tables, and a list of sentences behind them, in HTML."""
    blocks = []
    for table in tables:
        blocks.append(str(_grid(table, "unsafehtml", _html, bold="<b>{}</b>")))
        blocks += [f"<p>{_html(table.note)}</p>"] if table.note else []
    if sentences:
        blocks.append("<ul>" + "".join(f"<li>{_html(sentence)}</li>" for sentence in sentences) + "</ul>")
    return '<div class="actoffload-report">' + "\n".join(blocks) + "</div>"


def _grid(table: Table, notation: str, show: Callable[[str], str], *, rule: bool = False, bold: str = "{}") -> str:
    """Return a table in a notation of tabulate; the row of sums is bold, or a rule is above it."""
    rows: list[Sequence[str]] = [list(map(show, row)) for row in table.rows]
    if table.sums:
        rows[-1] = [bold.format(cell) if cell else cell for cell in rows[-1]]
        rows[-1:-1] = [SEPARATING_LINE] if rule else []
    align = ["left" if k < table.left else "right" for k in range(len(table.header))]
    header = list(map(show, table.header)) if notation != "plain" else ()
    return str(tabulate(rows, header, tablefmt=notation, colalign=align, disable_numparse=True))


def _markdown(words: str) -> str:
    """Escape what Markdown would take for its own, but for the code between backticks."""
    words = " ".join(words.split())
    parts = words.split("`") if words.count("`") % 2 == 0 else [words.replace("`", "\\`")]
    return "`".join(part if k % 2 else re.sub(r"([\\*_<>\[\]#~$])", r"\\\1", part) for k, part in enumerate(parts))


def _html(words: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))
