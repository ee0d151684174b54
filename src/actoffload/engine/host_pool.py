"""The page-locked host memory of one context or handle, reused without the host waiting, and how it is returned.

`[Note: host pool]`  Pinned memory takes the system 0.06 to 0.7 s per GiB, and PyTorch's allocator, which serves some
devices, rounds every request up to a power of two.  So `HostPool` allocates only powers of two, its *slabs*, and only
what is missing: a shortfall of 100 MiB becomes slabs of 64, 32 and 4 MiB.  A buffer may consist of several segments, so
the rest of a slab is not wasted.

A returned buffer is first kept whole, in a bin of its size: a training step allocates the same sizes again.  Only when
a bin is empty are the bins dissolved into free segments and joined.

Free memory carries a fence: the positions after which its last readers are done, at most one for each stream.  The
stream that writes next waits for them.  Buffers that were used while a graph was captured are addresses in that graph,
so they are not reused before the pool is closed.  A request that the system refused is repeated when as many bytes as
were missing have been returned or freed since, in any pool.

An interrupt may come between two changes that belong together.  `HostPool.broken` is set meanwhile; the next caller
that finds it set makes the free segments and the counts anew from the slabs and the buffers in use, which each change
leaves right.

`[Note: finalizers]`  Python runs signal handlers between two bytecodes of the main thread.  A signal that arrives while
autograd computes waits for the next bytecode.  If that is in a ``__del__``, Python drops the exception of the handler,
and the ``__del__`` stops half-way.  So the finalizers here are callbacks of weak references, and the callback is
``deque.append``, which is C.  The weak reference, a `Resources`, has all that is to be given back.  `settle` gives it
back in ordinary code: before host memory is taken, before bytes are counted, and in statistics.

Device memory is freed by reference counts.  Only a storage that is dropped while a transfer uses its memory has a
``__del__``, because a stream has to wait before.  `raise_later` keeps an exception that comes in there, and `settle`
raises it.  Python drops one that comes before the first line of that ``__del__``; then `Resources.in_flight` keeps the
memory until `settle` has let the stream wait.

`settle` itself may be interrupted after any call.  So statements without a call between them take a resource out of its
`Resources` and put it into a queue: neither a signal handler nor another thread can come between.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch

from .._text import size as written
from .._torch.tensors import free_storage_weakref
from ..device.base import Backend, StreamPosition, latest_positions

ALIGN = 512
GRANULE = 1 << 21
LARGEST = 1 << 30

# What an object gives back

dropped: deque[Resources] = deque()
_drop = dropped.append  # one object for all references
_alive: set[Resources] = set()  # a weak reference calls back only if something keeps it
_errors: deque[BaseException] = deque()


class Resources(weakref.ref[Any]):
    """What an object gives back when it is dropped; made by `of`."""

    __slots__ = ("buffers", "fence", "freed", "in_flight", "nbytes", "returned", "weak")

    weak: Any  # a weak reference to a storage
    nbytes: int  # device memory of the object that is counted
    freed: deque[int] | None  # where `nbytes` goes: the queue of the counters
    buffers: tuple[int, ...]  # numbers of host buffers; a number does not keep the memory of a pool that is dropped
    returned: deque[Any] | None  # where `buffers` go: the queue of the host pool
    fence: tuple[Any, ...]  # the positions after which the host memory may be written again
    # Device memory that a copy writes, `Transfers.join`, and its arguments: the compute stream waits for that copy.
    in_flight: tuple[Any, ...] | None

    @staticmethod
    def of(
        owner: object, weak: Any = None, freed: deque[int] | None = None, returned: deque[Any] | None = None
    ) -> Resources:
        """Return the resources of an object, without any but a weak reference to a storage."""
        made = Resources(owner, _drop)
        made.weak, made.nbytes, made.freed = weak, 0, freed
        made.buffers, made.returned, made.fence, made.in_flight = (), returned, (), None
        _alive.add(made)
        return made

    def give_back(self) -> None:
        """Give everything back; what was given back already is left out."""
        if self.in_flight is not None:  # the finalizer of the storage was interrupted
            _, join, *arguments = self.in_flight
            join(*arguments)
            self.in_flight = None
        nbytes, self.nbytes = self.nbytes, 0
        if nbytes and self.freed is not None:
            self.freed.append(nbytes)
        if self.buffers and self.returned is not None:
            self.returned.append((self.buffers, self.fence))  # twice does no harm: a number is in use once
        self.buffers = ()
        weak, self.weak = self.weak, None
        if weak is not None:
            free_storage_weakref(weak)
        _alive.discard(self)


def settle() -> None:
    """Give back what dropped objects had, and raise an exception that came while a finalizer ran."""
    while dropped:
        try:
            first = dropped[0]
        except IndexError:  # another thread was faster
            break
        first.give_back()
        if dropped and dropped[0] is first:
            dropped.popleft()
    if _errors:
        raise _errors.popleft()


def raise_later(error: BaseException) -> None:
    """Keep an exception that came while a finalizer ran; the next `settle` raises it."""
    _errors.append(error.with_traceback(None))  # its frames keep what is being dropped


# Segments and buffers

SPLIT = 1 << 16
"""Smallest segment, in bytes, that a buffer of several segments may contain, unless it ends the buffer."""


class Segment(NamedTuple):
    """Bytes ``start`` to ``stop`` of one slab, free after the positions of its fence."""

    slab: int
    start: int
    stop: int
    fence: tuple[StreamPosition, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostBuffer:
    """Host memory of one piece of a saved storage."""

    nbytes: int  # requested; `size` is what the segments take up
    parts: tuple[torch.Tensor, ...]  # one-dimensional uint8 tensors that together hold `nbytes` bytes
    segments: tuple[Segment, ...]  # where they lie
    fence: tuple[StreamPosition, ...]  # what the first writer has to wait for
    size: int = 0
    number: int = 0  # by which it is returned; another one each time it is taken
    key: Any = None  # a dtype, size and stride for which `typed` was asked last
    tensor: torch.Tensor | None = None  # and what it returned
    captured: bool = False  # belongs to a captured graph
    taken: bool = False  # in use

    def __post_init__(self) -> None:
        self.size = sum(segment.nbytes for segment in self.segments)

    def typed(self, key: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> torch.Tensor | None:
        """Return the buffer as a tensor of a dtype, size and stride without gaps; None if it has several parts."""
        if self.key != key and len(self.parts) == 1:
            self.tensor = self.parts[0].view(key[0]).as_strided(key[1], key[2])
            self.key = key
        return self.tensor


class FreeSegments:
    """The free segments of all slabs, in order of slab and place."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def insert(self, segment: Segment) -> None:
        """Add a segment, joined with its neighbours."""
        free = self.segments
        place = bisect_left(free, segment[:2], key=lambda other: other[:2])
        if place < len(free) and free[place].slab == segment.slab and free[place].start == segment.stop:
            behind = free.pop(place)
            fence = latest_positions((*segment.fence, *behind.fence))  # [guard: fence of the segment behind]
            segment = segment._replace(stop=behind.stop, fence=fence)
        if place and free[place - 1].slab == segment.slab and free[place - 1].stop == segment.start:
            before = free.pop(place - 1)
            place -= 1
            fence = latest_positions((*before.fence, *segment.fence))  # [guard: fence of the segment before]
            segment = segment._replace(start=before.start, fence=fence)
        free.insert(place, segment)

    def cut(self, need: int, whole: bool) -> list[Segment] | None:
        """Take `need` bytes out of the free segments: the best fit, else the largest ones one after another."""
        fits = [segment for segment in self.segments if segment.nbytes >= need]
        if fits:
            return [self._cut_one(min(fits, key=lambda s: (s.nbytes, s.slab, s.start)), need)]
        large = [segment for segment in self.segments if segment.nbytes >= SPLIT]
        if whole or sum(segment.nbytes for segment in large) < need:
            return None
        taken: list[Segment] = []
        for segment in sorted(large, key=lambda s: (-s.nbytes, s.slab, s.start)):
            taken.append(self._cut_one(segment, min(need, segment.nbytes)))
            need -= taken[-1].nbytes
            if not need:
                break
        return taken

    def _cut_one(self, segment: Segment, nbytes: int) -> Segment:
        place = self.segments.index(segment)
        if segment.nbytes == nbytes:
            return self.segments.pop(place)
        middle = segment.start + nbytes
        self.segments[place] = segment._replace(start=middle)
        return segment._replace(stop=middle)


