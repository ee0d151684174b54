"""Copies in chunks on a GPU: no bit changes, and small copies of other streams do not wait for large ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_harness import captured, gpu

from actoffload import device as devices
from actoffload.device.accelerator import Accelerator

pytestmark = gpu

MIB = 1 << 20
LARGE = 1536 * MIB  # 27 ms of copies at 55 GB/s
SECONDS = 5e-3


@pytest.fixture
def device() -> Accelerator:
    found = devices.backend()
    assert isinstance(found, Accelerator)
    return found


@pytest.fixture(scope="module")
def large() -> tuple[torch.Tensor, torch.Tensor]:
    """A pair of host and device tensors that takes much longer to copy than a small copy may wait."""
    return torch.ones(LARGE, dtype=torch.uint8, pin_memory=True), torch.ones(LARGE, dtype=torch.uint8, device="cuda")


def pair(nbytes: int, dtype: torch.dtype, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (host, device) with the same random bytes on the device and zeros on the host."""
    elements = nbytes // dtype.itemsize // 7 * 7
    shape = (7, elements // 7) if transposed else (elements // 7, 7)
    values = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, device="cuda")
    host = torch.zeros(elements * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    tensors = [tensor.view(dtype).view(shape) for tensor in (host, values)]
    first, second = (tensor.t() if transposed else tensor for tensor in tensors)
    return first, second


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("nbytes", [3 * MIB + 5, 16 * MIB, 33 * MIB + 17, 130 * MIB - 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_directions_change_no_bit(device: Accelerator, nbytes: int, dtype: torch.dtype, transposed: bool) -> None:
    host, on_device = pair(nbytes, dtype, transposed)
    back = torch.empty_like(on_device).zero_()
    stream = device.new_stream(device.current_device())
    device.wait_stream(stream, device.current_stream(device.current_device()))
    device.to_host([(host, on_device)], stream)
    device.to_device([(host, back)], stream)
    torch.cuda.synchronize()
    assert torch.equal(bits(host), bits(on_device))
    assert torch.equal(bits(back), bits(on_device))


def copies(
    device: Accelerator, to_host: bool, tensors: tuple[torch.Tensor, torch.Tensor], stream: Any
) -> Callable[[], object]:
    """Return a function that queues one copy of both tensors, from and back to the current stream."""

    def work() -> None:
        main = device.current_stream(device.current_device())
        device.wait_stream(stream, main)
        (device.to_host if to_host else device.to_device)([tensors], stream)
        device.wait_stream(main, stream)

    return work


def seconds_of_small_copies(work: Callable[[], object], to_host: bool, nbytes: int) -> tuple[float, float]:
    """Return the longest that a small copy on a stream of its own takes beside some work, and how long that takes."""
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    side, main = torch.cuda.Stream(), torch.cuda.Stream()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(3)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(main):
        begin.record()
        work()
        end.record()
    with torch.cuda.stream(side):
        side.wait_event(begin)
        for first, second in marks:
            torch.cuda._sleep(1_000_000)  # about half a millisecond: the large copy is under way
            first.record()
            if to_host:
                host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(host, non_blocking=True)
            second.record()
    torch.cuda.synchronize()
    waits = [first.elapsed_time(second) * 1e-3 for first, second in marks]
    return max(waits), begin.elapsed_time(end) * 1e-3


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "in a CUDA graph"])
@pytest.mark.parametrize("nbytes", [33_000, 852_000])  # lists of addresses that FSDP2 copies to the device
@pytest.mark.parametrize("to_host", [False, True], ids=["reloads", "offloads"])
def test_a_small_copy_does_not_wait_for_all_large_ones(
    device: Accelerator, large: tuple[torch.Tensor, torch.Tensor], to_host: bool, nbytes: int, graph: bool
) -> None:
    stream = device.new_stream(device.current_device())
    work = copies(device, to_host, large, stream)
    work()
    torch.cuda.synchronize()
    if graph:
        work = captured(work)[1].replay
    found = [seconds_of_small_copies(work, to_host, nbytes) for _ in range(3)]
    print(f"to_host={to_host} {nbytes} bytes graph={graph}: waits and whole copies in seconds {found}")
    assert min(whole for _, whole in found) > 3 * SECONDS, "the large copy is too short to be waited for"
    assert min(wait for wait, _ in found) < SECONDS
