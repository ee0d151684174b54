"""Schedules as data, the order in which the groups of a model run, and the plans for it that the engine reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .._arguments import check_fraction, check_whole
from .orders import Event, When
from .plan import Action, Do, Plan

RESIDENT = 2
"""Groups at the end that are kept by default: copies then overlap with the compute of another group."""


@dataclass(frozen=True, slots=True)
class DefaultSchedule:
    """Offload the first `num_layers` of `model_layers`; at most the difference is resident at any time.

    With ``window = model_layers - num_layers``, layer ``i`` is released before layer ``i + window`` starts, and
    reloaded after the backward of layer ``i + window``.  The rule is that of Transformer Engine's CPU offloading.

    Parameters
    ----------
    num_layers : int
        Layers to offload, from the first; 0 offloads nothing.
    model_layers : int
        Layers in one pass; more than `num_layers`.

    Raises
    ------
    ValueError
        If `num_layers` is negative or not smaller than `model_layers`.

    Examples
    --------
    >>> DefaultSchedule(num_layers=2, model_layers=5).window
    3
    """

    num_layers: int
    model_layers: int

    def __post_init__(self) -> None:
        check_whole(model_layers=self.model_layers, least=1)
        check_whole(num_layers=self.num_layers, least=0)
        if self.num_layers >= self.model_layers:
            raise ValueError(
                f"num_layers is {self.num_layers} but model_layers is {self.model_layers}: the last layer's "
                "activations are needed at once, so offload at most model_layers - 1 layers."
            )

    @property
    def window(self) -> int:
        """Number of layers whose activations may be resident at the same time."""
        return self.model_layers - self.num_layers

    @property
    def overlaps(self) -> bool:
        """Whether copies can overlap with compute; with one resident layer each waits for the other."""
        return self.num_layers == 0 or self.window > 1

    def plan(self) -> Plan:
        """Return the schedule as data."""
        return GroupSchedule(self.num_layers).plan(["layer"] * self.model_layers)


@dataclass(frozen=True, slots=True)
class GroupSchedule:
    """Which groups of a sequence are offloaded, and when they are released and reloaded.

    Groups are of one *kind* if they play the same part in their blocks, such as all attention modules.  The last group
    of each kind is kept, because backward begins there; so are the last two of the sequence.

    Let ``d`` be the number of groups at the end of the sequence that are kept, or ``max_inflight + 1`` if that is less.
    Group ``i`` is freed before group ``i + d`` starts, and reloaded after the backward of group ``i + d``; with several
    kinds of at most the second behind it, because groups of different sizes do not fit into each other's memory.

    Parameters
    ----------
    num_layers : int, optional
        Number of groups of each kind to offload, from the first.  None for all that can be.
    fraction : float
        Fraction of the eligible groups to offload, from the first, rounded.
    max_inflight : int, optional
        Largest number of groups that are being copied when a group ends, in either direction.

    Raises
    ------
    ValueError
        If a value is out of its range.

    Examples
    --------
    >>> from actoffload.schedule.schedules import GroupSchedule
    >>> GroupSchedule().offloaded(["layer"] * 5)
    (0, 1, 2)
    >>> GroupSchedule().offloaded(["attention", "mlp"] * 3)
    (0, 1, 2, 3)
    """

    num_layers: int | None = None
    fraction: float = 1.0
    max_inflight: int | None = None

    def __post_init__(self) -> None:
        check_whole(num_layers=self.num_layers, optional=True, least=0)
        check_fraction(self.fraction)
        check_whole(max_inflight=self.max_inflight, optional=True, least=1)

    def offloaded(self, kinds: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of the groups to offload in a sequence, given by kinds."""
        last = len(kinds) if self.num_layers is not None else len(kinds) - RESIDENT  # [guard: resident groups -> True]
        found: list[int] = []
        for kind in dict.fromkeys(kinds):
            places = [k for k, other in enumerate(kinds) if other == kind]
            may = [k for k in places[:-1] if k < last]  # [guard: last group of a kind]
            if self.num_layers is not None:
                may = may[: self.num_layers]
            found += may[: math.floor(self.fraction * len(may) + 0.5)]
        return tuple(sorted(found))

    def plan(self, kinds: Sequence[str]) -> Plan:
        """Return the plan for a sequence of groups, given by their kinds; at least one."""
        offloaded = self.offloaded(kinds)
        resident = len(kinds) - 1 - offloaded[-1] if offloaded else len(kinds)  # groups at the end that are kept
        # While one runs, its neighbour is copied: otherwise compute would wait for each copy.
        most = resident if self.max_inflight is None else self.max_inflight + 1
        window = min(resident, most)  # [guard: groups in flight]
        back = window if len(set(kinds)) == 1 else min(window, RESIDENT)
        calls = []
        for i in offloaded:
            # The release of layer i comes before the copies of layer i + window, which use the freed memory.
            calls += [
                (Event(When.FORWARD_START, i), Action(Do.OFFLOAD, i)),
                (Event(When.FORWARD_START, i + window), Action(Do.RELEASE, i)),
                (Event(When.BACKWARD_END, i + back), Action(Do.RELOAD, i)),
            ]
        return Plan.of(len(kinds), calls)


