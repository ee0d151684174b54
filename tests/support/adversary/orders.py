"""The order of pending copies: late, early, or random, as the waits allow."""

import random
from collections.abc import Callable
from typing import Literal

from torch.utils._python_dispatch import _disable_current_modes

from .clocks import Event, Stream, Wait, Work

Mode = Literal["late", "early", "random"]


class Orders:
    """All streams of a device, and the order in which their queues run; see `AdversarialDevice`."""

    def __init__(self, seed: int, mode: Mode) -> None:
        self.mode = mode
        self.streams: list[Stream] = []
        self.trace: list[tuple[int, int]] = []
        self._random = random.Random(seed)
        self._labels = 0
        self._calls = 0

    def stream(self, name: str, device: int, *, compute: bool) -> Stream:
        """Return a new stream; its index is appended to its name."""
        index = len(self.streams)
        self.streams.append(Stream(f"{name} {index}", index, device, compute))
        return self.streams[-1]

    def call(self) -> None:
        """Run pending copies as the mode says; every call of the device calls this."""
        self._calls += 1
        if self.mode == "early":
            while ready := self._runnable():
                self._advance(ready[0])
        elif self.mode == "random":
            while self._random.random() < 0.4 and (ready := self._runnable()):
                self._advance(self._random.choice(ready))

    def push(self, stream: Stream, run: Callable[[], None]) -> None:
        """Queue a copy; on a compute stream it runs at once."""
        self._labels += 1
        work = Work(self._labels, run)
        if stream.compute:
            self._run(work)
        else:
            stream.push(work)

    def run_to(self, event: Event) -> None:
        """Run the work that an event waits for, and nothing else."""
        while not event.passed:
            self._advance(event.stream)

    def finish(self) -> None:
        """Run all pending work."""
        for stream in self.streams:
            self.run_to(Event(stream, stream.queued, {}))

    def _runnable(self) -> list[Stream]:
        return [s for s in self.streams if s.queue and (not isinstance(s.queue[0], Wait) or s.queue[0].event.passed)]

    def _advance(self, stream: Stream) -> None:
        item = stream.queue.popleft()
        if isinstance(item, Wait):
            self.run_to(item.event)
        else:
            self._run(item)
        stream.done += 1

    def _run(self, work: Work) -> None:
        self.trace.append((self._calls, work.label))
        with _disable_current_modes():  # a device runs no operators of the program
            work.run()
