"""Memory that was copied to the host and not freed: the storages, and what in Python refers to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .folding import numberless, starred

__all__ = ["HeldStorage", "Holder", "merge_held"]


@dataclass(frozen=True)
class Holder:
    """A reference that keeps memory alive; ``str`` gives a line such as ``attribute `cache[0]` of encoder (Encoder)``.

    Parameters
    ----------
    kind : str
        What refers to the memory: ``"attribute"``, ``"global"``, ``"local variable"``, ``"input"``, ``"output"`` etc.
    paths : tuple of str
        How the memory is reached; several if storages with the same holder were merged.
    owner : str
        What the reference belongs to: a module, a function with its file and line, a class.
    """

    kind: str
    paths: tuple[str, ...]
    owner: str

    @property
    def is_call(self) -> bool:
        """Whether it is an input or an output of a module that is being called."""
        return self.kind in ("input", "output")

    def __str__(self) -> str:
        shown = [f"`{path}`" for path in (self.paths if len(self.paths) < 4 else self.paths[:2]) if path]
        if not shown:
            return f"the {self.kind} of {self.owner}"
        shown += [f"{len(self.paths) - 2} more"] if len(self.paths) > 3 else []
        return f"{self.kind} {' and '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))} of {self.owner}"


@dataclass(frozen=True)
class HeldStorage:
    """A storage that was copied and given up, and exists all the same.

    Parameters
    ----------
    group : str
        Name of the group that saved it.
    nbytes : int
        Size in bytes.
    holders : tuple of Holder
        Who in Python holds it, from `find_holders`.  Empty if that was not looked for, or nobody in Python does:
        then autograd, for another graph than this one, or other C++ code.
    """

    group: str
    nbytes: int
    holders: tuple[Holder, ...] = ()


def merge_held(held: Sequence[HeldStorage]) -> list[tuple[tuple[str, ...], int, tuple[Holder, ...]]]:
    """Merge storages with the same holders: (groups, bytes, holders), most bytes first.

    Holders are the same if they differ in numbers alone, or behind the first name of their paths: the keys and the
    values of one cache.
    """
    merged: dict[tuple[tuple[str, ...], ...], list[HeldStorage]] = {}
    for storage in held:
        key = tuple((h.kind, numberless(_first_name(h.paths[0])), numberless(h.owner)) for h in storage.holders)
        merged.setdefault(key, []).append(storage)
    entries = [
        (
            tuple(dict.fromkeys(storage.group for storage in same)),
            sum(storage.nbytes for storage in same),
            tuple(map(_merge_holders, zip(*(storage.holders for storage in same), strict=True))),
        )
        for same in merged.values()
    ]
    return sorted(entries, key=lambda entry: (-entry[1], entry[0], tuple(map(str, entry[2]))))


def _first_name(path: str) -> str:
    found = re.match(r"\[[^]]*\]|[^.[]*", path)
    return found[0] if found else ""


def _merge_holders(holders: Sequence[Holder]) -> Holder:
    """Return one holder with a path for each that differs in more than numbers."""
    alike: dict[str, list[str]] = {}
    for holder in holders:
        alike.setdefault(numberless(holder.paths[0]), []).append(holder.paths[0])
    first = holders[0]
    return replace(first, paths=tuple(starred(same) if first.is_call else same[0] for same in alike.values()))
