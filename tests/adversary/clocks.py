"""Streams, events and vector clocks: what is ordered before what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Event", "Point", "Stream", "Wait", "Work"]


class Point(NamedTuple):
    """One piece of work: the `tick`-th of the stream with this index."""

    stream: int
    tick: int


@dataclass(eq=False)
class Stream:
    """A queue of work with a vector clock.

    The clock says, for every stream, how much of its work is ordered before whatever is queued here next.  It
    moves when work is queued, not when it runs: what is ordered does not depend on who happened to be fast.

    Parameters
    ----------
    name : str
        For messages.
    index : int
        Place in the device's list of streams.
    device : int
        Which logical device it belongs to.
    compute : bool
        True for a stream of the program, whose work runs at once; False for one that only transfers.
    """

    name: str
    index: int
    device: int
    compute: bool
    clock: dict[int, int] = field(default_factory=dict)
    queue: deque[Work | Wait] = field(default_factory=deque)
    done: int = 0
    queued: int = 0

    def tick(self) -> Point:
        """Count one more piece of work and return it."""
        self.clock[self.index] = self.clock.get(self.index, 0) + 1
        return Point(self.index, self.clock[self.index])

    def follows(self, point: Point) -> bool:
        """Whether the next work of this stream is ordered after a piece of work."""
        return self.clock.get(point.stream, 0) >= point.tick

    def join(self, clock: dict[int, int]) -> None:
        """Order the next work of this stream after everything that a clock counts."""
        for stream, tick in clock.items():
            if self.clock.get(stream, 0) < tick:
                self.clock[stream] = tick

    def push(self, item: Work | Wait) -> None:
        """Queue something that does not run at once."""
        self.queue.append(item)
        self.queued += 1

    def synchronize(self) -> None:
        """Exist because streams have it; nothing in the engine may call it."""
        raise AssertionError(f"the host waits for {self.name}")

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """The end of a stream's queue at one moment, and in which capture that was; 0 for none."""

    stream: Stream
    position: int
    clock: dict[int, int]
    capture: int = 0

    @property
    def passed(self) -> bool:
        """Whether all that was queued before it has run."""
        return self.stream.done >= self.position


@dataclass(frozen=True, eq=False, slots=True)
class Wait:
    """An entry of a queue: nothing behind it runs before the event has passed."""

    event: Event


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """An entry of a queue: a copy that has not run yet."""

    label: int
    run: Callable[[], None]
