"""A reference device whose virtual times count, for tests of what is measured and decided from times."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from helpers import nothing_held
from torch import Tensor, nn
from virtual_time import Work
from whole_model import nothing_installed

import actoffload
from actoffload.device import ReferenceDevice, use
from actoffload.device.reference import CreatedStorages

BLOCK = 2**20
"""Bytes that a block of `small` saves."""
PASSES = (0, 1, 2, 3, 4)
"""Numbers of passes before each stage, and before the first pass with the plan that is kept."""


class Event(NamedTuple):
    """A moment of a stream, and how many events the device has recorded."""

    time: float
    number: int


class Timed(ReferenceDevice):
    """A device with memory of a given size, whose host is never in the way unless it is told to be.

    Its memory is what the blocks save and what is reloaded.
    """

    times = True

    def __init__(self, *args: Any, memory: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = memory
        self.behind = True  # the device lags behind the host
        self.recorded = self.reached = 0  # events; and those of which the host knows that they have passed
        self.lag = math.inf  # so many events have not passed unless the host waits
        self.synchronized = 0
        self.highest = 0  # peak before `allocated` reset it
        self.host = 0.0  # seconds; the host takes no time unless a test lets it
        self.created = CreatedStorages()
        self.forwards = WeakKeyDictionary[nn.Module, int]()
        self.slow: Callable[[], float] = lambda: 1.0  # factor of all compute
        self.pinning = 0.0  # seconds for each byte of new host memory, for which the device waits
        self.failed = 0  # allocations

    def host_time(self) -> float:
        return self.host

    def record(self, stream: Any) -> Event:
        self.recorded += 1
        return Event(super().record(stream).time, self.recorded)

    def passed(self, event: Event) -> bool:
        return not self.behind or event.number <= max(self.reached, self.recorded - self.lag)

    def elapsed(self, start: Event, end: Event) -> float:
        if not (self.passed(start) and self.passed(end)):
            raise RuntimeError("Both events must have passed: wait for them first.")  # as an accelerator does
        return super().elapsed(start, end)

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1
        self.reached = self.recorded

    def compute(self, seconds: float) -> None:
        super().compute(seconds * self.slow())

    def empty_device(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.count(super().empty_device(*args, **kwargs))

    def empty_host(self, nbytes: int) -> Tensor:
        super().compute(nbytes * self.pinning)
        return super().empty_host(nbytes)

    def count(self, tensor: Tensor) -> Tensor:
        """Count a tensor as memory of this device."""
        self.created._follow(tensor.untyped_storage(), set())
        return tensor

    def allocated(self) -> tuple[int, int] | None:
        if self.memory is None:
            return None
        found = self.created.now, self.created.peak
        self.highest = max(self.highest, self.created.peak)
        self.created.peak = self.created.now
        return found

    def total_memory(self) -> int | None:
        return self.memory

    def in_use(self) -> int | None:
        return self.created.now

    def memory_limit(self) -> int | None:
        return self.memory

    def out_of_memory_errors(self) -> int:
        return self.failed

    def peak(self) -> int:
        """Return the most bytes that were allocated so far, or since `forget_peak`."""
        return max(self.highest, self.created.peak)

    def forget_peak(self) -> None:
        """Look for the peak from here on."""
        self.highest, self.created.peak = 0, self.created.now


class TimedBlock(nn.Module):
    """Takes virtual seconds in forward and in backward, and saves some bytes in four tensors."""

    def __init__(self, device: Timed, forward: float, backward: float, nbytes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.device, self.seconds, self.nbytes = device, (forward / 4, backward / 4), nbytes // 4

    def forward(self, x: Tensor) -> Tensor:
        # Also those of a recomputation, for which attributes are put back.
        self.device.forwards[self] = self.device.forwards.get(self, 0) + 1
        for _ in range(4):  # for an input of 4 elements
            forward, backward = (seconds * x.numel() / 4 for seconds in self.seconds)
            x = Work.apply(x, self.device, (forward, backward), self.nbytes * x.numel() // 4)
        return x * self.scale


class TimedModel(nn.Module):
    """Blocks that are alike; beside their seconds the time of the host is nothing, on any machine."""

    def __init__(
        self, device: Timed, count: int = 8, forward: float = 1.0, backward: float = 2.0, nbytes: int = 2**22
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TimedBlock(device, forward, backward, nbytes) for _ in range(count)])
        self.skipped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            x = x if k in self.skipped else block(x)
        return x


class RotaryBlock(TimedBlock):
    """A block that also saves a tensor which all blocks save."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + (x[:1].sum() * angles).sum() * 0.0


