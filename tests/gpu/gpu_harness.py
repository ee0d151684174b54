"""Models, steps and comparisons of the tests on a GPU."""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import no_synchronization
from torch import Tensor, nn

import actoffload
from actoffload import device as devices
from actoffload.device import accelerator
from actoffload.measure import MemoryMeter

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA itself, not just any accelerator")
# Warnings of other libraries depend on versions and drivers; ours stay errors.
gpu = [
    pytest.mark.gpu,
    needs_cuda,
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::actoffload.HostMemoryWarning"),
]
"""Marks of a file of tests on a GPU."""

WIDTH, ROWS, BLOCKS = 512, 8192, 8
NBYTES = ROWS * WIDTH * 4
"""Bytes of the output of one block, in float32."""

Run = Callable[[Tensor], Tensor]


# Models


class Mlp(nn.Module):
    """Two linear layers with a GELU: it saves two wide tensors and a narrow one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block whose query, key and value are views of one storage."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(1, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, width))
        return x + self.mlp(self.norm2(x))


KINDS = {"linear": lambda width: nn.Linear(width, width), "mlp": Mlp, "attention": Block}


class Net(nn.Module):
    """Blocks after a stem that computes their input: the argument of a model is kept alive by its caller."""

    def __init__(self, kind: str = "linear", count: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([KINDS[kind](width) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def make(kind: str = "linear", count: int = BLOCKS, width: int = WIDTH) -> Net:
    """Return a model with the same weights on every call; in bfloat16 for attention, as the flash kernels require."""
    torch.manual_seed(2)
    return Net(kind, count, width).to(DEVICE, torch.bfloat16 if kind == "attention" else torch.float32)


def offload(model: nn.Module, **options: Any) -> actoffload.OffloadHandle:
    """Offload a model by the schedule; the option ``fraction=None`` measures."""
    return actoffload.offload(model, **{"min_bytes": 1 << 16, "fraction": 1.0, **options})


def in_context(model: Net, context: Any, sync: Any, after: Callable[[int], None] = lambda k: None) -> Run:
    """Return a function that runs each block of a model in a context, and calls `after` with its number."""

    def run(x: Tensor) -> Tensor:
        x = model.stem(x)
        for k, block in enumerate(model.blocks):
            with context:
                x = block(x)
            x = sync(x)
            after(k)
        return x

    return run


def default_context(model: Net, number: int = 4) -> tuple[Run, Any]:
    """Return a function that runs a model with the default schedule, and the context."""
    context, sync = actoffload.get_cpu_offload_context(True, number, len(model.blocks))
    return in_context(model, context, sync), context


def manual_context(model: Net, number: int = 4, stream: Any = None) -> tuple[Run, Any]:
    """Return a function that offloads the first blocks by hand and reloads them after the forward, and the context."""
    context, sync, controller = actoffload.get_cpu_offload_context(
        True, model_layers=len(model.blocks), manual_synchronization=True, offload_stream=stream
    )

    def after(k: int) -> None:
        if k < number:
            controller.start_offload_layer(k)
        if 0 <= k - 2 < number:
            controller.release_activation_forward_gpu_memory(k - 2)
        if k + 1 == len(model.blocks):
            for back in reversed(range(number)):
                controller.start_reload_layer(back)

    return in_context(model, context, sync, after), context


Way = Callable[[Net], tuple[Run, Any]]
"""Takes a model; returns what runs it, and the context or handle."""


def whole(**options: Any) -> Way:
    """Return a way that offloads the whole model."""
    return lambda model: (model, offload(model, **options))


def flash() -> Any:
    """Force the flash kernels of scaled_dot_product_attention."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


# Steps


def make_input(model: nn.Module, seed: int = 0, rows: int = ROWS) -> Tensor:
    """Return a new input; the caller passes it to the step and keeps no reference."""
    weight = next(model.parameters())
    generator = torch.Generator(weight.device).manual_seed(seed)
    return torch.randn(rows, weight.shape[-1], generator=generator, device=weight.device, dtype=weight.dtype)


def loss(output: Tensor) -> Tensor:
    """Return a scalar whose gradient differs in every element."""
    return output.float().square().mean()


