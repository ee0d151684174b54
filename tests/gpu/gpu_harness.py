"""Models, steps and comparisons for the GPU tests.  All of them also run on the reference device, for rehearsal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import no_synchronization
from torch import nn

import actoffload
from actoffload import device as devices
from actoffload.measure import MemoryMeter

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA itself, not just any device")
# Warnings of other libraries depend on versions and drivers; ours stay errors.
lenient = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::actoffload.HostMemoryWarning"),
]
WORLDS = [pytest.param(count, marks=pytest.mark.multi_gpu(count)) for count in (2, 4)]
"""Numbers of ranks with a device each."""

WIDTH = 512
ROWS = 2048 if CUDA else 512  # rows x width is four times, or exactly, the smallest size that is offloaded


class Mlp(nn.Module):
    """Two linear layers with a GELU: it saves two wide tensors and a narrow one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block whose query, key and value are views of one storage."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(1, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, width))
        return x + self.mlp(self.norm2(x))


KINDS = {"linear": lambda width: nn.Linear(width, width), "mlp": Mlp, "attention": Block}


def make_layers(
    kind: str = "linear", count: int = 12, width: int = WIDTH, device: torch.device = DEVICE
) -> nn.ModuleList:
    """Return layers with the same weights on every call; in bfloat16 for attention, as the flash kernels require."""
    torch.manual_seed(1)
    layers = nn.ModuleList([KINDS[kind](width) for _ in range(count)])
    return layers.to(device, torch.bfloat16 if kind == "attention" else torch.float32)


def flash() -> Any:
    """Force the flash kernels of scaled_dot_product_attention."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def make_input(
    layers: nn.Module, seed: int = 0, rows: int = ROWS, width: int = WIDTH, device: torch.device = DEVICE
) -> torch.Tensor:
    """Return a new input; the caller passes it to the step and keeps no reference."""
    dtype = next(layers.parameters()).dtype
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=device, dtype=dtype)


def offload(num_layers: int, model_layers: int, **more: Any) -> tuple[actoffload.context.OffloadContext, Any]:
    """Return an enabled context with the default schedule."""
    return actoffload.get_cpu_offload_context(enabled=True, num_layers=num_layers, model_layers=model_layers, **more)


def no_offload() -> tuple[Any, Any]:
    """Return a context that does nothing."""
    return actoffload.get_cpu_offload_context(enabled=False)


AfterLayer = Callable[[int], None]


def forward(
    layers: Sequence[nn.Module], x: torch.Tensor, pair: tuple[Any, Any], after: AfterLayer | None = None
) -> torch.Tensor:
    """Run each layer in the context and call `after` with its index."""
    context, sync = pair
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
        x = sync(x)
        if after is not None:
            after(k)
    return x


def manual_forward(layers: nn.ModuleList, x: torch.Tensor, trio: tuple[Any, Any, Any], offloaded: int) -> torch.Tensor:
    """Offload the first `offloaded` layers, release each two layers later, and reload them after the forward."""
    context, sync, controller = trio

    def after(k: int) -> None:
        if k < offloaded:
            controller.start_offload_layer(k)
        if 0 <= k - 2 < offloaded:
            controller.release_activation_forward_gpu_memory(k - 2)

    x = forward(layers, x, (context, sync), after)
    for k in reversed(range(offloaded)):
        controller.start_reload_layer(k)
    return x


@dataclass
class Result:
    """The output and the gradients of one step."""

    output: torch.Tensor
    grads: list[torch.Tensor]

    def differences(self, other: Result) -> list[str]:
        """Return the names of the tensors that are not bit-identical or not finite."""
        mine, theirs = [self.output, *self.grads], [other.output, *other.grads]
        assert len(mine) == len(theirs)
        names = ["output", *(f"gradient {k}" for k in range(len(self.grads)))]
        return [
            name
            for name, a, b in zip(names, mine, theirs, strict=True)
            if not (torch.equal(a, b) and bool(torch.isfinite(a).all()))
        ]


def requested_bytes() -> int:
    """Return the bytes of device memory in use, without the rounding of the allocator, which varies; 0 on the CPU."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"]) if CUDA else 0


