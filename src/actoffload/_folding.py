"""Shorten repeated rows of a table, and the names of repeated modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

__all__ = ["fold", "fold_names", "numberless"]

Row = TypeVar("Row")


def fold(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[tuple[Row, ...]]:
    """Group rows with equal keys, at the place of the first of them."""
    folded: dict[Hashable, list[Row]] = {}
    for row in rows:
        folded.setdefault(key(row), []).append(row)
    return [tuple(same) for same in folded.values()]


def fold_names(names: Sequence[str], most: int = 3) -> str:
    """Return names in one line, at most `most` and a count; those that differ in one number are a range.

    >>> from actoffload._folding import fold_names
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
