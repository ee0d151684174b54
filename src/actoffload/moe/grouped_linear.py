"""Matrix products of rows, sorted by group, with a matrix for each group.

``torch.nn.functional.grouped_mm`` takes the ends of the groups as a tensor on the device.  A loop over the groups takes
every dtype, size and device, but needs the counts on the host.  Counts are never fetched from an accelerator, because
that makes the host wait.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._torch.tensors import grouped_mm as _grouped_mm

_ALIGNMENT = 16  # bytes, of each row of an operand of grouped_mm
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows belong to which group."""

    rows: int
    number: int  # of groups
    counts: tuple[int, ...] | None  # rows of each group, for the loop
    offsets: torch.Tensor | None  # where each group ends, [number], int32 on the device, for grouped_mm
    padded: bool  # rows may follow that belong to no group

    @staticmethod
    def of(
        tokens_per_expert: Sequence[int] | torch.Tensor | None,
        offsets: torch.Tensor | None,
        x: torch.Tensor,
        widths: Sequence[int],
        *,
        number: int,
        padded: bool,
    ) -> Groups:
        """Check the counts or ends of the groups of `x`, and choose the products; `widths` are of all operands."""
        if (tokens_per_expert is None) == (offsets is None):
            raise ValueError("Give either tokens_per_expert or offsets, not both and not neither.")
        rows, name = x.shape[0], "offsets" if tokens_per_expert is None else "tokens_per_expert"
        given = offsets if tokens_per_expert is None else tokens_per_expert
        if not isinstance(given, torch.Tensor):
            if tokens_per_expert is None or not isinstance(given, Sequence):
                raise TypeError(f"{name} is a {type(given).__name__}; expected an integer tensor [experts].")
            if not all(type(count) is int for count in given):
                raise TypeError(f"{name} is {given!r}; expected an int for each expert.")
            return Groups(rows, number, _checked(name, given, rows, number, padded), None, padded)
        if given.dtype not in _INTEGERS:
            raise TypeError(f"{name} has dtype {given.dtype}; expected integers.")
        if given.dim() != 1 or given.shape[0] != number:
            raise ValueError(f"{name} has shape {list(given.shape)}; expected one number for each expert, [{number}].")
        counts = None
        if given.device.type == "cpu":  # reading values costs nothing here
            values = given.tolist()
            if tokens_per_expert is None:
                values = [end - start for start, end in zip([0, *values[:-1]], values, strict=True)]
            counts = _checked(name, values, rows, number, padded)
        elif given.device != x.device:
            raise ValueError(f"{name} is on {given.device} and x on {x.device}; move it to {x.device}, or to the CPU.")
        problem = _no_grouped_mm(x, widths)
        if problem and counts is None:
            raise ValueError(
                f"{name} is on {x.device}, but {problem}, and a loop over the experts has to know the counts on the "
                "host. Give tokens_per_expert as a list of ints; where the counts are on the device, counts.tolist() "
                "fetches them and waits for the device."
            )
        if problem or given.device != x.device:
            return Groups(rows, number, counts, None, padded)
        if tokens_per_expert is not None:
            given = given.cumsum(0)
        return Groups(rows, number, None, given.to(torch.int32), padded)

    def times(self, x: torch.Tensor, weight: torch.Tensor, *, clean: bool = False) -> torch.Tensor:
        """Return each group of rows [rows, k] times its matrix [number, k, n]: [rows, n], contiguous.

        One of the last two strides of `weight` is 1.  Rows of no group are undefined, or zero if `clean`.
        """
        if not self.rows:
            return x.new_zeros(0, weight.shape[2])
        if self.offsets is not None:
            assert _grouped_mm is not None
            result = _grouped_mm(x, weight, offs=self.offsets)
            if clean and self.padded:
                behind = torch.arange(self.rows, device=x.device) >= self.offsets[-1]
                result.masked_fill_(behind.unsqueeze(1), 0.0)  # not a product: what lies there may be NaN
            return result
        result = x.new_empty(self.rows, weight.shape[2])
        for part, rows, matrix in zip(self._split(result), self._split(x), weight.unbind(), strict=True):
            torch.mm(rows, matrix, out=part)
        if clean:
            assert self.counts is not None
            result[sum(self.counts) :].zero_()
        return result

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the sums of the outer products of rows [rows, n] and [rows, k] by group, as a weight's gradient is.

        The result, [number, n, k], is zero for a group without rows.
        """
        shape = (self.number, a.shape[1], b.shape[1])
        if not self.rows:
            return a.new_zeros(shape)
        if self.offsets is not None:
            assert _grouped_mm is not None
            result = _grouped_mm(a.t(), b, offs=self.offsets)
            if _leaves_garbage(a.device):
                empty = self.offsets.diff(prepend=self.offsets.new_zeros(1)) == 0
                result.masked_fill_(empty.view(-1, 1, 1), 0.0)
            return result
        result = a.new_empty(shape)
        for matrix, left, right in zip(result.unbind(), self._split(a), self._split(b), strict=True):
            torch.mm(left.t(), right, out=matrix)
        return result

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each group."""
        assert self.counts is not None
        return torch.split(rows[: sum(self.counts)], list(self.counts))


def _no_grouped_mm(x: torch.Tensor, widths: Sequence[int]) -> str:
    """Return why grouped_mm cannot take these operands without the host; empty if it can."""
    if _grouped_mm is None:
        return "this torch has no grouped_mm"
    for width in widths:
        if width * x.element_size() % _ALIGNMENT:
            return f"grouped_mm needs rows of a multiple of {_ALIGNMENT} bytes and {width} x {x.dtype} is none"
    if x.device.type == "cpu":
        return "" if x.dtype in _CPU_DTYPES else f"grouped_mm does not take {x.dtype}"
    # Elsewhere torch runs grouped_mm as a loop of its own, for which it copies the offsets to the host.
    if x.device.type != "cuda" or not _has_kernel(x.device):
        return "grouped_mm has a kernel only for CUDA devices of compute capability 9.x and 10.x"
    return "" if x.dtype is torch.bfloat16 else f"the kernel of grouped_mm takes torch.bfloat16 and not {x.dtype}"


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def _leaves_garbage(device: torch.device) -> bool:
    """Whether the kernel's sum over no rows at all is what lay in the accumulator (CUTLASS issue 2674)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def _checked(name: str, counts: Sequence[int], rows: int, number: int, padded: bool) -> tuple[int, ...]:
    if len(counts) != number:
        raise ValueError(f"{name} has {len(counts)} entries; expected one for each of the {number} experts.")
    if any(count < 0 for count in counts):
        raise ValueError(f"{name} gives expert {[c < 0 for c in counts].index(True)} a negative number of tokens.")
    total = sum(counts)
    if total > rows or (total < rows and not padded):
        raise ValueError(
            f"{name} gives the experts {total} tokens and x has {rows}; expected the same number"
            + (" or fewer." if padded else ", or padded=True where rows without an expert follow.")
        )
    return tuple(counts)
