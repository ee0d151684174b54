"""Write tables and sentences as text, Markdown or HTML; shorten repeated rows and names of repeated modules."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from tabulate import SEPARATING_LINE, tabulate

from ..schedule.timeline import size

__all__ = ["Printable", "Table", "bytes_or_dash", "fold", "fold_names", "numberless"]

Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """A table: the first `left` columns are text, the others numbers; with `sums` the last row has totals."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    sums: bool = False
    note: str = ""


class Printable:
    """What `_content` returns, tables and sentences, as text, Markdown and HTML, for ``print`` and for a notebook."""

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        raise NotImplementedError

    def _blocks(self, notation: str, show: Callable[[str], str], bold: str, note: str, item: str = "- {}") -> list[str]:
        """Return a text for each table with its note, and last one for the sentences, empty without any."""
        tables, sentences = self._content()
        grids = [_grid(table, notation, show, bold) for table in tables]
        notes = [note.format(show(table.note)) if table.note else "" for table in tables]
        items = "\n".join(item.format(show(sentence)) for sentence in sentences)
        return [*map("".join, zip(grids, notes, strict=True)), items]

    def __str__(self) -> str:
        return "\n\n".join(filter(None, self._blocks("simple", str, bold="{}", note="\n{}")))

    def to_markdown(self) -> str:
        """Return the tables in Markdown, as GitHub and MyST read it."""
        return "\n\n".join(filter(None, self._blocks("pipe", _markdown, bold="**{}**", note="\n\n{}")))

    def to_html(self) -> str:
        """Return the tables in HTML, without style sheet or script."""
        *blocks, items = self._blocks("unsafehtml", _html, bold="<b>{}</b>", note="\n<p>{}</p>", item="<li>{}</li>")
        blocks += [f"<ul>{items}</ul>"] if items else []
        return '<div class="actoffload-report">' + "\n".join(blocks) + "</div>"

    def _repr_html_(self) -> str:
        return self.to_html()


def _grid(table: Table, notation: str, show: Callable[[str], str], bold: str) -> str:
    """Return a table in a notation of tabulate; the row of sums is bold, or in text below a rule."""
    bar = "\\|" if notation == "pipe" else "|"
    rows: list[Sequence[str]] = [[show(cell).replace("|", bar) for cell in row] for row in (table.header, *table.rows)]
    if table.sums:
        rows[-1] = [bold.format(cell) if cell else cell for cell in rows[-1]]
        rows[-1:-1] = [SEPARATING_LINE] if notation == "simple" else []
    align = ["left" if k < table.left else "right" for k in range(len(table.header))]
    if notation == "simple" and not any(table.header):
        return str(tabulate(rows[1:], tablefmt="plain", colalign=align, disable_numparse=True))
    return str(tabulate(rows[1:], rows[0], tablefmt=notation, colalign=align, disable_numparse=True))


def _markdown(words: str) -> str:
    """Escape what Markdown would take for its own, but for the code between backticks."""
    words = " ".join(words.split())
    parts = words.split("`") if words.count("`") % 2 == 0 else [words.replace("`", "\\`")]
    return "`".join(part if k % 2 else re.sub(r"([\\*_<>\[\]#~$])", r"\\\1", part) for k, part in enumerate(parts))


def _html(words: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))


def bytes_or_dash(number: float) -> str:
    """Return a number of bytes in MiB or the like; a dash for 0."""
    return size(int(number)) if number else "-"


def fold(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[tuple[Row, ...]]:
    """Group rows with equal keys, at the place of the first of them."""
    folded: dict[Hashable, list[Row]] = {}
    for row in rows:
        folded.setdefault(key(row), []).append(row)
    return [tuple(same) for same in folded.values()]


def fold_names(names: Sequence[str], most: int = 3) -> str:
    """Return names in one line, at most `most` and a count; those that differ in one number are a range.

    >>> from actoffload.report.tables import fold_names
    >>> fold_names(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "head", "head"])
    'layers.0 ... 2.mlp, head (2 times)'
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
    parts = zip(*(re.split(r"(\d+)", name) for name in (names[0], names[1], names[-1])), strict=True)
    return "".join(a if a == c else f"{a} ... {c}" if step == 1 else f"{a}, {b} ... {c}" for a, b, c in parts)


def _step(names: Sequence[str]) -> int:
    """Return the distance of the one number in which names differ; 0 if they differ otherwise."""
    if len(names) < 2 or len(set(map(numberless, names))) > 1:
        return 0
    columns = zip(*(map(int, re.findall(r"\d+", name)) for name in names), strict=True)
    differ = [column for column in columns if len(set(column)) > 1]
    steps = {after - before for column in differ for before, after in pairwise(column)}
    return steps.pop() if len(differ) == 1 and len(steps) == 1 else 0


def numberless(name: str) -> str:
    """Return a name with its numbers replaced: what the names of repeated modules have in common."""
    return re.sub(r"\d+", "#", name)
