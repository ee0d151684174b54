"""The accelerator of this machine, whichever `torch.accelerator` names: CUDA, ROCm, XPU, one code path."""

from __future__ import annotations

import os
from contextlib import suppress
from operator import attrgetter
from typing import Any, ClassVar

import torch

from .._torch.tensors import (
    current_stream,
    empty_host_cache,
    is_capturing,
    set_allocator_settings,
    sleep_on_device,
)
from .base import Backend, Pairs, Stream, StreamEvent
from .chunks import Separator, chunk_bytes, copy_in_chunks
from .host import check_room, node_of_device, on_node, room

__all__ = ["Accelerator"]

CLOCK = 1.7e9  # cycles in a second of a GPU that works, about


class Accelerator(Backend):
    """Streams, events, memory and copies through `torch.accelerator`, `torch.Stream` and `torch.StreamEvent`.

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
        self._settled_pinning = False
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
        if self._nvidia and not self._settled_pinning:
            self._settled_pinning = True
            given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
            if "pinned" not in given:
                # Several threads take 0.13 instead of 0.41 s a GiB (H100); see PyTorch's notes on CUDA semantics.
                own = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
                with suppress(RuntimeError, ValueError):  # a version of PyTorch that does not know them
                    set_allocator_settings(",".join(filter(None, (given, own))))
        node = node_of_device(torch.accelerator.current_device_index()) if self._nvidia else None
        with on_node(node):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def host_room(self) -> int | None:
        if self._memory is not None:
            properties = self._memory.get_device_properties(torch.accelerator.current_device_index())
            if getattr(properties, "is_integrated", False):
                return 0
        return room()

    def release_host(self) -> None:
        if not self.capturing():
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
                    separator = self._separators[device.index] = Separator(device)
            copy_in_chunks(pairs, to_host=to_host, chunk=chunk_bytes(to_host=to_host), separator=separator)
