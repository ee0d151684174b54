"""How a saved tensor lies in its storage: the bytes it covers, and the same view on other memory."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch

__all__ = ["View", "raw"]

GRAIN = 512
"""Allocators align to this many bytes; a copy that starts at a multiple keeps every pointer's alignment, on which
the choice of kernels, and so the last bit of a result, may depend."""


class View(NamedTuple):
    """Type and layout of one saved tensor.

    Parameters
    ----------
    dtype : torch.dtype
        Element type.
    size, stride : torch.Size and tuple of int
        In elements, as torch has them; a stride is 0 where a dimension is expanded.
    offset : int
        First byte, counted from the start of the storage.
    conj, neg : bool
        Lazy conjugation and negation of complex tensors.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """Describe a strided tensor."""
        offset = tensor.storage_offset()
        return _view(
            (
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                int(offset) * tensor.itemsize if offset else 0,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        )

    def fills(self, nbytes: int) -> bool:
        """Whether each byte of a storage belongs to exactly one element."""
        return _fills(self, nbytes)

    @property
    def covered(self) -> int:
        """Bytes of distinct elements; an upper bound where strides overlap."""
        count = self.dtype.itemsize
        for size, stride in zip(self.size, self.stride, strict=True):
            if stride:
                count *= size
        return count

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
        data = buffer
        if data.dtype is not self.dtype:
            data = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
            data = data[: data.numel() // element * element].view(self.dtype)
        tensor = data.as_strided(self.size, self.stride, (self.offset - base) // element)
        if self.conj:
            tensor = tensor.conj()
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor

    def elements(self, memory: torch.UntypedStorage, base: int, device: torch.device) -> torch.Tensor:
        """Return the distinct elements of this view on some memory, as they lie."""
        size, stride = self.compact
        tensor = torch.empty(0, dtype=self.dtype, device=device)
        return tensor.set_(memory, (self.offset - base) // self.dtype.itemsize, size, stride)


_view = partial(tuple.__new__, View)  # without the frame of Python's that a named tuple makes


@lru_cache(maxsize=1024)
def _fills(view: View, nbytes: int) -> bool:
    expanded = any(stride == 0 and size > 1 for size, stride in zip(view.size, view.stride, strict=True))
    return view.covered == nbytes and view.extent == (0, nbytes) and not expanded and not view.overlaps


def raw(memory: torch.UntypedStorage, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return bytes `start` to `stop` of a storage as a one-dimensional uint8 tensor on it."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory, start, (stop - start,), (1,))
