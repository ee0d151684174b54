"""Shorten tables and lists of names: the thirty equal blocks of a model are one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

__all__ = ["fold", "fold_names", "numberless", "starred"]

Row = TypeVar("Row")


def fold(rows: Sequence[Row], key: Callable[[Row], Hashable], longest: int = 8) -> list[tuple[Row, ...]]:
    """Group rows that repeat, alone or in a pattern of several.

    Parameters
    ----------
    rows : sequence
        Rows in order.
    key : callable
        Rows with equal keys are equal.
    longest : int
        Rows in the longest pattern.

    Returns
    -------
    list of tuple
        The rows of each line.  A pattern of several rows has a line for each of its rows, where it begins.

    Examples
    --------
    >>> from actoffload.report.folding import fold
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
    """Return names in one line: those that differ in one number, at equal distances, as a range.

    Parameters
    ----------
    names : sequence of str
        Names in order.
    most : int
        Number of names and ranges that are listed.

    Examples
    --------
    >>> from actoffload.report.folding import fold_names
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
