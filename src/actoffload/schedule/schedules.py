"""Schedules as data: the default, and by groups of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .._arguments import check_fraction, check_whole
from .plan import Action, Do, Event, Plan, When


@dataclass(frozen=True, slots=True)
class DefaultSchedule:
    """Offload the first `num_layers` of `model_layers`; at most the difference is resident at any time.

    With ``window = model_layers - num_layers``, layer ``i`` is copied while it and the next layers compute.  It is
    released before layer ``i + window`` starts, and reloaded after the backward of layer ``i + window``.  The rule is
    that of Transformer Engine's CPU offloading.

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


RESIDENT = 2
"""Groups at the end that are kept by default: copies then overlap with the compute of another group."""


@dataclass(frozen=True, slots=True)
class GroupSchedule:
    """Which groups of a sequence are offloaded, and when they are released and reloaded.

    A group is a stretch of the forward whose saved tensors are offloaded together.  Groups are of one *kind* if they
    play the same part in their blocks, such as all attention modules.  The last group of each kind is kept, because
    backward begins there; so are the last two of the sequence.

    Let ``d`` be the number of groups at the end of the sequence that are kept, or ``max_inflight + 1`` if that is less.
    Group ``i`` is copied while it computes, and freed before group ``i + d`` starts.  So the device holds the bytes of
    ``d`` groups.  Group ``i`` is reloaded after the backward of group ``i + d``; with several kinds of at most the
    second behind it, because groups of different sizes do not fit into each other's memory.

    Parameters
    ----------
    num_layers : int, optional
        Number of groups of each kind to offload, from the first.  None for all that can be.
    fraction : float
        Fraction of the eligible groups to offload, from the first, rounded.
    max_inflight : int, optional
        Largest number of groups that are being copied when a group ends, in either direction; compute waits where
        there would be more.  None for no limit but that of the kept groups.

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
