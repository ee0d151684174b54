"""What the tests of `actoffload.offload` share: models whose saved bytes are known, and comparing bit by bit."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from helpers import no_gc, nothing_held, place_backend, same_bits
from torch import Tensor, nn

import actoffload
from actoffload.device import use

ROWS, WIDTH = 16, 32
UNIT = ROWS * WIDTH * 4
"""Bytes of what one block hands to the next, and of each storage that a `Wave` saves."""
ATTENTION, MLP = UNIT + 3 * UNIT + ROWS * ROWS * 4 + UNIT, UNIT + 2 * UNIT
"""Bytes that an `Attention` and an `Mlp` save."""

Run = Callable[[nn.Module, Tensor], Tensor]


class Wave(nn.Module):
    """Saves two storages, its input and the argument of the sine; never its output."""

    SAVES = 2

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)


class Caching(Wave):
    """A wave that keeps a tensor for itself."""

    caches = True

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        if self.caches:
            self.cache = [h]
        return torch.sin(h)


class Waves(nn.Module):
    """Blocks of one type, and nothing else that saves anything."""

    def __init__(self, count: int = 6, block: Callable[[], nn.Module] = Wave) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Inside(Waves):
    """Makes the input of its first block itself: what a model is called with is held by whoever calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.0)


class Mlp(nn.Module):
    """Two linears with a tanh between them, whose output is saved once and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    """One head over the rows of a batch of one sequence; query, key and value are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.mT / WIDTH**0.5).softmax(-1) @ v)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks between a linear that makes their input and a head."""

    def __init__(self, count: int = 6, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(count)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data(seed: int = 0, rows: int = ROWS) -> Tensor:
    """Return the input of a step, on a storage of its own."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def start(place: torch.device | None = None) -> Tensor:
    """Return an input that requires a gradient and that autograd does not hold beside its use."""
    return data().to(place).requires_grad_() * 1.0


def offload(model: nn.Module, *, device: Any = None, **options: Any) -> actoffload.OffloadHandle:
    """Offload a model on the device of `place_backend`, also its small tensors."""
    with use(device or place_backend()):
        return actoffload.offload(model, **{"min_bytes": 64, **options})


def call(model: nn.Module, x: Tensor) -> Tensor:
    """Call a model: how most programs run one."""
    return model(x)


def loop(model: nn.Module, x: Tensor) -> Tensor:
    """Run the blocks as a pipeline stage does, without calling the model."""
    for block in model.blocks:
        x = block(x)
    return x


def measured(handle: actoffload.OffloadHandle, step: Callable[[], None]) -> actoffload.report.Statistics:
    """Return the statistics of one step."""
    handle.reset_statistics()
    step()
    return handle.statistics()


def moved(handle: actoffload.OffloadHandle, run: Callable[[Tensor], Tensor]) -> int:
    """Return the bytes that a handle offloads in a forward and backward of `run`."""
    return measured(handle, lambda: run(start()).sum().backward()).bytes_offloaded


def backward(model: nn.Module, seed: int = 0) -> Callable[[], None]:
    """Return a step of a model."""
    return lambda: model(data(seed)).sum().backward()


def step(model: nn.Module, seed: int = 0) -> None:
    """Run a step whose input requires a gradient."""
    model(data(seed).requires_grad_()).sum().backward()


def reported(model: nn.Module, *, steps: int = 2, record: bool = False, **options: Any) -> tuple[Any, Any]:
    """Run some steps, the last of which is recorded if asked; return handle and report."""
    handle = offload(model, **options)
    for k in range(steps):
        handle.reset_statistics()
        with handle.recording() if record and k == steps - 1 else nullcontext():
            step(model, k)
    return handle, handle.report()


def said(report: actoffload.report.Report) -> str:
    """Return the advice of a report as one text."""
    return " ".join(report.advice)


def bytes_of_a_step(model: nn.Module, **options: Any) -> tuple[int, int]:
    """Return the bytes that a third step offloads, and how many storages it reloads on demand."""
    handle, _ = agrees(model, **options)
    handle.reset_statistics()
    model(data().requires_grad_() * 1.0).sum().backward()
    statistics = handle.statistics()
    nothing_held(handle)
    return statistics.bytes_offloaded, statistics.reloaded_on_demand


def gradients(model: nn.Module) -> list[Tensor]:
    """Take the gradients, and clear them; of a distributed one this process's part."""
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert found or not list(model.parameters())
    return [getattr(grad, "_local_tensor", grad) for grad in found]


def train(
    model: Any,
    run: Run = call,
    steps: int = 3,
    *,
    owner: nn.Module | None = None,
    data: Callable[[int], Tensor] = data,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    start: int = 0,
) -> list[Tensor]:
    """Run some steps of a model, or of what runs the model `owner`; return outputs, gradients, and buffers in the end.

    Each forward runs in a context that `around` returns.
    """
    owner = model if owner is None else owner
    found = []
    for k in range(start, start + steps):
        torch.manual_seed(k)
        with around():
            y = run(model, data(k))
        y.float().square().sum().backward()
        found += [y.detach().clone(), *gradients(owner)]
        del y
    return [*found, *(buffer.clone() for buffer in owner.buffers())]


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    """Check that two lists of tensors have equal bits."""
    assert len(got) == len(want) > 0
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same_bits(a, b), f"result {k} of shape {tuple(a.shape)} differs"


def agrees(
    model: nn.Module, run: Run = call, steps: int = 3, *, before: int = 0, **options: Any
) -> tuple[actoffload.OffloadHandle, actoffload.report.Statistics]:
    """Train a copy of a model as it is, and the model with offload: equal bits, and nothing is held in the end.

    Returns the handle and the statistics of all steps but the first `before`, such as the one that finds the groups.
    """
    reference = copy.deepcopy(model)
    want = train(reference, run, before) + train(reference, run, steps)
    handle = offload(model, **options)
    with no_gc():
        got = train(model, run, before)
        handle.reset_statistics()
        got += train(model, run, steps)
        nothing_held(handle)  # type: ignore[arg-type]
    equal(got, want)
    return handle, handle.statistics()


def hooks(model: nn.Module) -> list[int]:
    """Return how many hooks each module of a model has."""
    return [
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + len(module._backward_hooks)
        + len(module._forward_hooks_always_called)
        + len(module._forward_pre_hooks_with_kwargs)
        for module in model.modules()
    ]


def nothing_installed(model: nn.Module | None = None) -> None:
    """Check that no saved-tensor hooks are installed, and that a model, if given, has no hook."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not actoffload.is_cpu_offload_enabled()
    if model is not None:
        assert not any(hooks(model))
        assert all(module._compiled_call_impl is None for module in model.modules())
