"""How a saved tensor lies in its storage, and stretches of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from .._torch.tensors import negative_view

T = TypeVar("T", int, float)


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
    @lru_cache(maxsize=1024)  # noqa: B019 - the last ones may well stay
    def dense(self) -> bool:
        """Whether each byte of the stretch belongs to exactly one element, other than by expansion."""
        step = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if stride and size > 1:
                if stride != step:
                    return False
                step *= size
        return True

    def on(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this view on a buffer that stands for the storage; it shares the version counter of the buffer."""
        element = self.dtype.itemsize
        if buffer.dtype is not self.dtype:
            data = buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)
            buffer = data[: data.numel() // element * element].view(self.dtype)
        tensor = buffer.as_strided(self.size, self.stride, self.offset // element)
        tensor = tensor.conj() if self.conj else tensor
        return negative_view(tensor) if self.neg else tensor


_view = partial(tuple.__new__, View)  # without the frame of Python's that a named tuple makes

Stretch: TypeAlias = tuple[int, int]
"""First byte of a part of a storage, and its end."""


def union(intervals: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """Return intervals in order, those that overlap or touch as one."""
    found: list[tuple[T, T]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def missing(stretches: Iterable[Stretch], others: Iterable[Stretch]) -> list[Stretch]:
    """Return what stretches have and others, which are in order and apart, have not."""
    found: list[Stretch] = []
    for start, stop in stretches:
        for first, last in others:
            if start < min(first, stop):
                found.append((start, min(first, stop)))
            start = max(start, last)
        if start < stop:
            found.append((start, stop))
    return found
