"""The page-locked host memory of one context or handle, reused without the host waiting, and how it is returned.

`[Note: host pool]`  Taking pinned memory from the system takes 0.05 to 0.7 s per GiB, and 10 ms more for each *slab*
that is taken.  A `HostPool` numbers the bytes of its slabs through, and a buffer is a stretch of these places: one that
crosses the end of a slab has several parts.  Until `fit` says how much is needed, each slab is as large as all before.

A returned buffer is first kept whole, in a bin of its size: a training step allocates the same sizes again.  Only when
nothing else is free, the bins are emptied and all places that no buffer uses joined.

Free memory carries a fence, for which the next copy out waits: the end of the last copy in that reads it.  Outside of
the bins all free memory has one fence.  Buffers that were used while a graph was captured are addresses in that graph,
so they are not reused before the pool is closed.  A request that the system refused is repeated when as many bytes as
were missing have been returned or freed since, in any pool.

An interrupt may come between two changes that belong together.  `HostPool.broken` is set meanwhile; the next caller
that finds it set computes what is free, and the counts, from the slabs and the buffers in use.

`[Note: finalizers]`  A signal that arrives while autograd computes is handled at the next bytecode.  If that is in a
``__del__``, Python drops the exception of the handler, and the ``__del__`` stops half-way.  So the finalizers here are
callbacks of weak references, and the callback is ``deque.append``, which is C.  The weak reference, a `Resources`, has
all that is to be given back.  `settle` gives it back in ordinary code.

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
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from .._text import size as written
from .._torch.tensors import free_storage_weakref
from ..device.base import Backend, StreamPosition

ALIGN = 512
GRANULE = 1 << 21
LARGEST = 1 << 30  # bytes of a slab
FIRST = 1 << 26  # bytes of the first one while it is not known how much is needed
SPARE = 32  # the part of what is held that may be held for nothing

# What an object gives back

dropped: deque[Resources] = deque()
_drop = dropped.append  # one object for all references
_alive: set[Resources] = set()  # a weak reference calls back only if something keeps it
_errors: deque[BaseException] = deque()


class Resources(weakref.ref[Any]):
    """What an object gives back when it is dropped; made by `of`."""

    __slots__ = ("buffer", "fence", "freed", "in_flight", "nbytes", "returned", "weak")

    weak: Any  # a weak reference to a storage
    nbytes: int  # device memory of the object that is counted
    freed: deque[int] | None  # where `nbytes` goes: the queue of the counters
    buffer: int  # number of a host buffer, or 0; a number does not keep the memory of a pool that is dropped
    returned: deque[Any] | None  # where `buffer` goes: the queue of the host pool
    fence: StreamPosition | None  # after which the host memory may be written again
    # Device memory that a copy writes, `Transfers.join`, and its arguments: the compute stream waits for that copy.
    in_flight: tuple[Any, ...] | None

    @staticmethod
    def of(
        owner: object, weak: Any = None, freed: deque[int] | None = None, returned: deque[Any] | None = None
    ) -> Resources:
        """Return the resources of an object, without any but a weak reference to a storage."""
        made = Resources(owner, _drop)
        made.weak, made.nbytes, made.freed = weak, 0, freed
        made.buffer, made.returned, made.fence, made.in_flight = 0, returned, None, None
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
        if self.buffer and self.returned is not None:
            self.returned.append((self.buffer, self.fence))  # twice does no harm: a number is in use once
        self.buffer = 0
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


# Buffers


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostBuffer:
    """Host memory of one saved storage."""

    nbytes: int  # requested; `size` is what it takes up
    parts: tuple[torch.Tensor, ...]  # one-dimensional uint8 tensors that together hold `nbytes` bytes
    start: int  # its first place in the pool
    size: int
    fence: StreamPosition | None  # what the first writer has to wait for
    number: int = 0  # by which it is returned; another one each time it is taken
    key: Any = None  # a dtype, size and stride for which `typed` was asked last
    tensor: torch.Tensor | None = None  # and what it returned
    captured: bool = False  # belongs to a captured graph
    taken: bool = False  # in use

    def typed(self, key: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> torch.Tensor | None:
        """Return the buffer as a tensor of a dtype, size and stride without gaps; None if it has several parts."""
        if self.key != key and len(self.parts) == 1:
            self.tensor = self.parts[0].view(key[0]).as_strided(key[1], key[2])
            self.key = key
        return self.tensor


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
        self.doubling = False  # until `fit`
        self.broken = False  # an interrupt came in between, or a change is in progress
        self.returned: deque[tuple[int, StreamPosition | None]] = deque()
        self.bytes_held = 0  # in use and free
        self.bytes_taken = 0  # in use, without what captured graphs alone use
        self.high_water = 0
        self.refusal = ""
        self.exhausted = ""  # why the system refused the latest request for memory
        self._retry_at = 0
        self._numbers = count(1)
        self._slabs: dict[int, torch.Tensor] = {}  # by their first places, in order
        self._used: dict[int, HostBuffer] = {}  # by number
        self._bins: dict[int, list[HostBuffer]] = {}  # by size
        self._free: list[tuple[int, int]] = []  # first places and ends, in order, of what is neither used nor in a bin
        self._fence: StreamPosition | None = None  # of `_free`

    def take(self, nbytes: int, *, captured: bool = False, owner: Resources | None = None) -> HostBuffer | None:
        """Return a buffer that `owner` returns when it is dropped; None, with `refusal` set, if there is none."""
        with self._lock:
            if dropped or self.returned:
                self._sort()
            if self.broken:
                self._mend()
                if self.broken:
                    self.refusal = CAPTURED
                    return None
            number, bin_ = next(self._numbers), self._bins.get(nbytes)
            if bin_:
                buffer = bin_[-1]
                # No call from here on: see [Note: finalizers].
                del bin_[-1]
            else:
                self.broken = True
                size = -(-nbytes // ALIGN) * ALIGN
                start = self._find(size)
                if start is None:
                    refusal = CAPTURED if captured else self._extend(size)
                    start = None if refusal else self._find(size)
                    if start is None:
                        self.broken = False
                        self.refusal = refusal
                        return None
                buffer = self._cut(nbytes, start, size)
            buffer.number = number
            self._used[buffer.number] = buffer
            self.bytes_taken += buffer.size
            buffer.taken = True
            if owner is not None:
                owner.buffer = buffer.number
            self.broken = False
            buffer.captured = captured
            if captured:
                buffer.fence = None
            if self.bytes_taken > self.high_water:
                self.high_water = self.bytes_taken
            return buffer

    def give_back(self, buffer: HostBuffer, fence: StreamPosition | None = None) -> None:
        """Return a buffer that may be written again after `fence`; from any thread, at any time."""
        self.returned.append((buffer.number, fence))

    def settle(self) -> None:
        """Sort in what was returned; `take` does that too."""
        with self._lock:
            self._sort()

    def fit(self, nbytes: int, *, grow: bool = False) -> int:
        """Free unused slabs above `nbytes`, and return the bytes freed; with `grow`, take what is missing."""
        with self._lock:
            self._sort()
            self.broken = True
            self._collect()
            before = self.bytes_held
            slabs = ((slab.numel(), start) for start, slab in self._slabs.items())
            unused = [(n, start) for n, start in slabs if any(a <= start and start + n <= b for a, b in self._free)]
            for size, start in sorted(unused):
                if self.bytes_held > nbytes + nbytes // SPARE:
                    del self._slabs[start]
                    self.bytes_held -= size
            self._collect()
            freed = before - self.bytes_held
            _given_back[0] += freed
            self._backend.release_host()
            if grow:
                most = nbytes + GRANULE - 1 if self._max_bytes is None else min(nbytes + GRANULE - 1, self._max_bytes)
                self._grow((most - self.bytes_held) // GRANULE * GRANULE)
            self.doubling = self.broken = False
        return freed

    def close(self) -> None:
        """Free the memory; a buffer in use keeps its own alive, and returning it does nothing any more."""
        with self._lock:
            self._sort()
            self.broken = True
            _given_back[0] += self.bytes_held
            self._used.clear()
            self._slabs.clear()
            self._collect()
            self._fence = None
            self.exhausted = ""
            self.broken = False
        self._backend.release_host()

    def _sort(self) -> None:
        """Sort in the buffers that were returned."""
        settle()
        self._mend()
        while self.returned:
            first = self.returned[0]
            number, fence = first
            buffer = self._used.get(number)  # None if this was interrupted behind it, or the pool was closed meanwhile
            if buffer is not None and buffer.taken:
                _given_back[0] += buffer.size
                self.broken = True
                if not buffer.captured:
                    del self._used[number]  # first: after an interrupt it is free
                self.bytes_taken -= buffer.size
                buffer.taken = False
                if not buffer.captured:
                    buffer.fence = fence  # [guard: fence of a returned buffer]
                    self._bins.setdefault(buffer.nbytes, []).append(buffer)
                self.broken = False
            if self.returned and self.returned[0] is first:
                self.returned.popleft()

    def _mend(self) -> None:
        """Compute what is free, and the counts, if an interrupt came between two changes."""
        if self.broken and not self._backend.capturing():
            self._backend.synchronize(self._device)  # so what is free needs no fence
            self._bins.clear()
            self._fence = None
            self._collect()
            self.broken = False

    # Places

    def _find(self, size: int) -> int | None:
        """Return the first of `size` free places; the fewest that are enough."""
        while True:
            fits = [(stop - start, start) for start, stop in self._free if stop - start >= size]
            if fits:
                return min(fits)[1]
            if not self._bins:
                return None
            self._collect()

    def _cut(self, nbytes: int, start: int, size: int) -> HostBuffer:
        """Return a buffer at free places."""
        stop = start + size
        index = next(k for k, (a, b) in enumerate(self._free) if a <= start < b)
        first, last = self._free[index]
        self._free[index : index + 1] = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
        places = ((max(start - a, 0), min(start + nbytes - a, slab.numel()), slab) for a, slab in self._slabs.items())
        parts = tuple(slab[a:b] for a, b, slab in places if a < b)
        # [keep: host memory]
        return HostBuffer(nbytes, parts, start, size, self._fence)

    def _collect(self) -> None:
        """Empty the bins, and compute what is free: all places that no buffer in use has."""
        fences = (self._fence, *(buffer.fence for bin_ in self._bins.values() for buffer in bin_))
        # [guard: fence of free memory]
        self._fence = max((each for each in fences if each is not None), key=lambda each: each.order, default=None)
        self._bins.clear()
        changes = Counter[int]()  # how many more slabs than buffers have a place than have the one before it
        for start, slab in self._slabs.items():
            changes[start] += 1
            changes[start + slab.numel()] -= 1
        for buffer in self._used.values():
            changes[buffer.start] -= 1
            changes[buffer.start + buffer.size] += 1
        borders = sorted(place for place, change in changes.items() if change)
        self._free = list(zip(borders[::2], borders[1::2], strict=True))
        self.bytes_held = sum(slab.numel() for slab in self._slabs.values())
        self.bytes_taken = sum(buffer.size for buffer in self._used.values() if buffer.taken)

    # Memory of the system

    def _extend(self, size: int) -> str:
        """Take memory from the system so that `size` places are free one after another; return why not, or nothing."""
        if self.exhausted and _given_back[0] < self._retry_at:  # [guard: request that the system refused]
            return self.exhausted
        if self._free and self._free[-1][1] == self._end:
            size -= self._end - self._free[-1][0]
        missing = -(-size // GRANULE) * GRANULE
        more = min(max(self.bytes_held, FIRST), LARGEST) if self.doubling else self.bytes_held // SPARE
        more = more // GRANULE * GRANULE
        self.exhausted = ""
        if more > missing and not (self._over_limit(more) or self._grow(more)):
            return ""
        refusal = self._over_limit(missing)
        if not refusal:
            # Another attempt for each tensor would cost more than it could bring, and strain the system.
            refusal = self.exhausted = self._grow(missing)
            self._retry_at = _given_back[0] + missing
        return refusal

    def _over_limit(self, more: int) -> str:
        """Return why the pool may not hold `more` bytes in addition, or an empty text."""
        limit, held = self._max_bytes, self.bytes_held
        # [guard: limit on the bytes held]
        if limit is not None and held + more > limit:
            limited = f"the limit of {written(limit)} of host memory forbids {written(more)} more"
            return f"{limited} beside the {written(held)} that are held"
        return ""

    def _grow(self, nbytes: int) -> str:
        """Take `nbytes` from the system; return why not, or nothing."""
        while nbytes > 0:
            size = min(nbytes, LARGEST)
            if self._backend.powers_of_two:
                size = 1 << (size.bit_length() - 1)
            try:
                self._slabs[self._end] = self._backend.empty_host(size)
            except (RuntimeError, MemoryError) as error:
                return f"the system has no more page-locked memory ({error})"
            self._collect()
            nbytes -= size
        return ""

    @property
    def _end(self) -> int:
        """The first place of the next slab."""
        return max((start + slab.numel() for start, slab in self._slabs.items()), default=0)
