"""Large copies in chunks: which parts there are, that no bit changes, and what is queued behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actoffload.device.accelerator import ALONE, SEPARATED, TO_DEVICE, TO_HOST, Accelerator, copy_in_chunks, pieces

CHUNK = 1 << 13


class Counter:
    """Stands for a separator: counts instead of queueing."""

    def __init__(self) -> None:
        self.queued = 0

    def __call__(self) -> None:
        self.queued += 1


def made(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty host tensor and a random one on the "device" as the engine pairs them."""
    shape = (37, 411)
    most = 2 if dtype is torch.bool else 256  # a CPU copy of booleans normalizes them
    source = torch.randint(0, most, (37 * 411 * dtype.itemsize + 512,), dtype=torch.uint8).view(dtype)
    source = source[512 // dtype.itemsize :]
    if kind == "contiguous":
        return torch.zeros(shape, dtype=dtype), source.view(shape)
    return torch.zeros(shape[::-1], dtype=dtype).t(), source.view(shape[::-1]).t()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.bool])
@pytest.mark.parametrize("kind", ["contiguous", "transposed"])
def test_chunks_change_no_bit(kind: str, dtype: torch.dtype, to_host: bool) -> None:
    host, device = made(kind, dtype)
    if not to_host:
        host.copy_(device)
        device.zero_()
    source, target = (device, host) if to_host else (host, device)
    expected = as_bytes(source).clone()
    separator: Any = Counter()
    copy_in_chunks([(host, device)], to_host=to_host, chunk=CHUNK, separator=separator)
    assert torch.equal(as_bytes(target), expected)
    parts = list(pieces(host, device, CHUNK))
    assert separator.queued == len(parts) - 1  # behind the last one too only if it is large
    assert len(parts) == -(-host.nbytes // CHUNK)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [CHUNK, TO_HOST])
@pytest.mark.parametrize("more", [-1, 0, 1, 511, 4097])
def test_parts_cover_each_byte_once_and_are_no_larger_than_a_chunk(chunk: int, more: int, itemsize: int) -> None:
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    elements = 3 * chunk // itemsize + more
    tensor = torch.empty(elements, dtype=dtype)
    parts = list(pieces(tensor, torch.empty(elements, dtype=dtype), chunk))
    assert len(parts) == -(-tensor.nbytes // chunk)
    place = 0
    for host, device in parts:
        assert host.shape == device.shape
        assert host.nbytes <= chunk
        assert host.storage_offset() == device.storage_offset() == place
        assert place % 512 == 0  # as the memory of the whole tensor is aligned
        place += host.numel()
    assert place == elements


class Queue:
    """Stands for a stream."""

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("ranks", "sizes", "to_host", "to_device"),
    [
        (1, [SEPARATED - 1], 0, 0),
        (1, [SEPARATED], 1, 1),
        (1, [SEPARATED // 2] * 2, 1, 1),
        (1, [ALONE], 1, 1),
        (1, [ALONE + 1], 2, 2),
        (2, [SEPARATED - 1], 0, 0),
        (2, [SEPARATED], 1, 1),
        (2, [TO_DEVICE, 1], 1, 1),
        (2, [TO_DEVICE + 1], 1, 2),
        (2, [TO_HOST + 1], 2, 3),
    ],
)
def test_an_nvidia_gpu_gets_separators_behind_chunks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, sizes: list[int], to_host: int, to_device: int
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    device = object.__new__(Accelerator)  # this machine may have none
    counter: Any = Counter()
    device._nvidia, device._separators = True, {None: counter}  # type: ignore[dict-item]
    pairs = [(torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)) for size in sizes]
    device.to_host(pairs, Queue())
    assert counter.queued == to_host
    for host, on_device in pairs:
        assert bool(host.all())
        on_device.zero_()
    device.to_device(pairs, Queue())
    assert counter.queued == to_host + to_device
    assert all(bool(on_device.all()) for _, on_device in pairs)


def test_other_accelerators_copy_whole_tensors() -> None:
    device = object.__new__(Accelerator)
    device._nvidia = False
    host, on_device = torch.zeros(SEPARATED, dtype=torch.uint8), torch.ones(SEPARATED, dtype=torch.uint8)
    device.to_host([(host, on_device)], Queue())
    assert bool(host.all())
