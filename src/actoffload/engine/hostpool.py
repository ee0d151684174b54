"""Page-locked host memory: few large slabs, cut into buffers that are reused without the host waiting.

`[Note: the host pool]`  PyTorch's pinned allocator rounds every request up to a power of two and asks the
driver for each new block, at about 0.7 s per GiB.  So the pool asks only for powers of two (nothing is lost to
rounding) and only for what is missing: a shortfall of 100 MiB becomes slabs of 64, 32 and 4 MiB.  A buffer may
consist of several segments, each at least `SPLIT` bytes where it does not end a buffer; so what is left of a slab
is not lost, however the sizes of buffers and slabs relate.

A buffer that comes back is first kept whole, in a bin of its size: a training step asks for the same sizes again
and again, and finds them there.  Only when a bin is empty are the bins dissolved into free segments and joined.

What is free carries a fence: the marks after which its last readers are done, at most one for each stream.
Whoever takes it again lets the stream that writes first wait for them.  Buffers that were used while a graph was
captured are addresses in that graph; they never come back before the pool is closed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple

import torch

from ..device.base import Backend, StreamPosition, latest_positions

__all__ = ["GRANULE", "SPLIT", "HostBuffer", "HostPool", "Segment"]

ALIGN = 512
GRANULE = 1 << 21
SPLIT = 1 << 16
LARGEST = 1 << 30


class Segment(NamedTuple):
    """Bytes ``start`` to ``stop`` of one slab, free after the marks of its fence."""

    slab: int
    start: int
    stop: int
    fence: tuple[StreamPosition, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


class HostBuffer:
    """Host memory of one piece of a saved storage.

    Attributes
    ----------
    nbytes : int
        Bytes asked for; `size` is what they take up.
    parts : tuple of torch.Tensor
        One-dimensional uint8 tensors that together hold `nbytes` bytes.
    segments : tuple of Segment
        Where they lie.
    fence : tuple of StreamPosition
        What the first writer has to wait for.
    captured : bool
        Belongs to a captured graph.
    epoch : int
        Which life of the pool it comes from.
    """

    __slots__ = ("_typed", "captured", "epoch", "fence", "nbytes", "parts", "segments", "size")

    def __init__(
        self,
        nbytes: int,
        parts: tuple[torch.Tensor, ...],
        segments: tuple[Segment, ...],
        fence: tuple[StreamPosition, ...],
        epoch: int,
    ) -> None:
        self.nbytes = nbytes
        self.parts = parts  # [keep: host memory]
        self.segments = segments
        self.size = sum(segment.nbytes for segment in segments)
        self.fence = fence
        self.captured = False
        self.epoch = epoch
        self._typed: tuple[Any, torch.Tensor] | None = None

    def typed(self, key: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> torch.Tensor | None:
        """Return the buffer as a tensor of a dtype, size and stride without gaps; None if it has several parts."""
        if self._typed is not None and self._typed[0] == key:
            return self._typed[1]
        if len(self.parts) > 1:
            return None
        tensor = self.parts[0].view(key[0]).as_strided(key[1], key[2])
        self._typed = (key, tensor)
        return tensor


class HostPool:
    """Slabs of page-locked memory for one device.

    The engine's lock guards all methods but `give_back`.

    Parameters
    ----------
    backend : Backend
        Where page-locked memory comes from.
    max_bytes : int or None
        Never hold more than this; None for no limit.
    """

    def __init__(self, backend: Backend, max_bytes: int | None = None) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._slabs: list[torch.Tensor] = []
        self._free: list[Segment] = []
        self._bins: dict[int, list[HostBuffer]] = {}
        # Buffers come back from finalizers, which may run in any thread and in the middle of `take`; a deque
        # takes them without a lock, and the next `take` sorts them in.
        self._returned: deque[tuple[HostBuffer, tuple[StreamPosition, ...]]] = deque()
        self._epoch = 0
        self.bytes_held = 0
        self.bytes_taken = 0
        self.high_water = 0
        self.refusal = ""
        self._exhausted = ""

    def take(self, nbytes: int, *, captured: bool = False, whole: bool = False) -> HostBuffer | None:
        """Return a buffer of `nbytes` bytes, or None, with `refusal` set, if the limit or the system forbids it.

        Parameters
        ----------
        nbytes : int
            Size in bytes, at least 1.
        captured : bool
            The buffer is used by work that is being captured into a graph: it is not reused afterwards, and no
            memory is taken from the system, which is not possible then.
        whole : bool
            The buffer must be one segment.
        """
        if self._returned:
            self.settle()
        bin_ = self._bins.get(nbytes)
        if bin_ and not (whole and len(bin_[-1].parts) > 1):  # [guard: whole buffer from a bin]
            buffer = bin_.pop()
        else:
            made = self._make(nbytes, captured, whole)
            if made is None:
                return None
            buffer = made
        buffer.captured = captured
        if captured:
            buffer.fence = ()
        self.bytes_taken += buffer.size
        if self.bytes_taken > self.high_water:
            self.high_water = self.bytes_taken
        return buffer

    def give_back(self, buffer: HostBuffer, fence: tuple[StreamPosition, ...]) -> None:
        """Return a buffer that may be written again after the marks of `fence`; from any thread, at any time."""
        self._returned.append((buffer, fence))

    def close(self) -> None:
        """Forget every slab; buffers still in use keep theirs alive."""
        self.settle()
        self._slabs, self._free, self._bins = [], [], {}
        self._epoch += 1
        self._exhausted = ""
        self.bytes_held = self.bytes_taken = 0

    def settle(self) -> None:
        """Sort in what came back; done by `take` too."""
        while self._returned:
            buffer, fence = self._returned.popleft()
            # [guard: buffer of a closed pool]
            if buffer.epoch != self._epoch:  # its slab left the pool with `close`
                continue
            self.bytes_taken -= buffer.size
            if not buffer.captured:
                buffer.fence = fence  # [guard: fence of a returned buffer]
                self._bins.setdefault(buffer.nbytes, []).append(buffer)

    def _make(self, nbytes: int, captured: bool, whole: bool) -> HostBuffer | None:
        need = -(-nbytes // ALIGN) * ALIGN
        segments = self._cut(need, whole)
        if segments is None:
            self._dissolve()
            segments = self._cut(need, whole)
        if segments is None and captured:
            self.refusal = (
                "a graph is being captured and page-locked memory cannot be taken from the system meanwhile; run "
                "one step of the same shape before the capture"
            )
        elif segments is None and self._grow(need, whole):
            segments = self._cut(need, whole)
        if segments is None:
            return None
        parts, left = [], nbytes
        for segment in segments:
            size = min(left, segment.nbytes)
            parts.append(self._slabs[segment.slab][segment.start : segment.start + size])
            left -= size
        fence = latest_positions(mark for segment in segments for mark in segment.fence)
        return HostBuffer(nbytes, tuple(parts), tuple(segments), fence, self._epoch)

    def _dissolve(self) -> None:
        """Turn the buffers in the bins back into free segments."""
        for bin_ in self._bins.values():
            for buffer in bin_:
                for segment in buffer.segments:
                    self._insert(segment._replace(fence=buffer.fence))  # [guard: fence of a dissolved buffer]
        self._bins.clear()

    def _insert(self, segment: Segment) -> None:
        free = self._free
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

    def _cut(self, need: int, whole: bool) -> list[Segment] | None:
        """Take `need` bytes out of the free segments: the best fit, else the largest ones one after another."""
        fits = [segment for segment in self._free if segment.nbytes >= need]
        if fits:
            return [self._cut_one(min(fits, key=lambda s: (s.nbytes, s.slab, s.start)), need)]
        large = [segment for segment in self._free if segment.nbytes >= SPLIT]
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
        place = self._free.index(segment)
        if segment.nbytes == nbytes:
            return self._free.pop(place)
        middle = segment.start + nbytes
        self._free[place] = segment._replace(start=middle)
        return segment._replace(stop=middle)

    def _grow(self, need: int, whole: bool) -> bool:
        """Add slabs for what is missing; False, with `refusal` set, if that is too much."""
        if self._exhausted:
            self.refusal = self._exhausted
            return False
        usable = 0 if whole else sum(s.nbytes for s in self._free if s.nbytes >= SPLIT)
        shortfall = -(-(need - usable) // GRANULE) * GRANULE
        sizes: list[int] = []
        if whole:
            sizes.append(max(GRANULE, 1 << (need - 1).bit_length()))  # [guard: size of a whole slab]
        while not whole and shortfall:
            size = min(LARGEST, 1 << (shortfall.bit_length() - 1))
            sizes.append(size)
            shortfall -= size
        # [guard: limit on the bytes held]
        if self._max_bytes is not None and self.bytes_held + sum(sizes) > self._max_bytes:
            held, more = self.bytes_held, sum(sizes)
            limit = f"the limit of {self._max_bytes} bytes of host memory"
            self.refusal = f"{limit} forbids {more} more beside the {held} that are held"
            return False
        for size in sizes:
            try:
                slab = self._backend.empty_host(size)
            except (RuntimeError, MemoryError) as error:
                # Asking again for every tensor would cost more than it could bring, and strain the system.
                self._exhausted = f"the system has no more page-locked memory ({error})"
                self.refusal = self._exhausted
                return False
            self._slabs.append(slab)
            self.bytes_held += size
            self._insert(Segment(len(self._slabs) - 1, 0, size))
        return True
