"""Points in streams that other streams wait for, and which of several is the last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..device.base import Event

__all__ = ["Mark", "latest"]


class Mark(NamedTuple):
    """An event with its place in the order of its stream.

    Parameters
    ----------
    event : Event
        What to wait for.
    lane : int
        Which transfer stream it was recorded on.
    order : int
        Grows along a lane: who waits for a mark has waited for all before it.
    captured : bool
        It was recorded while a graph was captured, and means something only within that capture.
    """

    event: Event
    lane: int
    order: int
    captured: bool


def latest(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """Return the last mark of each lane, which stands for all of them."""
    last: dict[int, Mark] = {}
    for mark in marks:
        if mark.lane not in last or last[mark.lane].order < mark.order:
            last[mark.lane] = mark
    return tuple(last.values())
