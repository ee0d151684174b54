"""The reference device: CPU memory stands for device memory, and a separate host pool for host memory.

Copies and releases of memory are real.  Time is virtual: each stream has a clock, which only copies, waits and
`ReferenceDevice.compute` move forward.  So the engine can be compared with `simulate` on any machine.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .._text import size
from .._torch.tensors import DispatchMode, address, storage_address, tree_leaves
from .base import Backend, Pairs, Stream, StreamEvent


@dataclass(slots=True, eq=False)
class ReferenceStream:
    """A stream that has always caught up, with a clock in seconds."""

    name: str
    now: float = 0.0

    def synchronize(self) -> None:
        """Return at once: work on this device is done when it is queued."""


@dataclass(frozen=True, slots=True)
class ReferenceEvent:
    """The reading of a stream's clock."""

    time: float


class ReferenceDevice(Backend):
    """A device made of CPU memory, with a link of a given bandwidth.

    Parameters
    ----------
    d2h, h2d : float
        Bandwidth of the link in bytes per second; infinite by default.
    wall_clock : bool
        Let events read this machine's clock instead of the virtual ones: for programs whose compute is real.
    memory : int, optional
        Bytes of device memory.  What operations create inside of ``with device.counting():`` counts; one that needs
        more raises ``torch.OutOfMemoryError``.  By default nothing is counted, and there is no limit.

    Examples
    --------
    >>> device = ReferenceDevice(d2h=1e9, h2d=1e9)
    >>> device.compute(0.25)
    >>> device.current_stream(torch.device("cpu")).now
    0.25
    """

    name = "reference"
    type = "cpu"
    times = False

    def __init__(
        self,
        d2h: float = float("inf"),
        h2d: float = float("inf"),
        *,
        wall_clock: bool = False,
        memory: int | None = None,
    ) -> None:
        if not (d2h > 0 and h2d > 0):
            raise ValueError(f"d2h={d2h}, h2d={h2d}: expected positive bytes per second.")
        self.d2h, self.h2d = d2h, h2d
        self.wall_clock = wall_clock
        self.resolution = 1e-5 if wall_clock else 0.0
        self.times = self.times or memory is not None  # plans are made for a limit
        self.main = ReferenceStream("compute")
        self._created = CreatedStorages(memory)
        self._local = threading.local()

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self._local, "stream", self.main)

    def new_stream(self, device: torch.device) -> Stream:
        return ReferenceStream("transfer")

    def adopt(self, stream: Stream) -> Stream:
        if not isinstance(stream, ReferenceStream):
            raise TypeError(f"offload_stream is {stream!r}; expected a stream of this reference device.")
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[ReferenceStream]:
        before = getattr(self._local, "stream", self.main)
        self._local.stream = stream
        try:
            yield stream
        finally:
            self._local.stream = before

    def record(self, stream: Stream) -> StreamEvent:
        return ReferenceEvent(time.perf_counter() if self.wall_clock else stream.now)

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        stream.now = max(stream.now, event.time)

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        self.wait(stream, self.record(other))

    def elapsed(self, start: StreamEvent, end: StreamEvent) -> float:
        return float(end.time - start.time)

    def empty_host(self, nbytes: int) -> torch.Tensor:
        self._created.paused = True
        try:
            return torch.empty(nbytes, dtype=torch.uint8)
        finally:
            self._created.paused = False

    def counting(self) -> CreatedStorages:
        """Return a context in which what operations create counts as device memory."""
        return self._created

    def made(self, tensor: torch.Tensor) -> None:
        for created in CreatedStorages.entered:
            created._follow(tensor.untyped_storage(), set())
            created._check()

    def allocated(self) -> tuple[int, int] | None:
        created = self._created
        if created.limit is None:
            return None
        found = created.now, created.peak
        created.peak = created.now
        return found

    def in_use(self) -> int | None:
        return None if self._created.limit is None else self._created.now

    def memory_limit(self) -> int | None:
        return self._created.limit

    total_memory = memory_limit

    def out_of_memory_errors(self) -> int:
        return self._created.errors

    def to_host(self, pairs: Pairs, stream: Stream) -> None:
        for host, device in pairs:
            host.copy_(device)
        self._take(stream, pairs, self.d2h)

    def to_device(self, pairs: Pairs, stream: Stream) -> None:
        for host, device in pairs:
            device.copy_(host)
        self._take(stream, pairs, self.h2d)

    def _take(self, stream: ReferenceStream, pairs: Pairs, bandwidth: float) -> None:
        stream.now += sum(host.nbytes for host, _ in pairs) / bandwidth

    def compute(self, seconds: float) -> None:
        """Let the current stream compute for some virtual seconds."""
        self.current_stream(torch.device("cpu")).now += seconds


class CreatedStorages:
    """Counts the bytes of the storages that operations create in a ``with`` block; raises where they exceed a limit."""

    entered: ClassVar[list[CreatedStorages]] = []

    def __init__(self, limit: int | None = None) -> None:
        self.now = self.peak = 0  # bytes that exist now, and their largest number
        self.errors = 0  # operations that needed more than the limit
        self.limit = limit
        self.paused = False  # what is created does not count
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._mode: Any = None

    def __enter__(self) -> CreatedStorages:
        if DispatchMode is None:
            raise RuntimeError(
                f"PyTorch {torch.__version__} has no TorchDispatchMode, which measuring memory without an accelerator "
                "needs; use another release of PyTorch, or an accelerator."
            )
        created = self

        class Watch(DispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if created.paused:
                    return result
                inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
                before = set(map(storage_address, inputs))
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                        created._follow(leaf.untyped_storage(), before)
                created._check()
                return result

        self._mode = Watch()
        self._mode.__enter__()
        self.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.entered.remove(self)
        self._mode.__exit__(None, None, None)

    def _check(self) -> None:
        if self.limit is not None and self.now > self.limit:
            self.errors += 1
            self.peak = self.limit
            raise torch.OutOfMemoryError(
                f"The reference device is out of memory: {size(self.now)} are needed, and it has {size(self.limit)}."
            )

    def _follow(self, storage: torch.UntypedStorage, before: Set[int]) -> None:
        key, nbytes = address(storage), storage.nbytes()
        if key in self._alive or key in before:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, freed)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
