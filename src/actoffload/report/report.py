"""What offloading a model did, group by group, as data; `render` makes text, Markdown and HTML of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..engine.statistics import Reason
from .held import HeldStorage

__all__ = ["Amounts", "GroupReport", "Report"]

Amounts = Mapping[Reason, tuple[int, int]]
"""By reason: number of tensors, and their bytes."""

WEIGHTS = frozenset({Reason.PARAMETER, Reason.BUFFER})
"""Saved by autograd, but no activations: they stay in any case."""

FOLLOWED = frozenset({Reason.HOST_FULL, Reason.SHARED})
"""Reasons of storages that could have left, and are among the bytes saved already."""


@dataclass(frozen=True)
class GroupReport:
    """One group: a chosen module, whose saved tensors move together.

    All numbers but those of seconds are of the latest pass, all sizes in bytes.

    Parameters
    ----------
    name, kind : str
        Dotted name of the module, and what groups are told apart by, usually its class.
    calls : int
        How often it ran; 0 if it did not.
    leaves : bool
        Whether the plan lets it leave the device.
    storages, bytes_saved : int
        Storages that autograd saved in it and that could leave, whether or not the group leaves; each storage counts
        in the first group that saved it.
    bytes_offloaded : int
        Bytes copied to the host.
    bytes_in_vain : int
        Bytes of them that stay on the device all the same, and are not copied back: because a group that stays has
        saved the same storages after this one, then they are among those of `Reason.SHARED` too; or because the group
        was expected to leave, and stays as the pass took another course.
    kept : mapping of Reason to (int, int)
        Saved tensors that could not leave, by reason: their number and their bytes.
    reloaded_ahead, reloaded_on_demand, bytes_reloaded : int
        Storages copied back because the schedule said so; because backward needed one that nobody had asked for in
        time; bytes copied back.
    bytes_not_freed : int
        Bytes that were copied and given up, and are still on the device because somebody holds their storage.
    forward_seconds, backward_seconds : float or None
        Compute of the group in the whole recorded step, on the device and without waiting; None unless a step was
        recorded.
    forward_stall_seconds, backward_stall_seconds : float or None
        For how long compute waited for copies of this group: to the host in forward, back in backward.
    """

    name: str
    kind: str = ""
    calls: int = 1
    leaves: bool = False
    storages: int = 0
    bytes_saved: int = 0
    bytes_offloaded: int = 0
    bytes_in_vain: int = 0
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
        """Bytes of activations that could not leave; weights do not count."""
        return sum(nbytes for reason, (_, nbytes) in self.kept.items() if reason not in WEIGHTS)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all activations saved, those that could leave and those that could not."""
        return self.bytes_saved + sum(
            nbytes for reason, (_, nbytes) in self.kept.items() if reason not in WEIGHTS | FOLLOWED
        )

    @property
    def stall_seconds(self) -> float | None:
        """Seconds of waiting, in forward and backward together."""
        return _sum((self.forward_stall_seconds, self.backward_stall_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers under their names, for JSON."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        sums = {name: getattr(self, name) for name in ("bytes_kept", "activation_bytes", "stall_seconds")}
        return {**values, "kept": _amounts_to_dict(self.kept), **sums}


@dataclass(frozen=True)
class Report:
    """What offloading a model did; ``print`` gives tables and advice, and a notebook shows them.

    Parameters
    ----------
    groups : tuple of GroupReport
        In the order in which they ran.
    outside : mapping of Reason to (int, int)
        What was saved outside of the groups and stayed: number of tensors, and bytes.
    outside_modules : mapping of str to int
        Bytes of activations saved outside of the groups, by name of the module or pattern of several, if known.
    passes : int
        Forward passes since the statistics began.
    num_layers : int or None
        How many groups of a kind leave, as asked for or as chosen; a part of them if a fraction was asked for.
    peak_resident_bytes : int
        Largest number of bytes of saved activations on the device since the statistics began.
    host_bytes, host_bytes_high_water : int
        Page-locked memory held now, and the largest part of it ever in use.
    held : tuple of HeldStorage
        Storages that are not freed because somebody else holds them.
    expected_bytes, dropped_bytes : int or None
        Bytes that the plan wants absent from the device at the peak, and the part of them that was.
    step_seconds : float or None
        Seconds of the recorded step.
    step_passes : int
        Forward passes in it: the micro-batches of a step that accumulates gradients.
    order : str
        A note on the order of the groups, for instance that it changed.
    advice : tuple of str
        What to do, from `advise`.
    """

    groups: tuple[GroupReport, ...] = ()
    outside: Amounts = field(default_factory=dict)
    outside_modules: Mapping[str, int] = field(default_factory=dict)
    passes: int = 0
    num_layers: int | None = None
    peak_resident_bytes: int = 0
    host_bytes: int = 0
    host_bytes_high_water: int = 0
    held: tuple[HeldStorage, ...] = ()
    expected_bytes: int | None = None
    dropped_bytes: int | None = None
    step_seconds: float | None = None
    step_passes: int = 0
    order: str = ""
    advice: tuple[str, ...] = ()

    @property
    def r(self) -> float | None:
        """Of the bytes that should be absent from the device at the peak, the fraction that is.

        1.0 says that everything that was offloaded is gone when memory is scarcest; less says that somebody still
        held a part of it.  None if that is not known, or nothing should be absent.
        """
        if self.dropped_bytes is None or not self.expected_bytes:
            return None
        return self.dropped_bytes / self.expected_bytes

    @property
    def totals(self) -> GroupReport:
        """The sums over all groups; it leaves if any group does."""
        return sum_groups(self.groups, "total")

    @property
    def kept(self) -> dict[Reason, tuple[int, int]]:
        """What stayed by reason, in the groups and outside, most bytes first: number of tensors, and bytes."""
        return add_amounts([self.totals.kept, self.outside])

    @property
    def activation_bytes(self) -> int:
        """Bytes of all activations that were saved, in the groups and outside."""
        outside = GroupReport("outside", kept=self.outside)
        return self.totals.activation_bytes + outside.activation_bytes

    @property
    def leaving(self) -> tuple[GroupReport, ...]:
        """The groups that leave the device."""
        return tuple(group for group in self.groups if group.leaves)

    def to_dict(self) -> dict[str, Any]:
        """Return everything under its name, ready for JSON: reasons are their names in lower case."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            **values,
            "groups": [group.to_dict() for group in self.groups],
            "totals": self.totals.to_dict(),
            "outside": _amounts_to_dict(self.outside),
            "outside_modules": dict(self.outside_modules),
            "kept": _amounts_to_dict(self.kept),
            "held": [
                {"group": held.group, "nbytes": held.nbytes, "holders": list(map(str, held.holders))}
                for held in self.held
            ],
            "activation_bytes": self.activation_bytes,
            "r": self.r,
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, all_groups: bool = False) -> str:
        """Return tables for a terminal.

        Parameters
        ----------
        all_groups : bool
            A line for each group, also where many of them are equal.
        """
        from .tables import text

        return text(self, all_groups=all_groups)

    def to_markdown(self, *, all_groups: bool = False) -> str:
        """Return the tables in Markdown, as GitHub and MyST read it; see `to_text`."""
        from .tables import markdown

        return markdown(self, all_groups=all_groups)

    def to_html(self, *, all_groups: bool = False) -> str:
        """Return the tables in HTML, without any style sheet or script; see `to_text`."""
        from .tables import html

        return html(self, all_groups=all_groups)

    def _repr_html_(self) -> str:
        return self.to_html()


def sum_groups(groups: Iterable[GroupReport], name: str) -> GroupReport:
    """Return the sums over groups, as a group; what no group knows is not known of the sum."""
    groups = tuple(groups)
    kinds = {group.kind for group in groups}
    sums: dict[str, Any] = {}
    for entry in fields(GroupReport):
        if entry.name in ("name", "kind", "leaves", "kept"):
            continue
        sums[entry.name] = _sum(getattr(group, entry.name) for group in groups)
        if "seconds" not in entry.name:
            sums[entry.name] = sums[entry.name] or 0
    return GroupReport(
        name,
        kinds.pop() if len(kinds) == 1 else "",
        leaves=any(group.leaves for group in groups),
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


def _amounts_to_dict(amounts: Amounts) -> dict[str, dict[str, int]]:
    return {reason.name.lower(): {"tensors": count, "bytes": nbytes} for reason, (count, nbytes) in amounts.items()}
