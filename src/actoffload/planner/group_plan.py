"""The plan of a model: what is done with each group, what that is expected to cost, and its file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import SEPARATING_LINE, tabulate

from .._arguments import check_kind, check_kinds
from .._text import fold, fold_names, milliseconds, numberless, size, size_or_dash
from ..schedule.plan import Action, Do, Event, Plan, PlanFile, When, leanest_calls, number, optional_number

__all__ = ["GroupPlan"]

FILE = PlanFile("plan", 1, "handle.plan.save(path)")
NO_BYTES = "No bytes are known: no pass so far saved a tensor that can be offloaded."


@dataclass(frozen=True)
class GroupPlan:
    """The plan for a sequence of groups, and what it is expected to cost; ``print`` gives a table by group.

    Parameters
    ----------
    names : tuple of str
        The groups, in execution order.  A group that runs twice comes twice.
    plan : Plan
        What is done when; its layers are the positions in `names`.
    nbytes : tuple of int
        Bytes that each group saves and that could be offloaded; 0 if not known.
    seconds, baseline_seconds : float, optional
        Expected time of a step, and without offloading.
    peak_bytes : int, optional
        Expected peak of device memory in forward and backward.
    because : str
        One sentence on why this plan was chosen; may be empty.
    recomputed_nbytes : tuple of int
        Bytes that each group computes again in backward instead of saving them; empty if none is recomputed.
    recompute_seconds : float
        Expected time that backward takes longer for it.
    saves : tuple
        For each group None if it is not recomputed, otherwise the names of the operators whose outputs are saved, such
        as ``aten.mm.default#0`` for the first matrix product; empty if no group is recomputed.
    holds : bool
        Whether what is made again stays on the device until its last use.  Otherwise what is cheap to make is freed and
        made once more, which takes less memory.

    Raises
    ------
    ValueError
        If there are not as many names and sizes as layers in the plan.

    Examples
    --------
    >>> from actoffload.planner import GroupPlan
    >>> from actoffload.schedule import DefaultSchedule
    >>> plan = GroupPlan(("h.0", "h.1", "h.2"), DefaultSchedule(1, 3).plan(), (2**20, 2**20, 2**20))
    >>> plan.offloaded, plan.kept_bytes
    ((0,), 2097152)
    """

    names: tuple[str, ...]
    plan: Plan
    nbytes: tuple[int, ...]
    seconds: float | None = None
    baseline_seconds: float | None = None
    peak_bytes: int | None = None
    because: str = ""
    recomputed_nbytes: tuple[int, ...] = ()
    recompute_seconds: float = 0.0
    saves: tuple[tuple[str, ...] | None, ...] = ()
    holds: bool = False

    def __post_init__(self) -> None:
        check_kinds(str, names=self.names)
        check_kind(Plan, plan=self.plan)
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "nbytes", tuple(self.nbytes))
        object.__setattr__(self, "recomputed_nbytes", tuple(self.recomputed_nbytes))
        object.__setattr__(self, "saves", tuple(self.saves))
        whats = ("names", "nbytes", *(name for name in ("recomputed_nbytes", "saves") if getattr(self, name)))
        for what in whats:
            if len(getattr(self, what)) != self.plan.model_layers:
                raise ValueError(
                    f"{what} has {len(getattr(self, what))} entries, but the plan has {self.plan.model_layers} layers; "
                    "give one for each layer."
                )

    def measured(self, seconds: float, baseline: float | None) -> GroupPlan:
        """Return the plan with the seconds that a pass took, and those expected without offloading and recomputation.

        The latter are an estimate.  They cannot be more than what is left of the pass without recomputation.
        """
        if baseline is not None:
            baseline = min(baseline, max(seconds - self.recompute_seconds, 0.0))
        return replace(self, seconds=seconds, baseline_seconds=baseline)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Positions of the groups that are offloaded, ascending."""
        return self.plan.offloaded

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Positions of the groups that are recomputed, ascending; what they still save is kept or offloaded."""
        return tuple(k for k, saves in enumerate(self.saves) if saves is not None)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are offloaded."""
        return sum(self.nbytes[k] for k in self.offloaded)

    @property
    def kept_bytes(self) -> int:
        """Bytes that could be offloaded and are kept."""
        return sum(self.nbytes) - self.offloaded_bytes

    def matches(self, names: Sequence[str]) -> bool:
        """Return whether a sequence of groups is the one of this plan."""
        return tuple(names) == self.names

    def remapped(self, names: Sequence[str], *, offload_others: bool = False) -> GroupPlan:
        """Return the plan for another sequence of groups; its costs are not known.

        Each action is done at the same event of the same group, or at the next event in time if that group does not
        run.  Groups that this plan does not know are kept, or, with `offload_others`, offloaded as in the plan with the
        smallest peak.  The last group is kept: there is no time for it.
        """
        if self.matches(names):
            return self
        plan, earlier = _remap(self.plan, self.names, names, offload_others=offload_others)
        nbytes = tuple(0 if k is None else self.nbytes[k] for k in earlier)
        less = tuple(0 if k is None else self.recomputed_nbytes[k] for k in earlier) if self.recomputed_nbytes else ()
        saves = tuple(None if k is None else self.saves[k] for k in earlier) if self.saves else ()
        found = GroupPlan(tuple(names), plan, nbytes, because=self.because, recomputed_nbytes=less, saves=saves)
        return replace(found, holds=self.holds)

    def __str__(self) -> str:
        offloaded, again = set(self.offloaded), set(self.recomputed)
        less = self.recomputed_nbytes or (0,) * len(self.names)
        groups = [(name, k in offloaded, k in again, less[k], self.nbytes[k]) for k, name in enumerate(self.names)]
        rows = []
        for alike in fold(groups, lambda group: (numberless(group[0]), *group[1:])):
            nbytes = sum(group[4] for group in alike)
            _, leaves, recomputed, saved_less, _ = alike[0]
            sizes = (0, nbytes) if leaves else (nbytes, 0)
            name = fold_names(tuple(group[0] for group in alike))
            rows.append(self._row(name, len(alike), sizes, len(alike) * saved_less, recomputed))
        total = self.kept_bytes, self.offloaded_bytes
        rows += [[SEPARATING_LINE], self._row("", len(self.names), total, sum(less), bool(again))]
        header = ["group", "number", "kept", "offloaded", *(["recomputed"] if again else [])]
        table = tabulate(rows, header, colalign=("left", *["right"] * (len(header) - 1)), disable_numparse=True)
        expected = f"Expected: {self.expected}." if self.expected else ""
        unknown = "" if any(self.nbytes) or any(less) else NO_BYTES
        return "\n\n".join(filter(None, (table, " ".join(filter(None, (expected, self.because, unknown))))))

    def _row(self, name: str, number: int, sizes: tuple[int, int], less: int, recomputed: bool) -> list[str]:
        """Return a line; a recomputed group for which the bytes are not known has "yes"."""
        cells = list(map(size_or_dash, (*sizes, *([less] if self.recomputed else []))))
        if recomputed and not less:
            cells[-1] = "yes"
        return [name, str(number), *cells]

    @property
    def expected(self) -> str:
        """The expected peak and time of a pass, with what recomputation takes of it; empty if they are not known."""
        parts = []
        if self.peak_bytes is not None:
            parts.append(f"peak {size(self.peak_bytes)}")
        if self.seconds is not None:
            # No such pass fits, so its time is a sum over groups that were measured beside copies.
            without = "estimated without offloading and recomputing" if self.recomputed else "without offloading"
            beside = f", {milliseconds(self.baseline_seconds)} {without}" if self.baseline_seconds else ""
            parts.append(f"pass {milliseconds(self.seconds)}{beside}")
        if self.recompute_seconds > 0:
            parts.append(f"{milliseconds(self.recompute_seconds)} of it to recompute")
        return "; ".join(parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file.

        Parameters
        ----------
        path : str or path-like
            Replaced if it exists.
        """
        steps = [
            [event.when.name, event.layer, action.do.name, action.layer]
            for event in self.plan.events()
            for action in self.plan.at(event.when, event.layer)
        ]
        FILE.write(path, {**vars(self), "plan": steps})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> GroupPlan:
        """Read a plan from a file that `save` wrote.

        Parameters
        ----------
        path : str or path-like
            The file.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If the file has no plan, or one of another version.
        """
        return FILE.read(path, _read)


def _read(content: dict[str, Any]) -> GroupPlan:
    """Return the plan in the content of a file."""
    names, because = content["names"], content["because"]
    if not all(isinstance(text, str) for text in (*names, because)):
        raise TypeError("names are no text")
    calls = [(Event(When[when], number(at)), Action(Do[do], number(layer))) for when, at, do, layer in content["plan"]]
    return GroupPlan(
        names,
        Plan.of(len(names), calls),
        tuple(map(number, content["nbytes"])),
        seconds=optional_number(content["seconds"], int, float),
        baseline_seconds=optional_number(content["baseline_seconds"], int, float),
        peak_bytes=optional_number(content["peak_bytes"]),
        because=because,
        recomputed_nbytes=tuple(map(number, content.get("recomputed_nbytes", ()))),
        recompute_seconds=number(content.get("recompute_seconds", 0.0), int, float),
        saves=tuple(None if names is None else tuple(map(str, names)) for names in content.get("saves", ())),
        holds=content.get("holds") is True,
    )


# Another sequence of groups


def _remap(
    plan: Plan, names: Sequence[str], others: Sequence[str], *, offload_others: bool = False
) -> tuple[Plan, tuple[int | None, ...]]:
    """Return the plan for other groups than `names`, and the earlier position of each, None for new groups.

    `offload_others`: new groups are offloaded as in `Roles.leanest`, and so is the last one, if others follow it now.
    """
    places: dict[tuple[str, int], int] = {_nth(names, k): k for k in range(len(names))}
    earlier = tuple(places.get(_nth(others, k)) for k in range(len(others)))
    now = {k: position for position, k in enumerate(earlier) if k is not None}
    moved = Plan(len(others))
    events = list(moved.events())
    order = {event: k for k, event in enumerate(events)}
    # For each earlier event, the place of itself or of the next one in time whose group still runs.
    target: dict[Event, int] = {}
    place = len(events)
    for event in reversed(list(plan.events())):
        if event.layer in now:
            place = order[Event(event.when, now[event.layer])]
        target[event] = place
    found: dict[int, list[tuple[int, int, Action]]] = {}
    acts = ((event, act) for event in plan.events() for act in plan.at(event.when, event.layer))
    for rank, (event, act) in enumerate(acts):
        if act.layer in now:
            found.setdefault(now[act.layer], []).append((target[event], rank, Action(act.do, now[act.layer])))
    calls = [call for layer, mine in found.items() if layer < len(others) - 1 for call in _valid(layer, mine, order)]
    if offload_others:
        new = [k for k, before in enumerate(earlier[:-1]) if before in (None, len(names) - 1) and k not in found]
        # [guard: groups that a plan does not know]
        calls += ((order[event], k, action) for k in new for event, action in leanest_calls(k))
    calls.sort(key=lambda call: call[:2])
    return Plan.of(len(others), ((events[place], action) for place, _, action in calls)), earlier


def _nth(names: Sequence[str], position: int) -> tuple[str, int]:
    """Return a name and how many times it comes before a position."""
    return names[position], names[:position].count(names[position])


def _valid(
    layer: int, actions: Iterable[tuple[int, int, Action]], order: dict[Event, int]
) -> list[tuple[int, int, Action]]:
    """Return the actions of a layer, each moved behind those before it; none if they do not fit before its backward."""
    begins = order[Event(When.BACKWARD_START, layer)]
    earliest = order[Event(When.FORWARD_START, layer)]
    events = list(order)
    valid: list[tuple[int, int, Action]] = []
    for place, rank, action in actions:
        if action.do is Do.RELEASE:
            earliest = max(earliest, order[Event(When.FORWARD_END, layer)])  # [guard: moved release]
        if action.do is Do.INCREMENTAL_RELEASE:  # the release does the rest
            moved = place < earliest or place >= begins or events[place].when is not When.FORWARD_START
            if moved or place < order[Event(When.FORWARD_END, layer)]:
                continue
        earliest = max(earliest, place)  # [guard: moved action]
        if action.do is Do.RELOAD:
            earliest = min(earliest, begins)  # [guard: moved reload]
        if earliest > begins or (earliest == begins and action.do is Do.RELEASE):
            return []
        valid.append((earliest, rank, action))
    return valid
