"""Models, steps and comparisons for the GPU tests.  All of it runs on the reference device too, for rehearsal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import actoffload
from actoffload import device as devices

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA itself, not just any device")
# Other libraries' warnings differ with versions and drivers; ours stay errors, as everywhere.
lenient = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::actoffload.HostMemoryWarning"),
]

WIDTH = 512
ROWS = 2048 if CUDA else 512  # rows x width is four times what is eligible, or just that


class Mlp(nn.Module):
    """Two linears with a GELU: two wide saved tensors and a narrow one."""

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
    """Return layers with weights that are the same every time; bfloat16 for attention, as flash needs it."""
    torch.manual_seed(1)
    layers = nn.ModuleList([KINDS[kind](width) for _ in range(count)])
    return layers.to(device, torch.bfloat16 if kind == "attention" else torch.float32)


def flash() -> Any:
    """Force the flash kernels of scaled_dot_product_attention."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def make_input(
    layers: nn.Module, seed: int = 0, rows: int = ROWS, width: int = WIDTH, device: torch.device = DEVICE
) -> torch.Tensor:
    """Return a fresh input; whoever calls a step hands it over and keeps no reference."""
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
    """Run the layers, each in the context, and `after` with the index of each."""
    context, sync = pair
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
        x = sync(x)
        if after is not None:
            after(k)
    return x


def manual_forward(layers: nn.ModuleList, x: torch.Tensor, trio: tuple[Any, Any, Any], leaving: int) -> torch.Tensor:
    """Offload the first `leaving` layers, release them two layers later, and reload them when forward is over."""
    context, sync, controller = trio

    def after(k: int) -> None:
        if k < leaving:
            controller.start_offload_layer(k)
        if 0 <= k - 2 < leaving:
            controller.release_activation_forward_gpu_memory(k - 2)

    x = forward(layers, x, (context, sync), after)
    for k in reversed(range(leaving)):
        controller.start_reload_layer(k)
    return x


@dataclass
class Result:
    """What a step computed."""

    output: torch.Tensor
    grads: list[torch.Tensor]

    def differences(self, other: Result) -> list[str]:
        """Name what is not bit-identical, or not finite."""
        mine, theirs = [self.output, *self.grads], [other.output, *other.grads]
        assert len(mine) == len(theirs)
        names = ["output", *(f"gradient {k}" for k in range(len(self.grads)))]
        return [
            name
            for name, a, b in zip(names, mine, theirs, strict=True)
            if not (torch.equal(a, b) and bool(torch.isfinite(a).all()))
        ]


def collect(layers: nn.Module, output: torch.Tensor) -> Result:
    """Take a step's output and the gradients of all parameters, which are cleared."""
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
    """Run one forward and backward on the input of a seed."""
    output = forward(layers, make_input(layers, seed, rows), pair)
    loss(output).backward()
    return collect(layers, output)


def loss(output: torch.Tensor) -> torch.Tensor:
    """Return a scalar whose gradient differs in every element."""
    return output.float().square().mean()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def nap(cycles: int) -> None:
    """Keep the current stream busy for some clock cycles; 1.7 million are about a millisecond."""
    if CUDA and cycles:
        torch.cuda._sleep(cycles)


class Delayed:
    """The machine's device with random delays before each copy and each allocation.

    Parameters
    ----------
    out, back, home : int
        Longest delay in clock cycles on the stream of copies out, of copies back, and of the allocations.
    """

    def __init__(self, out: int = 0, back: int = 0, home: int = 0) -> None:
        self.inner = devices.backend()
        self.longest = {"out": out, "back": back, "home": home}
        self.random = random.Random(0)
        self.delays = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _nap(self, lane: str, stream: Any) -> None:
        if self.longest[lane]:
            self.delays += 1
            with self.inner.on(stream):
                nap(self.random.randrange(self.longest[lane] // 2, self.longest[lane]))

    def to_host(self, pairs: Any, stream: Any) -> None:
        self._nap("out", stream)
        self.inner.to_host(pairs, stream)

    def to_device(self, pairs: Any, stream: Any) -> None:
        self._nap("back", stream)
        self.inner.to_device(pairs, stream)

    def empty_device(self, *what: Any) -> torch.Tensor:
        self._nap("home", self.inner.current_stream(what[-1]))
        return self.inner.empty_device(*what)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
        ctx.behind = behind
        nap(before)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        nap(ctx.behind)
        return grad, None, None


class Slow(nn.Module):
    """A layer with random delays of compute, in forward and in backward."""

    def __init__(self, layer: nn.Module, source: random.Random, longest: int) -> None:
        super().__init__()
        self.layer, self.source, self.longest = layer, source, longest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, behind = (self.source.randrange(self.longest) for _ in range(2))
        return self.layer(_Pause.apply(x, before, behind))