class RotaryModel(TimedModel):
    """Makes a tensor in each forward, the angles of rotary embeddings, and passes it to all blocks."""

    def __init__(self, device: Timed, count: int, nbytes: int, nbytes_of_angles: int) -> None:
        super().__init__(device, 0)
        self.device, self.nbytes = device, nbytes_of_angles
        self.blocks = nn.ModuleList([RotaryBlock(device, 1.0, 2.0, nbytes) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        angles = self.device.count(torch.ones(self.nbytes // 4))
        for block in self.blocks:
            x = block(x, angles)
        return x


class Temporary(torch.autograd.Function):
    """Allocates bytes for a time, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Timed, in_forward: int, in_backward: int) -> Tensor:
        ctx.device, ctx.nbytes = device, in_backward
        device.count(torch.zeros(in_forward // 4))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.device.count(torch.zeros(ctx.nbytes // 4))
        return grad, None, None, None


def offload(model: nn.Module, device: Timed, **options: Any) -> actoffload.OffloadHandle:
    """Offload a model on a device, also its small tensors."""
    with use(device):
        return actoffload.offload(model, **{"layers": "blocks", "min_bytes": 64, **options})


def step(model: nn.Module, elements: int = 4, *, times: int = 1) -> None:
    """Run a step, or several."""
    for _ in range(times):
        model(torch.zeros(elements, requires_grad=True)).sum().backward()


def seconds(model: nn.Module, device: Timed, elements: int = 4) -> float:
    """Run a step and return its virtual seconds."""
    begun = device.main.now
    step(model, elements)
    return device.main.now - begun


def peaks(model: nn.Module, device: Timed, passes: int, elements: int = 4) -> list[int]:
    """Return the peak of each of some passes."""
    found = []
    for _ in range(passes):
        device.forget_peak()
        step(model, elements)
        found.append(device.peak())
    return found


def stage_of(handle: actoffload.OffloadHandle) -> str:
    """Return the name of the stage of the latest pass, "" if it followed a plan."""
    stage = getattr(handle._tracker.steering, "stage", None)
    return "" if stage is None else stage.name


def stages(handle: actoffload.OffloadHandle, run: Callable[[], None], passes: int) -> list[str]:
    """Run passes; return the name of the stage of each, "" for those that follow a plan."""
    found = []
    for _ in range(passes):
        run()
        found.append(stage_of(handle))
    return found


def settle(model: nn.Module, handle: actoffload.OffloadHandle, elements: int = 4, most: int = 20) -> None:
    """Run steps until the plan is final."""
    for _ in range(most):
        if not handle.settling:
            return
        step(model, elements)
    raise AssertionError(f"There is no plan after {most} steps.")


def started(
    link: float = 1e6, count: int = 12, memory: int | None = 2**40, kind: type[TimedModel] = TimedModel, **options: Any
) -> tuple[Any, Any, actoffload.OffloadHandle]:
    """Return a device, a model of blocks that save 4 MiB each, and its handle."""
    device = Timed(link, link, memory=memory)
    model = kind(device, count)
    return device, model, offload(model, device, **options)


def small(link: float = 2.5e6, count: int = 6, memory: int | None = 4 * BLOCK, **more) -> tuple:
    """Return a device, a model that needs more memory than it has, and its handle."""
    device = Timed(link, link, memory=memory)
    device.behind = False
    model = TimedModel(device, count, nbytes=BLOCK)
    return device, model, offload(model, device, **more)


def done(handle: actoffload.OffloadHandle, model: nn.Module, device: Timed, passes: int = 12) -> None:
    """Check that there is a plan after some steps, which fit and are no longer than with replay of everything."""
    step(model, times=passes)
    assert not handle.settling
    assert set(handle.plan.offloaded) >= set(range(len(model.blocks) - 2))
    assert seconds(model, device) <= 4.0 * len(model.blocks)
    assert peaks(model, device, 1)[0] <= device.memory
    nothing_held(handle)
    nothing_installed(model)
