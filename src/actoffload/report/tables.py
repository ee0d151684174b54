"""Write tables and sentences as text, Markdown or HTML; shorten repeated rows and names of repeated modules."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from tabulate import SEPARATING_LINE, tabulate

__all__ = ["Table", "as_html", "as_markdown", "as_text", "fold", "fold_names", "numberless", "starred"]

Row = TypeVar("Row")


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


def fold(rows: Sequence[Row], key: Callable[[Row], Hashable], longest: int = 8) -> list[tuple[Row, ...]]:
    """Group rows with equal keys that repeat, alone or in a pattern of at most `longest` rows, which are a line each.

    >>> from actoffload.report.tables import fold
    >>> fold(["a", "b", "a", "b", "a", "b", "c"], key=str)
    [('a', 'a', 'a'), ('b', 'b', 'b'), ('c',)]
    """
    keys = [key(row) for row in rows]
    folded: list[tuple[Row, ...]] = []
    start = 0
    while start < len(rows):
        period, times = _pattern(keys[start:], longest)
        for k in range(start, start + period):
            folded.append(tuple(rows[k : k + period * times : period]))
        start += period * times
    return folded


def _pattern(keys: Sequence[Hashable], longest: int) -> tuple[int, int]:
    """Return the length of the pattern with which a sequence begins, and how often it repeats."""
    best = (1, 1)
    for period in range(1, min(longest, len(keys) // 2) + 1):
        times = 1
        while keys[times * period : (times + 1) * period] == keys[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def fold_names(names: Sequence[str], most: int = 3) -> str:
    """Return names in one line, at most `most` and a count; those that differ in one number are a range.

    >>> from actoffload.report.tables import fold_names
    >>> fold_names(["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"])
    'model.layers.0 ... 2.mlp'
    >>> fold_names(["layers.0", "layers.2", "layers.4"])
    'layers.0, 2 ... 4'
    >>> fold_names(["layer", "layer", "layer", "head"])
    'layer (3 times), head'
    >>> fold_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    parts = [list(names)] if _range(names) else _runs(names)
    shown = [part[0] if len(part) == 1 else _range(part) or f"{part[0]} ({len(part)} times)" for part in parts[:most]]
    more = sum(map(len, parts[most:]))
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _runs(names: Sequence[str]) -> list[list[str]]:
    """Split names into runs of equal ones and of those whose number counts up by one."""
    found: list[list[str]] = []
    for name in names:
        if found and (set(found[-1]) == {name} or _step([*found[-1], name]) == 1):
            found[-1].append(name)
        else:
            found.append([name])
    return found


def _range(names: Sequence[str]) -> str:
    """Return one name for several whose numbers are at equal distances; empty if they are not."""
    step = _step(names)
    # Two names are a range only if nothing is between them.
    if not step or (step != 1 and len(names) < 3):
        return ""
    parts, second, last = (re.split(r"(\d+)", name) for name in (names[0], names[1], names[-1]))
    k = next(k for k, (a, b) in enumerate(zip(parts, last, strict=True)) if a != b)
    parts[k] += f" ... {last[k]}" if step == 1 else f", {second[k]} ... {last[k]}"
    return "".join(parts)


def _step(names: Sequence[str]) -> int:
    """Return the distance of the one number in which names differ; 0 if they differ otherwise."""
    if len(names) < 2 or len(set(map(numberless, names))) > 1:
        return 0
    columns = list(zip(*(re.findall(r"\d+", name) for name in names), strict=True))
    differ = [list(map(int, column)) for column in columns if len(set(column)) > 1]
    steps = {after - before for column in differ for before, after in pairwise(column)}
    return steps.pop() if len(differ) == 1 and len(steps) == 1 else 0


def numberless(name: str) -> str:
    """Return a name with its numbers replaced: what the names of repeated modules have in common."""
    return re.sub(r"\d+", "#", name)


def starred(names: Sequence[str]) -> str:
    """Return a pattern for names that differ in numbers alone: ``layers[*].keys``."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)
