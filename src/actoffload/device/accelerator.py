"""The accelerator of this machine, whichever `torch.accelerator` names: CUDA, ROCm, XPU, one code path.

`[Note: copy engines]`  An NVIDIA GPU has one copy engine for each direction.  It runs the copies of all streams in the
order in which they were queued, and goes on with another stream only when the next operation of the present one is no
copy.  So large copies are cut into chunks, with a *separator* behind each: a copy of a few bytes, which the driver runs
without a copy engine.  A small copy waited 0.4 ms instead of 24 ms behind 1.5 GiB of copies, which took 2 % longer.  A
kernel would wait for room on the device: beside matrix products copies took 44 % longer.

Each chunk and its separator took the host about 23 us, for which short steps wait.  So chunks are larger where one rank
runs, copies that are queued together share chunks, and fewer than `SEPARATED` bytes at the end have no separator.

While a graph is captured, no memory may be allocated for a separator.  Each device gets its separator with its first
large copy, which comes earlier: host memory for a captured copy is that of an earlier step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import torch
from torch import distributed as dist

from .._torch.tensors import (
    current_stream,
    empty_host_cache,
    is_capturing,
    sleep_on_device,
)
from .base import Backend, Pairs, Stream, StreamEvent
from .host import check_room, cpus_near_device, pin, room, unpin

CLOCK = 1.7e9  # cycles in a second of a GPU that works, about


class Accelerator(Backend):
    """Streams, events, memory and copies through `torch.accelerator`, `torch.Stream` and `torch.Event`.

    Raises
    ------
    RuntimeError
        If the machine has no accelerator.
    """

    peak_before_resets: ClassVar[int] = 0
    """The most bytes that were allocated before `allocated` reset the count; who measures a peak sets it to 0."""

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator()
        if found is None:
            raise RuntimeError("This machine has no accelerator; use the reference device, which serves CPU tensors.")
        self.type = self.name = found.type
        self.resolution = 1e-5
        self.batch = 1 << 26  # 1.2 ms at 55 GB/s
        module = getattr(torch, found.type, None)  # torch.cuda, torch.xpu
        self._memory: Any = module if hasattr(module, "mem_get_info") else None
        self._nvidia = found.type == "cuda" and torch.version.hip is None
        self._pins = self._nvidia and sys.platform == "linux"
        self.powers_of_two = not self._pins  # as PyTorch's allocator does
        self._separators: dict[int, Separator] = {}  # by device index

    def current_device(self) -> torch.device:
        return torch.device(self.type, torch.accelerator.current_device_index())

    def current_stream(self, device: torch.device) -> Stream:
        # What torch.accelerator.current_stream calls, without its checks: it is called for each saved tensor.
        return current_stream(device.index)

    def new_stream(self, device: torch.device) -> Stream:
        return torch.Stream(device)

    def adopt(self, stream: Stream) -> Stream:
        # A torch.cuda.Stream records events of CUDA's own class, and torch.Stream.wait_event passes over such an
        # event without waiting and without an error (seen with torch 2.11).  So every stream here is a torch.Stream.
        if not isinstance(stream, torch.Stream):
            raise TypeError(f"offload_stream is {stream!r}; expected a torch.Stream, such as torch.cuda.Stream().")
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def on(self, stream: Stream) -> Any:
        return stream

    # Called several times for each saved tensor, so without a Python frame around them.
    place: Any = staticmethod(attrgetter("device"))
    record: Any = staticmethod(torch.Stream.record_event)
    wait: Any = staticmethod(torch.Stream.wait_event)
    wait_stream: Any = staticmethod(torch.Stream.wait_stream)
    capturing = staticmethod(is_capturing)

    def record_timed(self, stream: Stream) -> StreamEvent:
        return stream.record_event(torch.Event(self.type, enable_timing=True))

    def elapsed(self, start: StreamEvent, end: StreamEvent) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def passed(self, event: StreamEvent) -> bool:
        return bool(event.query())

    def allocated(self) -> tuple[int, int] | None:
        found = self._statistics().get("allocated_bytes", {}).get("all")
        if found is None:
            return None
        self._memory.reset_peak_memory_stats()
        Accelerator.peak_before_resets = max(Accelerator.peak_before_resets, found["peak"])
        return found["current"], found["peak"]

    def in_use(self) -> int | None:
        found = self._statistics().get("allocated_bytes", {}).get("all")
        return None if found is None else int(found["current"])

    def _statistics(self) -> Any:
        """Return what the allocator counts, without sorting its 150 numbers as `memory_stats` does."""
        return {} if self._memory is None else self._memory.memory_stats_as_nested_dict()

    def total_memory(self) -> int | None:
        return None if self._memory is None else int(self._memory.mem_get_info()[1])

    def memory_limit(self) -> int | None:
        if self._memory is None:
            return None
        free, total = self._memory.mem_get_info()
        most: int = free + self._memory.memory_reserved()
        fraction = getattr(self._memory, "get_per_process_memory_fraction", None)
        return most if fraction is None else min(most, int(total * fraction()))

    def release_device(self) -> None:
        if self._memory is not None and not self.capturing():
            self._memory.empty_cache()

    def out_of_memory_errors(self) -> int:
        return int(self._statistics().get("num_ooms", 0))

    def occupy(self, seconds: float) -> None:
        if self.type == "cuda" and not self.capturing():
            sleep_on_device(int(seconds * CLOCK))

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def empty_host(self, nbytes: int) -> torch.Tensor:
        check_room(nbytes)
        memory = None
        if self._pins:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cpus = cpus_near_device(torch.accelerator.current_device_index())
            memory = pin(nbytes, runtime.cudaHostRegister, runtime.cudaHostUnregister, cpus)
            if memory is None:
                with suppress(RuntimeError):  # CUDA reports a refusal once more, at the next kernel
                    torch.zeros(1, device=self.type)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if memory is None else memory

    def host_room(self) -> int | None:
        if self._memory is not None:
            properties = self._memory.get_device_properties(torch.accelerator.current_device_index())
            if getattr(properties, "is_integrated", False):
                return 0
        return room()

    def release_host(self) -> None:
        if not self.capturing():
            unpin()
            empty_host_cache()

    def to_host(self, pairs: Pairs, stream: Stream) -> None:
        self._copy(pairs, stream, to_host=True)

    def to_device(self, pairs: Pairs, stream: Stream) -> None:
        self._copy(pairs, stream, to_host=False)

    def _copy(self, pairs: Pairs, stream: Stream, *, to_host: bool) -> None:
        separator = None
        with stream:
            if self._nvidia:
                device = pairs[0][1].device
                separator = self._separators.get(device.index)
                if separator is None and not self.capturing():
                    separator = self._separators[device.index] = separator_of(device)
            several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            chunk = (TO_HOST if to_host else TO_DEVICE) if several else ALONE
            copy_in_chunks(pairs, to_host=to_host, chunk=chunk, separator=separator)


# Copies in chunks

# Most bytes of a chunk, with its time at 55 GB/s
TO_HOST = 1 << 25  # of a copy to the host where several ranks run: 0.6 ms
TO_DEVICE = 1 << 24  # of a copy to the device where several ranks run: 0.3 ms
ALONE = 1 << 27  # where one rank runs, for which no collective waits: 2.4 ms

SEPARATED = 1 << 22  # the last chunk has a separator from here on: 76 us at 55 GB/s, of which that is a few percent
GRAIN = 512  # each chunk starts at a multiple of this many elements, so that copies stay aligned


Separator: TypeAlias = Callable[[], object]


def separator_of(device: torch.device) -> Separator:
    """Return a function that queues a copy of four bytes, which nothing reads, to a CUDA device."""
    host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        memory = torch.empty(1, dtype=torch.int32, device=device)
    return partial(memory.copy_, host, True)  # without blocking


def pieces(host: torch.Tensor, device: torch.Tensor, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one-dimensional views of a (host, device) pair of the same order, of at most `chunk` bytes, or the pair."""
    count = -(-host.nbytes // chunk)
    if count <= 1:
        yield host, device
        return
    total = host.numel()
    each = -(-total // (count * GRAIN)) * GRAIN
    first, second = host.storage_offset(), device.storage_offset()
    for start in range(0, total, each):
        size = (min(each, total - start),)
        yield host.as_strided(size, (1,), first + start), device.as_strided(size, (1,), second + start)


def copy_in_chunks(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    to_host: bool,
    chunk: int,
    separator: Separator | None,
) -> None:
    """Queue copies of (host, device) pairs on the current stream; without a separator they are queued whole."""
    queued = 0
    for pair in pairs:
        for host, device in (pair,) if separator is None else pieces(*pair, chunk):
            if separator is not None and queued and queued + host.nbytes > chunk:
                separator()
                queued = 0
            if to_host:
                host.copy_(device, True)  # without blocking
            else:
                device.copy_(host, True)
            queued += host.nbytes
    if separator is not None and queued >= SEPARATED:
        separator()
