"""Write tables and sentences as text or Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import SEPARATING_LINE, tabulate

__all__ = ["ByteUnit", "Bytes", "Cell", "Printable", "Table", "bytes_or_dash"]


@dataclass(frozen=True, slots=True)
class ByteUnit:
    """Unit of all numbers of bytes in one figure or table, and how many decimals they have."""

    nbytes: int
    name: str
    digits: int

    @classmethod
    def of(cls, largest: float) -> ByteUnit:
        """Return the unit for numbers up to `largest` bytes: GiB, MiB or KiB from one of it on."""
        units = (cls(2**30, "GiB", 2), cls(2**20, "MiB", 1), cls(2**10, "KiB", 1))
        return next((unit for unit in units if largest >= unit.nbytes), cls(1, "bytes", 0))

    def text(self, nbytes: float) -> str:
        """Return a number of bytes in this unit."""
        return f"{nbytes / self.nbytes:.{self.digits}f} {self.name}"


@dataclass(frozen=True)
class Bytes:
    """A number of bytes in a table, which has one unit for all of them."""

    nbytes: float

    def text(self, unit: ByteUnit) -> str:
        """Return the number in a unit."""
        small = unit.nbytes > 1 and self.nbytes / unit.nbytes < 0.05
        return f"< 0.1 {unit.name}" if small else unit.text(self.nbytes)


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
        """Return the rows as texts, in the largest unit up to MiB of which some row, the totals apart, has one."""
        rows = self.rows[:-1] if self.sums and len(self.rows) > 1 else self.rows
        largest = max([cell.nbytes for row in rows for cell in row if isinstance(cell, Bytes)], default=0)
        unit = ByteUnit.of(min(largest, 2**30 - 1))
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
