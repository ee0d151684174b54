"""Shorten repeated rows of a table, and the names of repeated modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
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
    families: list[_Family] = []
    for name, same in groupby(names):
        times, tokens = sum(1 for _ in same), tuple(re.split(r"(\d+)", name))
        if not families or not families[-1].take(tokens, times):
            families.append(_Family(tokens, times))
    parts = [part for family in families for part in family.parts()]
    most += len(parts) == most + 1 and parts[-1][1] == 1  # "and 1 more" is no shorter than a name
    more = sum(number for _, number in parts[most:])
    return ", ".join(text for text, _ in parts[:most]) + (f" and {more} more" if more else "")


@dataclass
class _Family:
    """Names in a row, as texts and numbers in turn, that differ in one number; or one name and how often it comes."""

    first: tuple[str, ...]
    times: int
    place: int = 0  # of the number in which they differ
    numbers: list[str] = field(default_factory=list)  # of all but the first

    def take(self, tokens: tuple[str, ...], times: int) -> bool:
        """Return whether another name belongs to these, and add it if so."""
        differ = [k for k, pair in enumerate(zip(self.first, tokens, strict=False)) if pair[0] != pair[1]]
        single = times == self.times == 1 and len(tokens) == len(self.first) and len(differ) == 1
        if not single or differ[0] % 2 == 0 or self.place not in (0, differ[0]):
            return False
        self.place = differ[0]
        self.numbers.append(tokens[self.place])
        return True

    def parts(self) -> list[tuple[str, int]]:
        """Return single names and ranges as texts, each with the number of names that it stands for."""
        if not self.place:
            return [("".join(self.first) + (f" ({self.times} times)" if self.times > 1 else ""), self.times)]
        before, after = "".join(self.first[: self.place]), "".join(self.first[self.place + 1 :])
        common, dot, word = before.rpartition(".")
        runs: list[list[str]] = []
        for number in (self.first[self.place], *self.numbers):
            if runs and int(number) == int(runs[-1][-1]) + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        found: list[tuple[str, int]] = []
        for run in runs:
            found += [(f"{run[0]} ... {run[-1]}", len(run))] if len(run) > 2 else [(number, 1) for number in run]
        starts = [common + dot, *[""] * (len(found) - 1)]
        return [(f"{start}{word}{text}{after}", number) for start, (text, number) in zip(starts, found, strict=True)]


def numberless(name: str) -> str:
    """Return a name with its numbers replaced: what the names of repeated modules have in common."""
    return re.sub(r"\d+", "#", name)
