"""Shorten repeated rows of a table, and the names of repeated modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
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
    """Return names in one line, at most `most` parts and the number of further names, if there are two or more.

    What names that differ in one number have in common is written once, and three or more in a row are a range.

    >>> from actoffload._folding import fold_names
    >>> fold_names(["layers.0", "layers.1", "layers.3", "layers.4", "layers.5", "head", "head"], most=4)
    'layers.0, 1, 3 ... 5, head (2 times)'
    >>> fold_names(["layers.2", "layers.4", "layers.6", "layers.8", "layers.10"])
    'layers.2, 4, 6 and 2 more'
    """
    parts = [part for family in _families(names) for part in family.parts()]
    most += len(parts) == most + 1 and parts[-1][1] == 1  # "and 1 more" is no shorter than a name
    more = sum(number for _, number in parts[most:])
    return ", ".join(text for text, _ in parts[:most]) + (f" and {more} more" if more else "")


class _Family:
    """Names in a row that differ in one number, or one name and how often it comes."""

    def __init__(self, name: str, times: int) -> None:
        self._first, self._times = re.split(r"(\d+)", name), times
        self._place = 0  # of the number in which the names differ
        self._numbers: list[str] = []

    def take(self, name: str, times: int) -> bool:
        """Return whether another name belongs to these, and add it if so."""
        other = re.split(r"(\d+)", name)
        if times > 1 or self._times > 1 or len(other) != len(self._first):
            return False
        differ = [k for k, (a, b) in enumerate(zip(self._first, other, strict=True)) if a != b]
        if len(differ) != 1 or differ[0] % 2 == 0 or self._place not in (0, differ[0]):
            return False
        self._place = differ[0]
        self._numbers.append(other[self._place])
        return True

    def parts(self) -> list[tuple[str, int]]:
        """Return single names and ranges as texts, each with the number of names that it stands for."""
        if not self._place:
            name = "".join(self._first)
            return [(f"{name} ({self._times} times)" if self._times > 1 else name, self._times)]
        before, after = "".join(self._first[: self._place]), "".join(self._first[self._place + 1 :])
        common, dot, word = before.rpartition(".")
        runs: list[list[str]] = []
        for number in (self._first[self._place], *self._numbers):
            if runs and int(number) == int(runs[-1][-1]) + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        found = []
        for run in runs:
            shown = [(f"{run[0]} ... {run[-1]}", len(run))] if len(run) > 2 else [(number, 1) for number in run]
            found += [(f"{word}{text}{after}", number) for text, number in shown]
        return [(common + dot + found[0][0], found[0][1]), *found[1:]]


def _families(names: Iterable[str]) -> list[_Family]:
    found: list[_Family] = []
    for name, same in groupby(names):
        times = sum(1 for _ in same)
        if not found or not found[-1].take(name, times):
            found.append(_Family(name, times))
    return found


def numberless(name: str) -> str:
    """Return a name with its numbers replaced: what the names of repeated modules have in common."""
    return re.sub(r"\d+", "#", name)
