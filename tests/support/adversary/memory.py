"""Accesses to each range of memory, and the ones that were not ordered."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .clocks import Point, Stream

POISON = 0xFF
"""Value of every byte of undefined memory; floating point numbers of such bytes are NaN."""


class Sight:
    """A tensor that does not keep its storage alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._weak = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._layout = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride())

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor, or None if its memory was freed."""
        if self._weak.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


@dataclass(eq=False)
class DeviceMemory:
    """One storage on the device."""

    weak: StorageWeakRef  # keeps the address from being reused, without keeping the memory
    owner: Stream  # of the allocation; the allocator reuses the memory in its order
    written: Point  # after this the bytes are valid; where they are undefined, they may be written
    version: int | None  # version counter of the tensor at `written`; None for memory that a reload fills
    reads: list[Point] = field(default_factory=list)
    writes: list[Point] = field(default_factory=list)
    saves: dict[int, Point] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)

    def unordered(self, streams: list[Stream]) -> Iterator[str]:
        """Yield a message for each access that may still run when the allocator reuses the memory now."""
        for what, points in (("copied out", self.reads), ("copied in", self.writes), ("used", self.saves.values())):
            for point in points:
                if not self.owner.follows(point):
                    yield f"memory freed on {self.owner} while it is {what} by {streams[point.stream]}"
        for index in self.users:
            user = streams[index]
            if not self.owner.follows(Point(index, user.clock.get(index, 0))):
                yield f"memory freed on {self.owner} while it is used by {user}"


@dataclass(frozen=True, slots=True)
class _Access:
    start: int
    stop: int
    write: bool
    point: Point


class HostMemory:
    """One slab of pinned memory, and the accesses that later ones must be ordered after."""

    def __init__(self, slab: torch.Tensor) -> None:
        self.weak = StorageWeakRef(slab.untyped_storage())
        self._accesses: list[_Access] = []

    def access(self, start: int, stop: int, *, write: bool, stream: Stream, point: Point) -> list[str]:
        """Record an access to bytes `start` to `stop`; return a message for each conflict that is not ordered."""
        kept: list[_Access] = []
        wrong: list[str] = []
        for old in self._accesses:
            overlap = old.start < stop and start < old.stop
            if overlap and (write or old.write) and not stream.follows(old.point):
                what = f"{'written' if write else 'read'} by {stream}"
                wrong.append(f"host memory {what} while it is {'written' if old.write else 'read'} by another stream")
            # Later accesses that are ordered after this write are ordered after the accesses that it covers.
            if not (write and start <= old.start and old.stop <= stop):
                kept.append(old)
        kept.append(_Access(start, stop, write, point))
        self._accesses = kept
        return wrong


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes in its storage that a contiguous tensor covers."""
    start = tensor.storage_offset() * tensor.itemsize
    return start, start + tensor.nbytes
