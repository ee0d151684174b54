"""The interface between the engine and a device: streams, events, memory and copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

GAPS = 4  # largest tensors that fit into the gaps of an allocator
LEAST_GAPS, MOST_GAPS = 0.03, 0.18  # of the memory

Stream: TypeAlias = Any  # a queue of work on a device: `torch.Stream`, or what stands in for it; compares with ``==``
StreamEvent: TypeAlias = Any  # a point in a stream that other streams can wait for
# The parts of one transfer: (host, device) tensors of equal shape and dtype.
Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Backend(Protocol):
    """A kind of device: all that the engine does to streams and memory goes through these methods."""

    name: str  # shown to users: "cuda", "xpu", "reference"
    type: str  # tensors on devices of this type can be offloaded: "cuda", "cpu"
    resolution: float  # seconds below which a measured wait is the cost of the measurement, and no stall
    times: bool = True  # whether times measured on this device say anything about a training step
    powers_of_two: bool = False  # `empty_host` takes a power of two of bytes from the system
    batch: int = 0  # bytes of copies that are queued together, which takes the host less time

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Return the device whose streams and host pool serve a tensor, which is about to be saved."""
        return tensor.device

    def current_device(self) -> torch.device:
        """Return the device that is current in the calling thread."""

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream on which the calling thread queues work for the device."""

    def new_stream(self, device: torch.device) -> Stream:
        """Return a stream of its own for transfers."""

    def adopt(self, stream: Stream) -> Stream:
        """Return a program's own stream as the methods here want it; raise a `TypeError` if it is not a stream."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make a stream the current one of this thread for a ``with`` block."""

    def record(self, stream: Stream) -> StreamEvent:
        """Return an event at the present end of a stream."""

    def record_timed(self, stream: Stream) -> StreamEvent:
        """Return an event that `elapsed` can read."""
        return self.record(stream)

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Make later work of a stream wait for an event; the host does not wait."""

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        """Make later work of a stream wait for all work queued so far on another; the host does not wait."""

    def host_time(self) -> float:
        """Return seconds of the host's clock."""
        return time.perf_counter()

    def elapsed(self, start: StreamEvent, end: StreamEvent) -> float:
        """Return seconds between two events of `record_timed` that have passed."""

    def passed(self, event: StreamEvent) -> bool:
        """Return whether the device has reached an event; does not wait."""
        return True

    def allocated(self) -> tuple[int, int] | None:
        """Return the bytes of device memory in use and the most since the last call, or None; resets the count."""
        return None

    def made(self, tensor: torch.Tensor) -> None:
        """Count what replay has made, which no dispatch mode sees; devices that count their memory do nothing."""
        return

    def in_use(self) -> int | None:
        """Return the bytes of device memory that tensors of this process use now; None if that is not known."""
        return None

    def memory_limit(self) -> int | None:
        """Return the bytes of device memory that tensors of this process may use; None if that is not known."""
        return None

    def release_device(self) -> None:
        """Give device memory that is cached and not in use back to the system; waits for the device."""
        return

    def out_of_memory_errors(self) -> int:
        """Return how many allocations of this process have failed so far; 0 if that is not known."""
        return 0

    def total_memory(self) -> int | None:
        """Return the bytes of memory that the device has; None if that is not known."""
        return None

    def occupy(self, seconds: float) -> None:
        """Keep the current stream busy for about so long, so that the host gets ahead of the device."""
        return

    def synchronize(self, device: torch.device) -> None:
        """Wait on the host for all work of a device.  Never called in a step."""
        return

    def capturing(self) -> bool:
        """Return whether work queued now on the current stream is captured into a graph."""
        return False

    def empty_device(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialized tensor on the device, ordered after the current stream's work."""
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def empty_host(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized page-locked bytes; raise a `RuntimeError` if the system has no more."""

    def host_room(self) -> int | None:
        """Return the bytes that may still be page-locked; 0 if the device uses the host memory, None if not known."""
        return None

    def release_host(self) -> None:
        """Return page-locked memory that was freed, and is cached, to the system; not while a graph is captured."""
        return

    def to_host(self, pairs: Pairs, stream: Stream) -> None:
        """Queue one transfer from the device to page-locked memory, made of (host, device) pairs of tensors."""

    def to_device(self, pairs: Pairs, stream: Stream) -> None:
        """Queue one transfer from page-locked memory to the device, made of (host, device) pairs of tensors."""


class StreamPosition(NamedTuple):
    """An event, and its place in the order of its stream."""

    event: StreamEvent
    order: int  # grows along a stream: waiting for a position includes all before it
    captured: bool  # while a graph was captured: it means something only within that capture


def current_stream(backend: Backend) -> Stream:
    """Return the current stream of the current device."""
    return backend.current_stream(backend.current_device())


def usable(limit: int | None, largest: int, budget: int | None = None) -> int | None:
    """Return how many bytes of a limit tensors may use, at most the budget; None if there is neither.

    The largest tensor has `largest` bytes: gaps take room.

    Caching allocators split blocks, and what is left serves smaller tensors only.  12 % were lost with 80 GiB and
    logits of 8 GiB, and 6 % with 4.5 GiB and tensors of 128 MiB.
    """
    if limit is None:
        return budget
    few, most = LEAST_GAPS * limit, MOST_GAPS * limit
    found = limit - round(min(max(few, GAPS * largest), most))
    return found if budget is None else min(found, budget)
