"""What offloading did with one group, and sums over groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..engine.statistics import Reason

__all__ = ["FOLLOWED", "WEIGHTS", "Amounts", "GroupReport", "add_amounts", "amounts_to_dict", "sum_groups"]

Amounts = Mapping[Reason, tuple[int, int]]
"""By reason: number of tensors, and their bytes."""

WEIGHTS = frozenset({Reason.PARAMETER, Reason.BUFFER})
"""Saved by autograd, but not activations: they are always kept."""

FOLLOWED = frozenset({Reason.HOST_FULL, Reason.SHARED})
"""Reasons of storages that can be offloaded, and count in `GroupReport.bytes_saved` already."""


@dataclass(frozen=True)
class GroupReport:
    """One group, a chosen module whose saved tensors are offloaded together.

    Seconds are of the recorded step, all other numbers of the latest pass.  Sizes are in bytes.

    Parameters
    ----------
    name, kind : str
        Dotted name of the module; its kind, usually its class.
    calls : int
        Number of calls; 0 if it did not run.
    offloaded : bool
        Whether the plan offloads the group.
    storages, bytes_saved : int
        Storages that autograd saved in it and that can be offloaded, also if the group is kept.  Each storage counts
        in the first group that saved it.
    bytes_offloaded : int
        Bytes copied to the host.
    bytes_wasted : int
        Bytes copied to the host that stay on the device and are not reloaded.  Either a group that is kept has saved
        the same storages later, and they count under `Reason.SHARED` too; or the plan offloaded the group, and it
        was kept because the execution order changed.
    kept : mapping of Reason to (int, int)
        Saved tensors that cannot be offloaded, by reason: their number and their bytes.
    reloaded_ahead, reloaded_on_demand, bytes_reloaded : int
        Storages reloaded by the schedule; storages reloaded only when backward needed them; bytes reloaded.
    bytes_not_freed : int
        Bytes that were offloaded and are still on the device because something refers to their storage.
    forward_seconds, backward_seconds : float or None
        Compute time on the device without stalls; None unless a step was recorded.
    forward_stall_seconds, backward_stall_seconds : float or None
        Time for which compute waited for copies of this group: to the host in forward, to the device in backward.
    """

    name: str
    kind: str = ""
    calls: int = 1
    offloaded: bool = False
    storages: int = 0
    bytes_saved: int = 0
    bytes_offloaded: int = 0
    bytes_wasted: int = 0
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
    def bytes_kept(self) -> int:
        """Bytes of activations that cannot be offloaded; weights do not count."""
        return sum(nbytes for reason, (_, nbytes) in self.kept.items() if reason not in WEIGHTS)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all saved activations, whether they can be offloaded or not."""
        return self.bytes_saved + sum(
            nbytes for reason, (_, nbytes) in self.kept.items() if reason not in WEIGHTS | FOLLOWED
        )

    @property
    def stall_seconds(self) -> float | None:
        """Stall in forward and backward together, in seconds."""
        return _sum((self.forward_stall_seconds, self.backward_stall_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers under their names, for JSON."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        sums = {name: getattr(self, name) for name in ("bytes_kept", "activation_bytes", "stall_seconds")}
        return {**values, "kept": amounts_to_dict(self.kept), **sums}


def sum_groups(groups: Iterable[GroupReport], name: str) -> GroupReport:
    """Return the sums over groups, as a group; a sum is None if it is None in all groups."""
    groups = tuple(groups)
    kinds = {group.kind for group in groups}
    sums: dict[str, Any] = {}
    for entry in fields(GroupReport):
        if entry.name in ("name", "kind", "offloaded", "kept"):
            continue
        sums[entry.name] = _sum(getattr(group, entry.name) for group in groups)
        if "seconds" not in entry.name:
            sums[entry.name] = sums[entry.name] or 0
    return GroupReport(
        name,
        kinds.pop() if len(kinds) == 1 else "",
        offloaded=any(group.offloaded for group in groups),
        kept=add_amounts(group.kept for group in groups),
        **sums,
    )


def add_amounts(amounts: Iterable[Amounts]) -> dict[Reason, tuple[int, int]]:
    """Return the sums by reason, most bytes first."""
    sums: dict[Reason, tuple[int, int]] = {}
    for amount in amounts:
        for reason, (count, nbytes) in amount.items():
            before = sums.get(reason, (0, 0))
            sums[reason] = (before[0] + count, before[1] + nbytes)
    return dict(sorted(sums.items(), key=lambda item: (-item[1][1], -item[1][0], item[0].value)))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def amounts_to_dict(amounts: Amounts) -> dict[str, dict[str, int]]:
    """Return amounts by the names of their reasons in lower case, for JSON."""
    return {reason.name.lower(): {"tensors": count, "bytes": nbytes} for reason, (count, nbytes) in amounts.items()}