# The order of the groups


class ExecutionOrder:
    """The order of the groups in one pass: as earlier, without those that are skipped, with those that run besides."""

    def __init__(self, earlier: Sequence[int]) -> None:
        self._earlier = earlier
        self._next = 0
        self.started: list[int] = []

    def start(self, key: int) -> bool:
        """Note that a group starts; return whether it is the next one in the order."""
        self.started.append(key)
        earlier, k = self._earlier, self._next
        if k < len(earlier) and earlier[k] == key:
            self._next += 1
            return True
        while k < len(earlier) and earlier[k] != key:
            k += 1
        if k < len(earlier):  # [guard: skipped groups]
            self._next = k + 1
        return False

    @property
    def complete(self) -> bool:
        """Whether the last group of the order has started."""
        return self._next >= len(self._earlier)  # [guard: complete execution order -> False]

    @property
    def sequence(self) -> tuple[int, ...]:
        """The groups that have started, and those that follow in the order."""
        return (*self.started, *self._earlier[self._next :])


# Another sequence of groups


def leanest_calls(layer: int) -> tuple[tuple[Event, Action], ...]:
    """Return the events and actions with which a layer takes the least memory: see `leanest`."""
    return (
        (Event(When.FORWARD_START, layer), Action(Do.OFFLOAD, layer)),
        (Event(When.FORWARD_END, layer), Action(Do.RELEASE, layer)),
        (Event(When.BACKWARD_END, layer + 1), Action(Do.RELOAD, layer)),
    )


@lru_cache(maxsize=64)
def leanest(layers: int) -> Plan:
    """Return the plan with the smallest peak: each layer leaves as soon as its forward has ended.

    It is reloaded right before its backward; the last one stays.  Compute waits for every copy.
    """
    return Plan.of(max(layers, 1), (call for k in range(layers - 1) for call in leanest_calls(k)))


def remap(plan: Plan, names: Sequence[str], *, offload_others: bool = False) -> Plan:
    """Return a plan for another sequence of groups; its costs are not known.

    Each action is done at the same event of the same group, or at the next event in time if that group does not run.
    Groups that the plan does not know are kept, or, with `offload_others`, offloaded as in the plan with the smallest
    peak; so is the one that was the last, if others follow it now.
    """
    if tuple(names) == plan.names:
        return plan
    # The earlier position of each group, None for new ones.
    places = {_nth(plan.names, k): k for k in range(plan.model_layers)}
    earlier = tuple(places.get(_nth(names, k)) for k in range(len(names)))
    now = {k: position for position, k in enumerate(earlier) if k is not None}
    events = list(Plan(len(names)).events())
    order = {event: k for k, event in enumerate(events)}
    # For each action the place of its event, or of the next one in time whose group still runs.
    targets, place = dict[Action, int](), len(events)
    for event in reversed(list(plan.events())):
        if event.layer in now:
            place = order[event._replace(layer=now[event.layer])]
        targets |= dict.fromkeys(reversed(plan.steps.get(event, ())), place)
    ranks = {action: k for k, action in enumerate(reversed(targets))}
    calls = list[tuple[int, int, Action]]()
    for layer, before in enumerate(earlier[:-1]):
        known = [] if before is None else [each for do in Do if (each := Action(do, before)) in targets]
        moved, place = list[tuple[int, int, Action]](), order[Event(When.FORWARD_START, layer)]
        ended, begins = place + 1, order[Event(When.BACKWARD_START, layer)]
        for action in known:
            if action.do is Do.RELEASE:
                place = max(place, ended)  # [guard: moved release]
            place = max(place, targets[action])  # [guard: moved action]
            if action.do is Do.RELOAD:
                place = min(place, begins)  # [guard: moved reload]
            moved.append((place, ranks[action], action._replace(layer=layer)))
        if not any(at > begins or (at == begins and action.do is Do.RELEASE) for at, _, action in moved):
            calls += moved
        if offload_others and not known and before in (None, plan.model_layers - 1):
            # [guard: groups that a plan does not know]
            calls += ((order[event], layer, action) for event, action in leanest_calls(layer))
    calls.sort(key=lambda call: call[:2])

    def entries_of(entries: Sequence[Any], unknown: Any) -> tuple[Any, ...]:
        return tuple(unknown if k is None else entries[k] for k in earlier) if entries else ()

    return Plan.of(
        len(names),
        ((events[place], action) for place, _, action in calls),
        names=tuple(names),
        because=plan.because,
        holds=plan.holds,
        nbytes=entries_of(plan.nbytes, 0),
        recomputed_nbytes=entries_of(plan.recomputed_nbytes, 0),
        saves=entries_of(plan.saves, None),
    )


def _nth(names: Sequence[str], position: int) -> tuple[str, int]:
    """Return a name and how many times it comes before a position."""
    return names[position], names[:position].count(names[position])