def requested_peak(meter: MemoryMeter) -> int:
    """Return the peak of a meter that has just ended, without the rounding of the allocator."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) if CUDA else meter.peak_bytes


def collect(layers: nn.Module, output: torch.Tensor) -> Result:
    """Copy the output and the gradients of a step, and clear the gradients."""
    grads = []
    for parameter in layers.parameters():
        assert parameter.grad is not None
        grads.append(parameter.grad.detach().clone())
        parameter.grad = None
    return Result(output.detach().clone(), grads)


def step(
    layers: nn.ModuleList,
    seed: int,
    pair: tuple[Any, Any],
    rows: int = ROWS,
) -> Result:
    """Run forward and backward on the input that `seed` gives."""
    output = forward(layers, make_input(layers, seed, rows), pair)
    loss(output).backward()
    return collect(layers, output)


def loss(output: torch.Tensor) -> torch.Tensor:
    """Return a scalar whose gradient differs in every element."""
    return output.float().square().mean()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside of a ``with`` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def steady() -> Iterator[None]:
    """Forbid to wait for the device, and require that no memory is taken from the driver."""

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a step synchronized")

    torch.cuda.synchronize()
    before = driver_calls()
    with (
        no_synchronization(),
        patched(torch.cuda, "synchronize", forbidden),
        patched(torch.accelerator, "synchronize", forbidden),
    ):
        yield
    torch.cuda.synchronize()
    assert driver_calls() == before


def occupy(cycles: int) -> None:
    """Keep the current stream busy for a number of clock cycles; 1.7 million are about 1 ms."""
    if CUDA and cycles:
        torch.cuda._sleep(cycles)


class Delayed:
    """The device of this machine with a random delay before each copy and each allocation.

    Parameters
    ----------
    d2h, h2d, compute : int
        Longest delay, in clock cycles, on the stream of copies to the host, on the stream of copies to the device,
        and, before an allocation, on the compute stream.
    """

    def __init__(self, d2h: int = 0, h2d: int = 0, compute: int = 0) -> None:
        self.inner = devices.backend()
        self.longest = {"d2h": d2h, "h2d": h2d, "compute": compute}
        self.random = random.Random(0)
        self.delays = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _delay(self, lane: str, stream: Any) -> None:
        if self.longest[lane]:
            self.delays += 1
            with self.inner.on(stream):
                occupy(self.random.randrange(self.longest[lane] // 2, self.longest[lane]))

    def to_host(self, pairs: Any, stream: Any) -> None:
        self._delay("d2h", stream)
        self.inner.to_host(pairs, stream)

    def to_device(self, pairs: Any, stream: Any) -> None:
        self._delay("h2d", stream)
        self.inner.to_device(pairs, stream)

    def empty_device(self, *what: Any) -> torch.Tensor:
        self._delay("compute", self.inner.current_stream(what[-1]))
        return self.inner.empty_device(*what)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: int, after: int) -> torch.Tensor:
        ctx.after = after
        occupy(before)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        occupy(ctx.after)
        return grad, None, None


class Slow(nn.Module):
    """A layer whose compute stream is delayed at random, in forward and in backward."""

    def __init__(self, layer: nn.Module, source: random.Random, longest: int) -> None:
        super().__init__()
        self.layer, self.source, self.longest = layer, source, longest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, after = (self.source.randrange(self.longest) for _ in range(2))
        return self.layer(_Pause.apply(x, before, after))


def driver_calls() -> dict[str, int]:
    """Return how often memory was taken from the driver so far, on the device and page-locked on the host.

    A steady-state training step leaves every count where it was.
    """
    device = torch.cuda.memory_stats()
    host = torch.cuda.host_memory_stats()
    counts = {name: int(device.get(name, 0)) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}
    counts["num_host_alloc"] = int(host.get("num_host_alloc", 0))
    counts["num_host_free"] = int(host.get("num_host_free", 0))
    return counts
