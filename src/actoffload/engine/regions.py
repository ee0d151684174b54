"""Which bytes of a storage move: enough for every saved view, once, and no more.

`[Note: regions]`  A view that covers most of the stretch in which it lies moves as that stretch, in one piece and
without a kernel.  A view that covers less than half of it, a slice of each row say, waits until its layer has ended:
the rest of the row is often saved too (the query, key and value of one projection), and then the stretch moves
once.  If it stays alone, its elements move and nothing else.  A stretch that is nearly the whole storage is
rounded up to it, so that a view which reaches a little further is covered as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .geometry import GRAIN, View, raw
from .hostpool import HostBuffer

__all__ = ["Piece", "dense", "gaps", "loose_pieces", "reload_spans"]

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Piece:
    """A part of a storage that moves as one copy.

    Parameters
    ----------
    start, stop : int
        The stretch of the storage, in bytes.
    elements : View or None
        None if the whole stretch moves; else only these elements of it.
    host : HostBuffer or None
        Where the copy is.
    exact : tuple of int
        The stretch before rounding.  What rounding brought along was not saved yet: a kernel that tells torch
        nothing may still write it, so it does not count as held.
    """

    start: int
    stop: int
    elements: View | None = None
    host: HostBuffer | None = None
    exact: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.exact == (0, 0):
            self.exact = self.start, self.stop

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.stop - self.start if self.elements is None else self.elements.covered

    def pairs(self, memory: torch.UntypedStorage, base: int, device: torch.device) -> list[Pair]:
        """Return the parts of a transfer of this piece; byte 0 of `memory` stands for byte `base` of the storage."""
        assert self.host is not None
        if self.elements is not None:
            elements = self.elements.elements(memory, base, device)
            return [(self.host.parts[0].view(elements.dtype).view(elements.shape), elements)]
        pairs, start = [], self.start - base
        for part in self.host.parts:
            pairs.append((part, raw(memory, start, start + part.numel(), device)))
            start += part.numel()
        return pairs

    def holds(self, view: View) -> bool:
        """Whether every element of a view moves with this piece."""
        if self.elements is not None:
            same = (view.compact, view.offset, view.dtype.itemsize)
            return same == (self.elements.compact, self.elements.offset, self.elements.dtype.itemsize)
        start, stop = view.extent
        return self.exact[0] <= start and stop <= self.exact[1]


def _stretch(start: int, stop: int, nbytes: int) -> tuple[int, int]:
    if (stop - start) * 8 >= nbytes * 7:
        return 0, nbytes
    return start // GRAIN * GRAIN, min(nbytes, -(-stop // GRAIN) * GRAIN)


def dense(view: View, nbytes: int) -> Piece | None:
    """Return the piece with which a view moves at once, or None if it covers too little of its stretch.

    Parameters
    ----------
    view : View
        A saved tensor.
    nbytes : int
        Size of its storage in bytes.
    """
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
    """Return the pieces that bring what is missing of a stretch, when some are there already.

    Parameters
    ----------
    start, stop : int
        The stretch, in bytes.
    pieces : iterable of Piece
        What is there.
    nbytes : int
        Size of the storage in bytes.
    """
    missing: list[tuple[int, int]] = []
    for first, last in sorted(piece.exact for piece in pieces if piece.elements is None):
        if start < first and start < stop:
            missing.append((start, min(first, stop)))
        start = max(start, last)
    if start < stop:
        missing.append((start, stop))
    return [Piece(a // GRAIN * GRAIN, min(nbytes, -(-b // GRAIN) * GRAIN), exact=(a, b)) for a, b in missing]


def reload_spans(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Return the stretches of device memory into which pieces come back: one, unless most of it were empty."""
    stretches = sorted((piece.start // GRAIN * GRAIN, piece.stop) for piece in pieces)
    spans: list[tuple[int, int]] = []
    for start, stop in stretches:
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    whole = (spans[0][0], spans[-1][1])
    filled = sum(stop - start for start, stop in spans)
    return [whole] if filled * 2 >= whole[1] - whole[0] else spans
