"""Streams, events and vector clocks: which work is ordered before which."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Point(NamedTuple):
    """One piece of work: number `tick` on the stream with this index."""

    stream: int
    tick: int


@dataclass(eq=False)
class Stream:
    """A queue of work with a vector clock.

    For every stream, the clock counts the work that is ordered before the next work queued here.  It advances when
    work is queued, not when it runs, so the order does not depend on timing.  `index` is the place in the device's list
    of streams; the work of compute streams runs at once, that of others is a copy.
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
        """Add one piece of work and return it."""
        self.clock[self.index] = self.clock.get(self.index, 0) + 1
        return Point(self.index, self.clock[self.index])

    def follows(self, point: Point) -> bool:
        """Whether the next work of this stream is ordered after a piece of work."""
        return self.clock.get(point.stream, 0) >= point.tick

    def join(self, clock: dict[int, int]) -> None:
        """Order the next work of this stream after all work that a clock counts."""
        for stream, tick in clock.items():
            if self.clock.get(stream, 0) < tick:
                self.clock[stream] = tick

    def push(self, item: Work | Wait) -> None:
        """Queue a copy or a wait; it runs later."""
        self.queue.append(item)
        self.queued += 1

    def synchronize(self) -> None:
        """Raise, since the engine must not make the host wait for a stream."""
        raise AssertionError(f"the host waits for {self.name}")

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """The end of the queue of a stream at one moment; `capture` is the number of the capture, 0 outside of one."""

    stream: Stream
    position: int
    clock: dict[int, int]
    capture: int = 0

    @property
    def passed(self) -> bool:
        """Whether all work queued before it has run."""
        return self.stream.done >= self.position


@dataclass(frozen=True, eq=False, slots=True)
class Wait:
    """A queue entry: later entries run only after the event has passed."""

    event: Event


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A queue entry: a copy that has not run yet."""

    label: int
    run: Callable[[], None]
