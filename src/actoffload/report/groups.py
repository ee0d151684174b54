"""The parts of a report: groups, what they keep, and memory that was not freed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .._folding import numberless
from ..engine.statistics import Reason

__all__ = ["WEIGHTS", "Amounts", "GroupReport", "HeldStorage", "Holder", "add_amounts", "merge_held", "sum_groups"]

Amounts = Mapping[Reason, tuple[int, int]]  # by reason: number of tensors, and their bytes
WEIGHTS = frozenset({Reason.PARAMETER, Reason.BUFFER})  # saved by autograd, but no activations: always kept
FOLLOWED = frozenset({Reason.HOST_FULL, Reason.SHARED})  # in `GroupReport.bytes_saved` already: they can be offloaded
FIRST = re.compile(r"\[[^]]*\]|[^.[]*")  # the first name, key or index of a path


@dataclass(frozen=True)
class GroupReport:
    """One group, a chosen module whose saved tensors are offloaded together.

    Seconds are of the recorded step, all other numbers of the reported pass.  Sizes are in bytes.

    Parameters
    ----------
    name, kind : str
        Dotted name of the module; its kind, usually its class.
    calls, offloaded, recomputed : int, bool, bool
        Number of calls, 0 if it did not run; whether the plan offloads the group; whether it is recomputed in backward.
    calls_offloaded : int or None
        Number of calls that the plan offloads; None for all or none of them.
    storages, bytes_saved : int
        Saved storages that can be offloaded, also if the group is kept.  Each counts in the first group that saved it.
    bytes_offloaded, bytes_wasted : int
        Bytes copied to the host; the part of them that stays on the device, because a group that is kept saved the same
        storages later (`Reason.SHARED` counts them too), or the group was kept as the execution order changed.
    bytes_recomputed : int
        Bytes that backward computes again and the group does not save; 0 if that is not known.
    kept : mapping of Reason to (int, int)
        Saved tensors that cannot be offloaded, by reason: their number and their bytes.
    reloaded_ahead, reloaded_on_demand, bytes_reloaded : int
        Storages reloaded by the schedule; storages reloaded only when backward needed them; bytes reloaded.
    bytes_not_freed : int
        Bytes that were offloaded and are still on the device because something refers to their storage.
    forward_seconds, backward_seconds, forward_stall_seconds, backward_stall_seconds : float or None
        Compute time on the device without stalls, and time for which compute waited for copies of this group: to the
        host in forward, to the device in backward.  None unless a step was recorded.
    """

    name: str
    kind: str = ""
    calls: int = 1
    offloaded: bool = False
    recomputed: bool = False
    calls_offloaded: int | None = None
    storages: int = 0
    bytes_saved: int = 0
    bytes_offloaded: int = 0
    bytes_wasted: int = 0
    bytes_recomputed: int = 0
    kept: Amounts = field(default_factory=dict)
    reloaded_ahead: int = 0
    reloaded_on_demand: int = 0
    bytes_reloaded: int = 0
    bytes_not_freed: int = 0
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    forward_stall_seconds: float | None = None
    backward_stall_seconds: float | None = None

    @property
    def offloaded_calls(self) -> int:
        """Number of calls that the plan offloads."""
        return self.calls * self.offloaded if self.calls_offloaded is None else self.calls_offloaded

    @property
    def bytes_kept(self) -> int:
        """Bytes of activations that cannot be offloaded; weights do not count."""
        return sum(nbytes for reason, (_, nbytes) in self.kept.items() if reason not in WEIGHTS)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all saved activations, whether they can be offloaded or not."""
        return self.bytes_saved + sum(n for reason, (_, n) in self.kept.items() if reason not in WEIGHTS | FOLLOWED)

    @property
    def stall_seconds(self) -> float | None:
        """Stall in forward and backward together, in seconds."""
        return _sum((self.forward_stall_seconds, self.backward_stall_seconds))


def sum_groups(groups: Iterable[GroupReport], name: str) -> GroupReport:
    """Return the sums over groups, as a group; seconds are None if they are None in all groups."""
    groups = tuple(groups)
    kinds = {group.kind for group in groups}
    total: dict[str, Any] = {"kept": add_amounts(group.kept for group in groups)}
    for done in ("offloaded", "recomputed"):
        total[done] = any(getattr(group, done) for group in groups)
    part, calls = sum(group.offloaded_calls for group in groups), sum(group.calls for group in groups)
    total["calls_offloaded"] = part if 0 < part < calls else None
    for number in {entry.name for entry in fields(GroupReport)} - {"name", "kind", *total}:
        values = [getattr(group, number) for group in groups]
        total[number] = _sum(values) if "seconds" in number else sum(values)
    return GroupReport(name, kinds.pop() if len(kinds) == 1 else "", **total)


def add_amounts(amounts: Iterable[Amounts]) -> dict[Reason, tuple[int, int]]:
    """Return the sums by reason, most bytes first."""
    sums: dict[Reason, tuple[int, int]] = {}
    for amount in amounts:
        for reason, (count, nbytes) in amount.items():
            before = sums.get(reason, (0, 0))
            sums[reason] = before[0] + count, before[1] + nbytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1][1], -item[1][0], item[0].value)))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True)
class Holder:
    """A reference that keeps memory alive; ``str`` gives ``attribute `cache[0]` of encoder (Encoder)`` or the like.

    Parameters
    ----------
    kind : str
        What refers to the memory: ``"attribute"``, ``"global"``, ``"local variable"``, ``"input"``, ``"output"`` etc.
    paths, owner : tuple of str, str
        How the memory is reached, in several ways if storages with the same holder were merged; what the reference
        belongs to: a module, a function with its file and line, a class.
    """

    kind: str
    paths: tuple[str, ...]
    owner: str

    def __str__(self) -> str:
        if not self.paths[0]:
            return f"the {self.kind} of {self.owner}"
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.kind} `{self.paths[0]}`{more} of {self.owner}"


@dataclass(frozen=True)
class HeldStorage:
    """A storage that was copied to the host and not freed.

    Parameters
    ----------
    group, nbytes : str, int
        Name of the group that saved it; size in bytes.
    holders : tuple of Holder
        What in Python refers to it.  Empty if only autograd of another graph or C++ does.
    is_input : bool
        Whether it is an input of the model, which its caller may refer to.
    """

    group: str
    nbytes: int
    holders: tuple[Holder, ...] = ()
    is_input: bool = False


def merge_held(held: Sequence[HeldStorage]) -> list[tuple[tuple[str, ...], int, tuple[Holder, ...]]]:
    """Merge storages with the same holders: (groups, bytes, holders), most bytes first.

    The same are holders that differ in numbers alone or behind the first name of their paths, as keys and values do.
    """
    merged: dict[tuple[tuple[str, ...], ...], list[HeldStorage]] = {}
    for storage in held:
        key = tuple((h.kind, numberless(FIRST.findall(h.paths[0])[0]), numberless(h.owner)) for h in storage.holders)
        merged.setdefault(key, []).append(storage)
    entries = []
    for same in merged.values():
        groups, holders = tuple(dict.fromkeys(storage.group for storage in same)), []
        for alike in zip(*(storage.holders for storage in same), strict=True):
            paths = dict.fromkeys(holder.paths[0] for holder in alike if holder.owner == alike[0].owner)
            holders.append(replace(alike[0], paths=tuple(paths)))
        entries.append((groups, sum(storage.nbytes for storage in same), tuple(holders)))
    return sorted(entries, key=lambda entry: (-entry[1], entry[0], tuple(map(str, entry[2]))))