# The pool

CAPTURED = (
    "a graph is being captured and page-locked memory cannot be taken from the system meanwhile; run one step of the "
    "same shape before the capture"
)

_given_back = [0]  # bytes that pools of any device have returned or freed so far


class HostPool:
    """The page-locked memory of one context or handle on one device."""

    def __init__(self, backend: Backend, max_bytes: int | None = None, device: torch.device | None = None) -> None:
        self._backend = backend
        self._device = backend.current_device() if device is None else device
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self.broken = False  # an interrupt came in between, or a change is in progress
        self.returned: deque[tuple[Sequence[int], tuple[StreamPosition, ...]]] = deque()
        self.bytes_held = 0  # in use and free
        self.bytes_taken = 0  # in use, without what captured graphs alone use
        self.high_water = 0
        self.refusal = ""
        self._slabs: dict[int, torch.Tensor] = {}
        self._numbers = count(1)
        self._free = FreeSegments()
        self._bins: dict[int, dict[HostBuffer, None]] = {}  # by size; the last one returned last
        self._used: dict[int, HostBuffer] = {}  # by number
        self.exhausted = ""  # why the system refused the latest request for memory
        self._retry_at = 0

    def take(
        self,
        nbytes: int,
        *,
        captured: bool = False,
        whole: bool = False,
        owner: Resources | None = None,
    ) -> HostBuffer | None:
        """Return a buffer of `nbytes` bytes, or None, with `refusal` set, if the limit or the system forbids it.

        While work that uses it is `captured` into a graph, no memory can be taken from the system; the buffer is not
        reused.  A `whole` one has one segment.  `owner` returns it when its object is dropped.
        """
        with self._lock:
            if dropped or self.returned:
                self._sort()
            if self.broken:
                self._mend()
                if self.broken:
                    self.refusal = CAPTURED
                    return None
            need = -(-nbytes // ALIGN) * ALIGN
            number, bin_ = next(self._numbers), self._bins.get(nbytes)
            buffer = next(reversed(bin_)) if bin_ else None
            # [guard: whole buffer from a bin]
            if bin_ and buffer is not None and not (whole and len(buffer.parts) > 1):
                # No call from here on: see [Note: finalizers].
                del bin_[buffer]
            else:
                self.broken = True
                segments = self._find(need, whole)
                if segments is None:
                    sizes = self._missing(need, whole)
                    refusal = self._over_limit(sum(sizes)) or (CAPTURED if captured else self._grow(sizes))
                    if refusal:
                        self.broken = False
                        self.refusal = refusal
                        return None
                    segments = self._find(need, whole)
                    assert segments is not None
                buffer = self._make(nbytes, segments)
            buffer.number = number
            self._used[buffer.number] = buffer
            self.bytes_taken += buffer.size
            buffer.taken = True
            if owner is not None:
                owner.buffers = (*owner.buffers, buffer.number)
            self.broken = False
            buffer.captured = captured
            if captured:
                buffer.fence = ()
            if self.bytes_taken > self.high_water:
                self.high_water = self.bytes_taken
            return buffer

    def fill(self, nbytes: int) -> None:
        """Allocate slabs until `nbytes` are held; fewer where the limit or the system forbids it."""
        largest = LARGEST
        with self._lock:
            self._mend()
            while largest >= GRANULE <= (missing := nbytes - self.bytes_held) and not self._over_limit(missing):
                try:
                    slab = self._backend.empty_host(min(largest, 1 << (missing.bit_length() - 1)))
                except (RuntimeError, MemoryError):  # `take` says why there is no more
                    largest //= 2
                    continue
                self.broken = True
                self._insert(slab)
                self.broken = False

    def give_back(self, buffer: HostBuffer, fence: tuple[StreamPosition, ...]) -> None:
        """Return a buffer that may be written again after the positions of `fence`; from any thread, at any time."""
        self.returned.append(((buffer.number,), fence))

    def settle(self) -> None:
        """Sort in what was returned; `take` does that too."""
        with self._lock:
            self._sort()

    def trim(self, keep: int = 0) -> int:
        """Free slabs without a used byte, but for `keep` bytes, or all if fewer are held; return the bytes freed.

        Large slabs stay, because a buffer of several segments takes as many copies.
        """
        with self._lock:
            self._sort()
            self.broken = True
            self._dissolve()
            unused = [s for s in self._free.segments if s.nbytes == self._slabs[s.slab].numel()]
            before = self.bytes_held
            for segment in sorted(unused, key=lambda s: s.nbytes):
                if segment.nbytes <= self.bytes_held - keep:
                    del self._slabs[segment.slab]
                    self._free.segments.remove(segment)
                    self.bytes_held -= segment.nbytes
            freed = before - self.bytes_held
            _given_back[0] += freed
            self.broken = False
        self._backend.release_host()
        return freed

    def close(self) -> None:
        """Free the memory; a buffer in use keeps its own alive, and returning it does nothing any more."""
        with self._lock:
            self._sort()
            self.broken = True
            self._used.clear()
            self._bins.clear()
            self._free.segments.clear()
            self._slabs.clear()
            _given_back[0] += self.bytes_held
            self.bytes_held = self.bytes_taken = 0
            self.exhausted = ""
            self.broken = False
        self._backend.release_host()

    def _sort(self) -> None:
        """Sort in the buffers that were returned."""
        settle()
        self._mend()
        while self.returned:
            first = self.returned[0]
            numbers, fence = first
            for number in numbers:
                # None if `settle` was interrupted after this one, or the pool was closed meanwhile.
                buffer = self._used.get(number)
                if buffer is not None and buffer.taken:
                    self._sort_in(buffer, fence)
            if self.returned and self.returned[0] is first:
                self.returned.popleft()

    def _sort_in(self, buffer: HostBuffer, fence: tuple[StreamPosition, ...]) -> None:
        _given_back[0] += buffer.size
        self.broken = True
        if buffer.captured:
            self.bytes_taken -= buffer.size
            buffer.taken = False
        else:
            del self._used[buffer.number]
            self.bytes_taken -= buffer.size
            buffer.taken = False
            buffer.fence = fence  # [guard: fence of a returned buffer]
            self._bins.setdefault(buffer.nbytes, {})[buffer] = None
        self.broken = False

    def _mend(self) -> None:
        """Make the free segments and the counts anew if an interrupt came between two changes."""
        if not self.broken or self._backend.capturing():
            return
        self._backend.synchronize(self._device)  # so what is free needs no fence
        self._bins.clear()
        free, occupied = FreeSegments(), dict[int, list[Segment]]()
        for buffer in self._used.values():
            for segment in buffer.segments:
                occupied.setdefault(segment.slab, []).append(segment)
        for slab, memory in self._slabs.items():
            start = 0
            for segment in sorted(occupied.get(slab, ()), key=lambda segment: segment.start):
                if segment.start > start:
                    free.insert(Segment(slab, start, segment.start))
                start = segment.stop
            if start < memory.numel():
                free.insert(Segment(slab, start, memory.numel()))
        self._free = free
        self.bytes_held = sum(memory.numel() for memory in self._slabs.values())
        self.bytes_taken = sum(buffer.size for buffer in self._used.values() if buffer.taken)
        self.broken = False

    def _make(self, nbytes: int, segments: list[Segment]) -> HostBuffer:
        parts, left = [], nbytes
        for segment in segments:
            size = min(left, segment.nbytes)
            parts.append(self._slabs[segment.slab][segment.start : segment.start + size])
            left -= size
        fence = latest_positions(position for segment in segments for position in segment.fence)
        # [keep: host memory]
        return HostBuffer(nbytes, tuple(parts), tuple(segments), fence)

    def _find(self, need: int, whole: bool) -> list[Segment] | None:
        segments = self._free.cut(need, whole)
        if segments is None and self._bins:
            self._dissolve()
            segments = self._free.cut(need, whole)
        return segments

    def _dissolve(self) -> None:
        """Turn the buffers in the bins back into free segments."""
        for bin_ in self._bins.values():
            for buffer in bin_:
                for segment in buffer.segments:
                    self._free.insert(segment._replace(fence=buffer.fence))  # [guard: fence of a dissolved buffer]
        self._bins.clear()

    def _missing(self, need: int, whole: bool) -> list[int]:
        """Return the sizes of the slabs that have to be allocated."""
        usable = 0 if whole else sum(s.nbytes for s in self._free.segments if s.nbytes >= SPLIT)
        shortfall = max(0, -(-(need - usable) // GRANULE) * GRANULE)
        sizes: list[int] = []
        if whole:
            sizes.append(max(GRANULE, 1 << (need - 1).bit_length()))  # [guard: size of a whole slab]
        while not whole and shortfall:
            size = min(LARGEST, 1 << (shortfall.bit_length() - 1))
            sizes.append(size)
            shortfall -= size
        return sizes

    def _over_limit(self, more: int) -> str:
        """Return why the pool may not hold `more` bytes in addition, or an empty text."""
        limit, held = self._max_bytes, self.bytes_held
        # [guard: limit on the bytes held]
        if limit is not None and held + more > limit:
            limited = f"the limit of {written(limit)} of host memory forbids {written(more)} more"
            return f"{limited} beside the {written(held)} that are held"
        return ""

    def _grow(self, sizes: Sequence[int]) -> str:
        """Allocate slabs; return why that is not possible, or nothing."""
        if self.exhausted and _given_back[0] < self._retry_at:  # [guard: request that the system refused]
            return self.exhausted
        for size in sizes:
            try:
                slab = self._backend.empty_host(size)
            except (RuntimeError, MemoryError) as error:
                # Another attempt for each tensor would cost more than it could bring, and strain the system.
                self.exhausted = f"the system has no more page-locked memory ({error})"
                self._retry_at = _given_back[0] + size
                return self.exhausted
            self._insert(slab)
        self.exhausted = ""
        return ""

    def _insert(self, slab: torch.Tensor) -> None:
        number, size = next(self._numbers), slab.numel()
        self._slabs[number] = slab
        self.bytes_held += size
        self._free.insert(Segment(number, 0, size))
