"""The adversarial device: CPU tensors, and copies that run late, early or in random order, as the waits allow."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from actoffload.device.base import Backend, Pairs

from .clocks import Event, Point, Stream, Wait
from .memory import POISON, DeviceMemory, HostMemory, Sight, byte_range
from .orders import Mode, Orders


class AdversarialDevice(Backend):
    """A device whose copies keep no memory alive and run in any order that the waits allow.

    Compute streams run their work at once.  A copy stream is a queue; an entry runs when a compute stream waits for
    it (``late``), as soon as it can (``early``), or at a random call in between (``random``).  Independently of the
    order, every access is checked to be ordered after all accesses that it conflicts with.  `violations` lists the
    ones that are not, and such a copy writes poison.  `seed` is that of random orders.

    Tensors of dtype float64 are on a second logical device, so programs with two devices run on any machine.
    """

    type = "cpu"
    name = "adversary"
    times = False
    resolution = 0.0

    def __init__(self, seed: int = 0, mode: Mode = "random") -> None:
        self.orders = Orders(seed, mode)
        self.violations: list[str] = []
        self._memory: dict[int, DeviceMemory] = {}
        self._slabs: dict[int, HostMemory] = {}
        self._local = threading.local()
        self._capture = 0  # number of the current capture, or 0
        self._captures = 0
        self._defaults = [self.orders.stream("compute", device, compute=True) for device in (0, 1)]

    # Calls of a program

    def side_stream(self, device: int = 0) -> Stream:
        """Return a new compute stream."""
        return self.orders.stream("side", device, compute=True)

    def produced(self, tensor: torch.Tensor) -> None:
        """Record that the work queued so far on the current stream allocated and wrote a tensor."""
        self._call()
        self._written(tensor, self._stream_of(tensor))

    def used(self, tensor: torch.Tensor) -> None:
        """Record that the current stream reads a tensor from now until the tensor is freed."""
        self._call()
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is None or memory.version is not None:
            return
        user = self._stream_of(tensor)
        user.tick()
        if not all(user.follows(point) for point in memory.writes):
            self.violations.append(f"{user} reads memory before its reload")
            _poison(tensor)
        if user is not memory.owner:
            memory.users.add(user.index)

    def barrier(self) -> None:
        """Make all compute streams wait for each other."""
        self._call()
        streams = [stream for stream in self.orders.streams if stream.compute]
        for stream in streams:
            stream.tick()
        clocks = [dict(stream.clock) for stream in streams]
        for stream in streams:
            for clock in clocks:
                stream.join(clock)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work that is queued in a ``with`` block.

        No stream may wait for an event across the borders of a capture.  All pending work runs at both borders.
        """
        self._settle()
        self._captures += 1
        self._capture = self._captures
        try:
            yield
        finally:
            self._settle()
            self._capture = 0

    def _settle(self) -> None:
        self.orders.finish()
        for stream in self.orders.streams:
            stream.tick()
        clocks = [dict(stream.clock) for stream in self.orders.streams]
        for stream in self.orders.streams:
            for clock in clocks:
                stream.join(clock)

    def finish(self) -> None:
        """Run all pending copies; a copy into memory that was freed is a violation."""
        self._call()
        self.orders.finish()
        self.collect()

    @property
    def buffers(self) -> int:
        """Number of storages from `empty_device` that are still alive."""
        self.collect()
        return sum(memory.version is None for memory in self._memory.values())

    # Calls of the engine

    def place(self, tensor: torch.Tensor) -> torch.device:
        self._call()
        stream = self._stream_of(tensor)
        self._written(tensor, stream).saves[stream.index] = stream.tick()
        return _device_of(tensor)

    def current_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def current_stream(self, device: torch.device) -> Stream:
        current: dict[int, Stream] = getattr(self._local, "current", {})
        return current.get(device.index or 0, self._defaults[device.index or 0])

    def new_stream(self, device: torch.device) -> Stream:
        return self.orders.stream("transfer", device.index or 0, compute=False)

    def adopt(self, stream: Any) -> Any:
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return self._on(stream)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[Stream]:
        before: dict[int, Stream] = getattr(self._local, "current", {})
        self._local.current = {**before, stream.device: stream}
        try:
            yield stream
        finally:
            self._local.current = before

    def record(self, stream: Stream) -> Event:
        self._call()
        stream.tick()
        return Event(stream, stream.queued, dict(stream.clock), self._capture)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call()
        if event.capture != self._capture:
            self.violations.append(f"{stream} waits for an event of {event.stream} across the border of a capture")
        stream.join(event.clock)
        stream.tick()
        if stream.compute:
            self.orders.run_to(event)  # work of a compute stream runs at once, so the event must have passed
        else:
            stream.push(Wait(event))

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        self.wait(stream, self.record(other))

    def elapsed(self, start: Event, end: Event) -> float:
        return 0.0

    def synchronize(self, device: torch.device) -> None:
        raise AssertionError("the engine waits on the host")

    def capturing(self) -> bool:
        return self._capture > 0

    def empty_device(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self._call()
        buffer = torch.empty_strided(size, stride, dtype=dtype)
        _poison(buffer)
        owner, storage = self.current_stream(device), buffer.untyped_storage()
        memory = DeviceMemory(StorageWeakRef(storage), owner, owner.tick(), None)
        self._memory[storage._cdata] = memory
        return buffer

    def empty_host(self, nbytes: int) -> torch.Tensor:
        self._call()
        slab = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self._slabs[slab.untyped_storage()._cdata] = HostMemory(slab)
        return slab

    def to_host(self, pairs: Pairs, stream: Stream) -> None:
        self._call()
        for host, device in pairs:
            self._copy_out(host, device, stream)

    def to_device(self, pairs: Pairs, stream: Stream) -> None:
        self._call()
        for host, device in pairs:
            self._copy_in(host, device, stream)

    # Copies

    def _copy_out(self, host: torch.Tensor, device: torch.Tensor, stream: Stream) -> None:
        before = len(self.violations)
        memory = self._memory.get(device.untyped_storage()._cdata)
        if memory is None:
            self.violations.append(f"{stream} offloads memory that no stream is known to have written")
            return
        for point in (memory.written, *memory.writes):
            if not stream.follows(point):
                self.violations.append(f"{stream} offloads memory that {self._name(point)} has not written yet")
        point = stream.tick()
        self._touch(host, stream, point, write=True)
        memory.reads.append(point)
        sight, wrong = Sight(device), len(self.violations) > before

        def run() -> None:
            source = None if wrong else sight.tensor()
            if source is None:  # freed: on a real device the next owner may have written there
                _poison(host)
            else:
                host.copy_(source)

        self.orders.push(stream, run)

    def _copy_in(self, host: torch.Tensor, device: torch.Tensor, stream: Stream) -> None:
        before = len(self.violations)
        memory = self._memory[device.untyped_storage()._cdata]
        if not stream.follows(memory.written):
            self.violations.append(f"{stream} copies into memory that {memory.owner} may still use")
        for point in (*memory.reads, *memory.writes):
            if not stream.follows(point):
                self.violations.append(f"{stream} copies into memory that {self._name(point)} is using")
        point = stream.tick()
        self._touch(host, stream, point, write=False)
        memory.writes.append(point)
        sight, wrong = Sight(device), len(self.violations) > before

        def run() -> None:
            target = sight.tensor()
            if target is None:
                self.violations.append(f"{stream} has copied into memory that was freed")
            elif wrong:
                _poison(target)
            else:
                target.copy_(host)

        self.orders.push(stream, run)

    def _touch(self, host: torch.Tensor, stream: Stream, point: Point, *, write: bool) -> None:
        slab = self._slabs[host.untyped_storage()._cdata]
        self.violations += slab.access(*byte_range(host), write=write, stream=stream, point=point)

    def _name(self, point: Point) -> str:
        return self.orders.streams[point.stream].name

    def _call(self) -> None:
        """Detect freed memory and run pending copies; every method of the device calls this first."""
        self.collect()
        self.orders.call()

    # Memory

    def _stream_of(self, tensor: torch.Tensor) -> Stream:
        return self.current_stream(_device_of(tensor))

    def _written(self, tensor: torch.Tensor, stream: Stream) -> DeviceMemory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = DeviceMemory(StorageWeakRef(storage), stream, stream.tick(), tensor._version)
            self._memory[storage._cdata] = memory
        elif memory.version is not None and memory.version != tensor._version:
            memory.version, memory.written = tensor._version, stream.tick()
        return memory

    def collect(self) -> None:
        """Check memory that was freed since the last call for pending accesses, and release its address."""
        # Every call of the device comes here; StorageWeakRef.expired gets to the same function through two others.
        expired = torch.UntypedStorage._expired
        for key in [key for key, memory in self._memory.items() if expired(memory.weak.cdata)]:
            self.violations += self._memory.pop(key).unordered(self.orders.streams)


def _device_of(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu", 1 if tensor.dtype is torch.float64 else 0)


def _poison(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.full((tensor.itemsize,), POISON, dtype=torch.uint8).view(tensor.dtype)[0])
