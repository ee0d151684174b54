"""How a saved tensor lies in its storage, and which bytes of the storage are copied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import torch

from .._torch.tensors import negative_view
from ..device.base import Pairs
from .host_pool import HostBuffer

T = TypeVar("T", int, float)

GRAIN = 512
"""Allocators align to this many bytes; a copy that starts at a multiple keeps every pointer's alignment, on which
the choice of kernels, and so the last bit of a result, may depend."""


class View(NamedTuple):
    """Type and layout of one saved tensor."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]  # in elements, as torch has it; 0 where a dimension is expanded
    offset: int  # first byte, counted from the start of the storage
    conj: bool  # lazy conjugation, of complex tensors
    neg: bool  # lazy negation

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """Describe a strided tensor."""
        offset = tensor.storage_offset()
        start = int(offset) * tensor.itemsize if offset else 0
        return _view((tensor.dtype, tensor.size(), tensor.stride(), start, tensor.is_conj(), tensor.is_neg()))

    @lru_cache(maxsize=1024)  # noqa: B019 - the last ones may well stay
    def fills(self, nbytes: int) -> bool:
        """Whether each byte of a storage belongs to exactly one element."""
        whole = self.covered == nbytes and self.extent == (0, nbytes)
        expanded = any(stride == 0 and size > 1 for size, stride in zip(self.size, self.stride, strict=True))
        return whole and not expanded and not self.overlaps

    @property
    def covered(self) -> int:
        """Bytes of distinct elements; an upper bound where strides overlap."""
        sizes = (size for size, stride in zip(self.size, self.stride, strict=True) if stride)
        return math.prod(sizes) * self.dtype.itemsize

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and end of the stretch of the storage in which the elements lie."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + (last + 1) * self.dtype.itemsize

    @property
    def compact(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and stride without the expanded dimensions, each element once."""
        pairs = [(n, s) for n, s in zip(self.size, self.stride, strict=True) if s and n > 1]
        return tuple(n for n, _ in pairs), tuple(s for _, s in pairs)

    @property
    def overlaps(self) -> bool:
        """Whether two indices may lie on the same element, other than by expansion."""
        reach = 0
        for size, stride in sorted(zip(*self.compact, strict=True), key=lambda pair: pair[1]):
            if stride <= reach:
                return True
            reach += (size - 1) * stride
        return False

    def on(self, buffer: torch.Tensor, base: int) -> torch.Tensor:
        """Return this view on a buffer without gaps, whose first byte stands for byte `base` of the storage.

        It is a view in autograd's sense, and shares the version counter of the buffer.
        """
        element = self.dtype.itemsize
        if buffer.dtype is not self.dtype:
            data = buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)
            buffer = data[: data.numel() // element * element].view(self.dtype)
        tensor = buffer.as_strided(self.size, self.stride, (self.offset - base) // element)
        tensor = tensor.conj() if self.conj else tensor
        return negative_view(tensor) if self.neg else tensor

    def elements(self, memory: torch.UntypedStorage, base: int, device: torch.device) -> torch.Tensor:
        """Return the distinct elements of this view on some memory, as they lie."""
        size, stride = self.compact
        tensor = torch.empty(0, dtype=self.dtype, device=device)
        return tensor.set_(memory, (self.offset - base) // self.dtype.itemsize, size, stride)


_view = partial(tuple.__new__, View)  # without the frame of Python's that a named tuple makes


@dataclass(slots=True)
class Piece:
    """A part of a storage that moves as one copy."""

    start: int  # first byte
    stop: int
    elements: View | None = None  # only these elements move; None for the whole stretch
    host: HostBuffer | None = None  # where the copy is
    typed: torch.Tensor | None = None  # and the copy itself, where one tensor fills the storage and is copied as it is
    # The stretch before rounding.  What rounding brought along was not saved yet: a kernel that tells torch nothing may
    # still write it, so it does not count as held.
    exact: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.exact == (0, 0):
            self.exact = self.start, self.stop

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.stop - self.start if self.elements is None else self.elements.covered

    def pairs(self, memory: torch.UntypedStorage, base: int, device: torch.device) -> Pairs:
        """Return the parts of a transfer of this piece; byte 0 of `memory` stands for byte `base` of the storage."""
        assert self.host is not None
        if self.elements is not None:
            elements = self.elements.elements(memory, base, device)
            return [(self.host.parts[0].view(elements.dtype).view(elements.shape), elements)]
        pairs, start = [], self.start - base
        for part in self.host.parts:
            data = torch.empty(0, dtype=torch.uint8, device=device)
            pairs.append((part, data.set_(memory, start, part.size(), (1,))))
            start += part.numel()
        return pairs

    def holds(self, view: View) -> bool:
        """Whether every element of a view moves with this piece."""
        if self.elements is not None:
            mine = self.elements
            return (
                view.dtype.itemsize == mine.dtype.itemsize  # [guard: item size of a view]
                and view.offset == mine.offset
                and view.compact == mine.compact
            )
        start, stop = view.extent
        return self.exact[0] <= start and stop <= self.exact[1]


def _stretch(start: int, stop: int, nbytes: int) -> tuple[int, int]:
    if (stop - start) * 8 >= nbytes * 7:
        return 0, nbytes
    return start // GRAIN * GRAIN, min(nbytes, -(-stop // GRAIN) * GRAIN)


def dense(view: View, nbytes: int) -> Piece | None:
    """Return the piece with which a view moves at once; None if it covers too little of its stretch of the storage."""
    start, stop = _stretch(*view.extent, nbytes)
    if view.covered * 2 < stop - start:
        return None
    # With holes the view is a slice of rows that one kernel wrote, and the last row counts as a whole.
    first, last = view.extent
    return Piece(start, stop, exact=(first, last) if view.covered == last - first else (start, stop))


def loose_pieces(views: Sequence[View], nbytes: int) -> list[Piece]:
    """Return the pieces for views that cover too little each: together, or element by element."""
    distinct: list[View] = []
    for view in views:
        if not any(Piece(*other.extent, other).holds(view) for other in distinct):
            distinct.append(view)
    start, stop = _stretch(min(v.extent[0] for v in distinct), max(v.extent[1] for v in distinct), nbytes)
    if sum(view.covered for view in distinct) * 2 >= stop - start:
        return [Piece(start, stop)]
    return [Piece(*view.extent, None if view.overlaps else view) for view in distinct]


def gaps(start: int, stop: int, pieces: Iterable[Piece], nbytes: int) -> list[Piece]:
    """Return the pieces that bring what is missing of a stretch, when some are there already."""
    missing: list[tuple[int, int]] = []
    for first, last in sorted(piece.exact for piece in pieces if piece.elements is None):
        if start < first and start < stop:
            missing.append((start, min(first, stop)))
        start = max(start, last)
    if start < stop:
        missing.append((start, stop))
    return [Piece(a // GRAIN * GRAIN, min(nbytes, -(-b // GRAIN) * GRAIN), exact=(a, b)) for a, b in missing]


def union(intervals: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """Return intervals in order, those that overlap or touch as one."""
    found: list[tuple[T, T]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def reload_spans(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Return the stretches of device memory into which pieces are reloaded: one, unless most of it would be empty."""
    spans = union((piece.start // GRAIN * GRAIN, piece.stop) for piece in pieces)
    whole = (spans[0][0], spans[-1][1])
    filled = sum(stop - start for start, stop in spans)
    return [whole] if filled * 2 >= whole[1] - whole[0] else spans
