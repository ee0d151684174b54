"""Numbers with their units, names of repeated modules in one line, tables, and plain data as text.

`[Note: messages]`  Messages between ranks and files of plans are plain data.  A process that can write to the store of
`torch.distributed` can post a message.  If messages were pickles, such a message could run any code in every rank.  So
reading one makes plain values and objects of registered classes of data, and calls nothing else.  Numbers stay exact:
JSON has all digits of an integer, and the shortest text that gives the same float.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from tabulate import SEPARATING_LINE, tabulate

# Numbers


def byte_unit(nbytes: float) -> tuple[int, str]:
    """Return the unit in which a number of bytes is written, as bytes and as a name: GiB or MiB from one of it on."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((unit for unit in units if abs(nbytes) >= unit[0]), (1, "bytes"))


def size(nbytes: float) -> str:
    """Return bytes as text, such as ``1.50 GiB`` or ``512.0 MiB``."""
    unit, name = byte_unit(nbytes)
    digits = {"GiB": 2, "bytes": 0}.get(name, 1)
    return f"{nbytes / unit:.{digits}f} {name}"


def size_or_dash(nbytes: float) -> str:
    """Return bytes as text, a dash for 0."""
    return size(nbytes) if nbytes else "-"


def milliseconds(seconds: float, digits: int = 2) -> str:
    """Return seconds in ms."""
    return f"{seconds * 1e3:.{digits}f} ms"


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction in percent."""
    return f"{fraction * 100:.{digits}f} %"


# Names

Row = TypeVar("Row")


def fold(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[tuple[Row, ...]]:
    """Group rows with equal keys, at the place of the first of them."""
    folded: dict[Hashable, list[Row]] = {}
    for row in rows:
        folded.setdefault(key(row), []).append(row)
    return [tuple(same) for same in folded.values()]


def fold_names(names: Iterable[str], most: int = 3) -> str:
    """Return names in one line: three or more whose number grows by one as a range, at most `most` parts.

    Members of one list have its name once.

    >>> from actoffload._text import fold_names
    >>> fold_names(["layers.0", "layers.1", "layers.3", "layers.4", "layers.5", "head", "tail"])
    'layers.0, 1, 3 ... 5 and 2 more'
    """
    runs: list[list[str]] = []
    for name in dict.fromkeys(names):
        if runs and name in _successors(runs[-1][0], len(runs[-1])) and name in _successors(runs[-1][-1], 1):
            runs[-1].append(name)
        else:
            runs.append([name])
    parts: list[tuple[str, int]] = []
    for run in runs:
        if len(run) > 2:
            parts.append((_successors(run[0], len(run) - 1)[run[-1]], len(run)))
        else:
            parts += [(name, 1) for name in run]
    texts, latest = [], ""
    for text, _ in parts[:most]:
        member = re.fullmatch(r"(.*\.)\d+", text.partition(" ")[0])
        prefix = "" if member is None else member[1]
        texts.append(text.removeprefix(prefix) if prefix == latest else text)
        latest = prefix
    more = sum(number for _, number in parts[most:])
    return ", ".join(texts) + (f" and {more} more" if more else "")


def line_name(names: Sequence[str], things: str) -> str:
    """Return the name of a line of a table that stands for several things, of which each has its values."""
    return fold_names(names) + (f" ({len(names)} {things}, each)" if len(names) > 1 else "")


def _successors(name: str, steps: int) -> dict[str, str]:
    """Return the names with one number increased by some steps, each with the range from this name to it."""
    found = {}
    for number in re.finditer(r"\d+", name):
        end = f"{int(number[0]) + steps}{name[number.end() :]}"
        found[name[: number.start()] + end] = f"{name[: number.end()]} ... {end}"
    return found


def numberless(name: str) -> str:
    """Return a name with its numbers replaced: what the names of repeated modules have in common."""
    return re.sub(r"\d+", "#", name)


NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")  # not the 1 of "fc1"


def name_pattern(name: str) -> str:
    """Return the name of a module with ``*`` in place of indices."""
    return NUMBER.sub("*", name)


# Tables


@dataclass(frozen=True)
class Table:
    """A table: the first `left` columns are text, the others numbers; with `sums` the last row has totals."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    sums: bool = False
    note: str = ""

    def __str__(self) -> str:
        rows: list[Sequence[str]] = list(self.rows)
        if self.sums:
            rows.insert(-1, SEPARATING_LINE)
        header, notation = (self.header, "simple") if any(self.header) else ((), "plain")
        align = ["left" if k < self.left else "right" for k in range(len(self.header))]
        text = str(tabulate(rows, header, tablefmt=notation, colalign=align, disable_numparse=True))
        return f"{text}\n{self.note}" if self.note else text


# Plain data as JSON

# Containers, and the dataclasses, named tuples and enumerations that are registered.
_kinds: dict[str, Any] = {kind.__name__: kind for kind in (tuple, set, frozenset, dict)}


class UnreadableError(Exception):
    """Bytes are no plain data that this version writes."""


def register(*kinds: type) -> None:
    """Let plain data have objects of some classes."""
    _kinds.update({kind.__name__: kind for kind in kinds})


def written(message: Any, indent: int | None = None) -> bytes:
    """Return plain data as bytes; raises a `TypeError` for objects of a class that is not registered."""
    return json.dumps(_plain(message), indent=indent).encode()


def read(data: bytes) -> Any:
    """Return the plain data that was written as some bytes; raises an `UnreadableError` if it is none."""
    try:
        return _made(json.loads(data))
    except Exception as error:  # whatever the classes raise for values that they do not take
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value as what JSON has; an object with one key says what a value was."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    name = type(value).__name__
    if _kinds.get(name) is type(value):
        if isinstance(value, enum.Enum):
            return {name: value.name}
        names = [each.name for each in fields(value)] if is_dataclass(value) else getattr(value, "_fields", None)
        if names is None:
            return {name: [_plain(item) for item in value]}
        return {name: {each: _plain(getattr(value, each)) for each in names}}
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"{name} is not registered for messages.")


def _made(plain: Any) -> Any:
    """Return the value that `_plain` was called with."""
    if isinstance(plain, list):
        return [_made(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((name, content),) = plain.items()
    kind = _kinds[name]
    if isinstance(kind, enum.EnumMeta):
        return kind[content]
    if isinstance(content, dict):
        return kind(**{key: _made(item) for key, item in content.items()})
    return kind(_made(content))
