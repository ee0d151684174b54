"""Segments of slabs of page-locked memory: the free ones, and the buffers that are made of them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..device.base import StreamPosition, latest_positions

__all__ = ["SPLIT", "FreeSegments", "HostBuffer", "Segment"]

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
    account: int  # number of the account that uses it, or used it last
    size: int = 0
    number: int = 0  # by which it is returned; another one each time it is taken
    key: Any = None  # a dtype, size and stride for which `typed` was asked last
    tensor: torch.Tensor | None = None  # and what it returned
    captured: bool = False  # belongs to a captured graph
    taken: bool = False  # in use
    closed: bool = False  # its pool was closed while it was in use

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
