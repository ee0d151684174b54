"""Write tables and sentences as text or Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import SEPARATING_LINE, tabulate

__all__ = ["Bytes", "Cell", "Printable", "Table", "bytes_or_dash"]


@dataclass(frozen=True)
class Bytes:
    """A number of bytes in a table, which has one unit for all of them."""

    nbytes: float

    def text(self, unit: int) -> str:
        """Return the number in a unit, which is given in bytes."""
        if unit == 1:
            return f"{self.nbytes:.0f} bytes"
        name, number = UNITS[unit], self.nbytes / unit
        return f"< 0.1 {name}" if number < 0.05 else f"{number:.1f} {name}"


UNITS = {2**20: "MiB", 2**10: "KiB", 1: "bytes"}
Cell = str | Bytes


@dataclass(frozen=True)
class Table:
    """A table: the first `left` columns are text, the others numbers; with `sums` the last row has totals."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left: int
    sums: bool = False
    note: str = ""

    def texts(self) -> list[list[str]]:
        """Return the rows as texts, in the largest unit of which some row, that of the totals apart, has one."""
        rows = self.rows[:-1] if self.sums and len(self.rows) > 1 else self.rows
        largest = max([cell.nbytes for row in rows for cell in row if isinstance(cell, Bytes)], default=0)
        unit = next((unit for unit in UNITS if largest >= unit), 1)
        return [[cell.text(unit) if isinstance(cell, Bytes) else cell for cell in row] for row in self.rows]


class Printable:
    """Print the tables and sentences of `_content` as text, in a notebook as Markdown."""

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        raise NotImplementedError

    def _text(self, notation: str, show: Callable[[str], str], bold: str, note: str) -> str:
        tables, sentences = self._content()
        blocks = [
            _grid(table, notation, show, bold) + (note.format(show(table.note)) if table.note else "")
            for table in tables
        ]
        blocks.append("\n".join(f"- {show(sentence)}" for sentence in sentences))
        return "\n\n".join(filter(None, blocks))

    def __str__(self) -> str:
        return self._text("simple", str, bold="{}", note="\n{}")

    def to_markdown(self) -> str:
        """Return the tables in Markdown, as GitHub and MyST read it."""
        return self._text("pipe", _markdown, bold="**{}**", note="\n\n{}")

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def _grid(table: Table, notation: str, show: Callable[[str], str], bold: str) -> str:
    """Return a table in a notation of tabulate; the row of sums is bold, or in text below a rule."""
    bar = "\\|" if notation == "pipe" else "|"
    rows: list[Sequence[str]] = [
        [show(cell).replace("|", bar) for cell in row] for row in (table.header, *table.texts())
    ]
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


def bytes_or_dash(number: float) -> Cell:
    """Return a cell with a number of bytes; a dash for 0."""
    return Bytes(number) if number else "-"