def collect(model: nn.Module, output: Tensor) -> list[Tensor]:
    """Return copies of the output and the gradients of a step, and clear the gradients."""
    found = [output.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    assert len(found) > 1
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    return found


def step(model: nn.Module, seed: int, rows: int = ROWS, run: Run | None = None) -> list[Tensor]:
    """Run one step and return its output and gradients."""
    output = (model if run is None else run)(make_input(model, seed, rows))
    loss(output).backward()
    return collect(model, output)


def run_step(model: nn.Module, seed: int, rows: int = ROWS) -> None:
    """Run one step and discard its output."""
    loss(model(make_input(model, seed, rows))).backward()


# Memory and synchronization


def requested(what: str) -> int:
    """Return the ``"current"`` or ``"peak"`` bytes of device memory, without the allocator's rounding, which varies."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def peak(model: nn.Module, seed: int = 0) -> int:
    """Return the requested bytes at the peak of one step."""
    with MemoryMeter():
        run_step(model, seed)
    model.zero_grad(set_to_none=False)
    return requested("peak")


def clean() -> None:
    """Free cached memory and the cuBLAS workspaces, so that the next measurement counts only its own."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def driver_calls() -> dict[str, int]:
    """Return how often PyTorch has taken memory from the driver so far, on the device and page-locked on the host."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    counts = {name: int(device.get(name, 0)) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}
    return counts | {name: int(host.get(name, 0)) for name in ("num_host_alloc", "num_host_free")}


@contextmanager
def steady() -> Iterator[None]:
    """Forbid to wait for the device, and require that no memory is taken from the driver."""
    forbidden = AssertionError("a step synchronized")
    torch.cuda.synchronize()
    before = driver_calls()
    with (
        no_synchronization(),
        mock.patch.object(torch.cuda, "synchronize", side_effect=forbidden),
        mock.patch.object(torch.accelerator, "synchronize", side_effect=forbidden),
        mock.patch.object(accelerator, "pin", side_effect=AssertionError("a step pinned host memory")),
    ):
        yield
    torch.cuda.synchronize()
    assert driver_calls() == before


# Graphs


def captured(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture `run` in a CUDA graph after a warm-up on a side stream; return its results and the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph


class WholeStep:
    """Forward and backward of what runs a model, in one CUDA graph; `warm_up` runs before the capture in its place."""

    def __init__(self, model: nn.Module, run: Run, rows: int, *, warm_up: Run | None = None) -> None:
        self.model = model
        self.static = make_input(model, 0, rows)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(run if warm_up is None else warm_up)
        torch.cuda.current_stream().wait_stream(side)
        self.output: Any = None
        clean()
        before = requested("current")
        torch.cuda.reset_peak_memory_stats()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step(run)
        self.peak = requested("peak") - before
        # The graph writes these gradients; eager steps allocate others.
        self.grads = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)

    def _step(self, run: Run) -> None:
        # The gradients are allocated before the capture, so that the graph only writes them.  The input is a copy:
        # the graph reads the static one at a fixed address, so the static one cannot be offloaded.
        self.model.zero_grad(set_to_none=False)
        output = run(self.static.clone())
        loss(output).backward()
        self.output = output.detach()

    def launch(self, seed: int) -> None:
        self.static.copy_(make_input(self.model, seed, self.static.shape[0]))
        self.graph.replay()

    def result(self) -> list[Tensor]:
        return [self.output.clone(), *(gradient.clone() for gradient in self.grads)]

    def replay(self, seed: int) -> list[Tensor]:
        self.launch(seed)
        return self.result()


# Delays


def occupy(cycles: int) -> None:
    """Keep the current stream busy for a number of clock cycles; 1.7 million are about 1 ms."""
    if CUDA and cycles:
        torch.cuda._sleep(cycles)


class Delayed:
    """The device of this machine with a random delay before each copy and each allocation.

    The longest delays are in clock cycles, on the streams of copies and, before an allocation, on the compute stream.
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

    def empty_device(self, *what: Any) -> Tensor:
        self._delay("compute", self.inner.current_stream(what[-1]))
        return self.inner.empty_device(*what)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, before: int, after: int) -> Tensor:
        ctx.after = after
        occupy(before)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        occupy(ctx.after)
        return grad, None, None


class Slow(nn.Module):
    """A layer whose compute stream is delayed at random, in forward and in backward."""

    def __init__(self, layer: nn.Module, source: random.Random, longest: int) -> None:
        super().__init__()
        self.layer, self.source, self.longest = layer, source, longest

    def forward(self, x: Tensor) -> Tensor:
        before, after = (self.source.randrange(self.longest) for _ in range(2))
        return self.layer(_Pause.apply(x, before, after))


def slow_down(model: Net, longest: int) -> Net:
    """Replace the blocks of a model by ones with random delays of compute."""
    source = random.Random(1)
    model.blocks = nn.ModuleList([Slow(block, source, longest) for block in model.blocks])
    return model
