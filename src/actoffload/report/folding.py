"""Tables of many equal rows made short: the thirty equal blocks of a model are one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

__all__ = ["fold", "name_of_all", "numberless", "starred"]

Row = TypeVar("Row")


def fold(rows: Sequence[Row], key: Callable[[Row], Hashable], longest: int = 8) -> list[tuple[Row, ...]]:
    """Put rows together that repeat, alone or in a pattern of several.

    Parameters
    ----------
    rows : sequence
        What to fold, in order.
    key : callable
        Rows with equal keys are equal.
    longest : int
        Rows in the longest pattern that is looked for.

    Returns
    -------
    list of tuple
        The rows that each line stands for.  Where a pattern of several rows repeats there is a line for each of
        its rows, at the place where the pattern begins.

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
    """Return the length of the pattern with which a sequence begins, and how often it comes."""
    best = (1, 1)
    for period in range(1, min(longest, len(keys) // 2) + 1):
        times = 1
        while keys[times * period : (times + 1) * period] == keys[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def numberless(name: str) -> str:
    """Return a name with its numbers struck out: what the names of repeated modules have in common."""
    return re.sub(r"\d+", "#", name)


def starred(names: Sequence[str]) -> str:
    """Return a pattern for names that differ in numbers alone: ``layers[*].keys``."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def name_of_all(names: Sequence[str]) -> str:
    """Return one name for several.

    Examples
    --------
    >>> from actoffload.report.folding import name_of_all
    >>> name_of_all(["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"])
    'model.layers.0 … 2.mlp'
    >>> name_of_all(["layers.0", "layers.2", "layers.4"])
    'layers.0, 2 … 4'
    >>> name_of_all(["encoder", "decoder"])
    'encoder, decoder'
    >>> name_of_all(["a", "b", "c", "d", "e"])
    'a, b and 3 more'
    """
    rows = [re.split(r"(\d+)", name) for name in names]
    if len(names) > 1 and len({numberless(name) for name in names}) == 1:
        differ = [k for k, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
        if len(differ) == 1:
            (k,), first = differ, rows[0]
            steps = {int(after[k]) - int(before[k]) for before, after in pairwise(rows)}
            # Three dots stand for what everybody would put there, so only for numbers at equal distances.
            if len(steps) == 1 and (steps == {1} or len(names) > 2):
                first[k] += "" if steps == {1} else f", {rows[1][k]}"
                first[k] += f" … {rows[-1][k]}"
                return "".join(first)
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"
