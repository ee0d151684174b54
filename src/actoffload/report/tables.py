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

    def __str__(self) -> str:
        tables, sentences = self._content()
        blocks = []
        for table in tables:
            grid = _grid(table, "simple" if any(table.header) else "plain", str, rule=True)
            blocks.append(f"{grid}\n{table.note}" if table.note else grid)
        items = "\n".join(f"- {sentence}" for sentence in sentences)
        return "\n\n".join([*blocks, items] if items else blocks)

    def to_markdown(self) -> str:
        """Return the tables in Markdown, as GitHub and MyST read it."""
        tables, sentences = self._content()
        blocks = []
        for table in tables:
            grid = _grid(table, "pipe", lambda cell: _markdown(cell).replace("|", "\\|"), bold="**{}**")
            blocks += [grid, _markdown(table.note)]
        blocks.append("\n".join(f"- {_markdown(sentence)}" for sentence in sentences))
        return "\n\n".join(filter(None, blocks))

    def to_html(self) -> str:
        """Return the tables in HTML, without style sheet or script."""
        tables, sentences = self._content()
        blocks = []
        for table in tables:
            blocks.append(_grid(table, "unsafehtml", _html, bold="<b>{}</b>"))
            blocks += [f"<p>{_html(table.note)}</p>"] if table.note else []
        items = "".join(f"<li>{_html(sentence)}</li>" for sentence in sentences)
        blocks += [f"<ul>{items}</ul>"] if items else []
        return '<div class="actoffload-report">' + "\n".join(blocks) + "</div>"

    def _repr_html_(self) -> str:
        return self.to_html()


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
    parts, second, last = (re.split(r"(\d+)", name) for name in (names[0], names[1], names[-1]))
    k = next(k for k, (a, b) in enumerate(zip(parts, last, strict=True)) if a != b)
    parts[k] += f" ... {last[k]}" if step == 1 else f", {second[k]} ... {last[k]}"
    return "".join(parts)


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
