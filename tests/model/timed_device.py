"""A reference device whose virtual times count, for tests of what is measured and decided from times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actoffload.device import ReferenceDevice

__all__ = ["Timed", "TimedBlock", "TimedModel"]


class Timed(ReferenceDevice):
    """A device with memory of a given size, whose host is never in the way unless it is told to be."""

    times = True

    def __init__(self, *args: Any, memory: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = memory
        self.behind = True  # the device lags behind the host
        self.synchronized = 0
        self.host = 0.0  # seconds; the host takes no time unless a test lets it

    def host_time(self) -> float:
        return self.host

    def passed(self, event: object) -> bool:
        return not self.behind

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1

    def memory_limit(self) -> int | None:
        return self.memory


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Timed, seconds: tuple[float, float], nbytes: int) -> Tensor:
        device.compute(seconds[0])
        ctx.device, ctx.seconds = device, seconds[1]
        ctx.save_for_backward(torch.zeros(nbytes // 4))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        assert saved.dtype is torch.float32
        ctx.device.compute(ctx.seconds)
        return grad, None, None, None


class TimedBlock(nn.Module):
    """Takes virtual seconds in forward and in backward, and saves some bytes in four tensors."""

    def __init__(self, device: Timed, forward: float, backward: float, nbytes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.device, self.seconds, self.nbytes = device, (forward / 4, backward / 4), nbytes // 4
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(4):
            x = _Work.apply(x, self.device, self.seconds, self.nbytes)
        return x * self.scale


class TimedModel(nn.Module):
    """Blocks that are alike."""

    def __init__(
        self, device: Timed, count: int = 8, forward: float = 0.01, backward: float = 0.02, nbytes: int = 2**22
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TimedBlock(device, forward, backward, nbytes) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
