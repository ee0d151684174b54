"""Large copies cut into chunks, so that copies of other streams get their turn between them.

`[Note: copy engines]`  An NVIDIA GPU has one copy engine for each direction.  It runs the copies of all streams in the
order in which they were queued, and goes on with another stream only when the next operation of the present one is no
copy.  So a small copy on the compute stream waits for every copy that is queued on a copy stream of the same direction.
FSDP2 copies lists of addresses to the device around each collective, on the compute stream; they waited for the reloads
of a whole layer, 12 to 13 ms each time.  ``tensor.item()`` in forward waits in the same way for queued copies to the
host.

Chunks alone change nothing, because the next operation is still a copy.  The driver runs a copy of a few bytes to the
device without a copy engine.  Such a copy behind each chunk, a *separator*, makes the engine go on with other streams
there.  A small copy then waited 0.4 ms instead of 24 ms behind 1.5 GiB of copies, which took 2 % longer.  A kernel in
place of the separator works too, but it waits for room on the device: beside matrix products copies took 44 % longer.

Each chunk and its separator took the host about 23 us in a profile, for which short steps wait.  A program of one rank
copies little beside, a batch or a loss in each step, so its chunks are larger.

Copies that are queued together share chunks.  No separator is behind the last ones if they have fewer than `SEPARATED`
bytes: they are over sooner than the host has queued the next ones.

While a graph is captured, no memory may be allocated for a separator.  Each device gets its separator with its first
large copy.  Host memory for a captured copy comes from an earlier step, which has made that copy too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import distributed as dist

__all__ = ["ALONE", "SEPARATED", "TO_DEVICE", "TO_HOST", "Separator", "chunk_bytes", "copy_in_chunks", "pieces"]

# Most bytes of a chunk, with its time at 55 GB/s
TO_HOST = 1 << 25  # of a copy to the host where several ranks run: 0.6 ms
TO_DEVICE = 1 << 24  # of a copy to the device where several ranks run: 0.3 ms
ALONE = 1 << 27  # where one rank runs, for which no collective waits: 2.4 ms

SEPARATED = 1 << 22  # the last chunk has a separator from here on: 76 us at 55 GB/s, of which that is a few percent
GRAIN = 512  # each chunk starts at a multiple of this many elements, so that copies stay aligned


class Separator:
    """The memory of the copies of four bytes that follow the chunks of one device.

    Both copy streams write the same four bytes, which nothing reads.  The memory is never freed, and is that of the
    default stream of a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            self._device = torch.empty(1, dtype=torch.int32, device=device)

    def queue(self) -> None:
        """Queue a copy of four bytes to the device on the current stream."""
        self._device.copy_(self._host, True)  # without blocking


def chunk_bytes(*, to_host: bool) -> int:
    """Return the most bytes of a chunk of a copy to the host or to the device."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TO_HOST if to_host else TO_DEVICE
    return ALONE


def pieces(host: torch.Tensor, device: torch.Tensor, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of a (host, device) pair that are copied one after another: one-dimensional views of both.

    A pair is yielded whole if it has no more than `chunk` bytes, or if its elements do not lie in the same order
    without gaps on both sides: such a copy needs kernels.
    """
    count = -(-host.nbytes // chunk)
    if count <= 1 or not _same_order(host, device):
        yield host, device
        return
    total = host.numel()
    each = -(-total // (count * GRAIN)) * GRAIN
    first, second = host.storage_offset(), device.storage_offset()
    for start in range(0, total, each):
        size = (min(each, total - start),)
        yield host.as_strided(size, (1,), first + start), device.as_strided(size, (1,), second + start)


def _same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have no gaps and their elements in the same order."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(one.stride(), one.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return one.stride() == other.stride()


def copy_in_chunks(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, to_host: bool, chunk: int, separator: Separator | None
) -> None:
    """Queue copies of (host, device) pairs on the current stream, with a separator behind each chunk.

    A chunk has at most `chunk` bytes, a power of two.  Without a separator copies are queued whole.
    """
    queued = 0
    for pair in pairs:
        for host, device in (pair,) if separator is None else pieces(*pair, chunk):
            if separator is not None and queued and queued + host.nbytes > chunk:
                separator.queue()
                queued = 0
            if to_host:
                host.copy_(device, True)  # without blocking
            else:
                device.copy_(host, True)
            queued += host.nbytes
    if separator is not None and queued >= SEPARATED:
        separator.queue()
