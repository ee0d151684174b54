"""What the tests of composition share: a model of blocks, and programs that run with and without offload."""

from collections.abc import Callable, Sequence
from typing import Any

import helpers
import torch
import torch.nn.functional as F
import whole_model
from helpers import no_gc, nothing_held
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole_model import equal, gradients, nothing_installed

import actoffload
from actoffload.device import use

ROWS, WIDTH, BLOCKS, STEPS = 40, 32, 6, 3
OFFLOADED = BLOCKS - 2
STREAM = ROWS * WIDTH * 4
"""Bytes of what one block hands to the next."""
WAY: dict[str, Any] = {}
"""Further arguments of `actoffload.offload`; the fixture `way` changes them."""

Offload = Callable[..., Any]
Program = Callable[[Offload], Sequence[Tensor]]


class Block(nn.Module):
    """A pre-norm transformer block on one sequence, with dropout if asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(1, 2, 0, 3).unsqueeze(1)
        x = x + self.out(self.attend(q, k, v)[0].transpose(0, 1).flatten(1))
        return x + self.down(self.dropout(F.gelu(self.up(x))))


class Mlp(nn.Module):
    """Two linears with a sine between them, whose argument autograd saves besides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x)))


class Net(nn.Module):
    """Blocks between two linears."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = BLOCKS) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(count)])

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def dropping() -> Block:
    """Return a block with dropout."""
    return Block(dropout=0.1)


def checkpointing(model: Net, **options: Any) -> Net:
    """Put each block of a model into a checkpointed region."""
    model.call = lambda block, x: checkpoint(block, x, **options)  # type: ignore[method-assign]
    return model


def autocast() -> torch.autocast:
    """Return a region in which the model computes in bfloat16."""
    return torch.autocast(helpers.PLACE.type, torch.bfloat16)


def batch(k: int = 0, rows: int = ROWS) -> Tensor:
    """Return the data of a step."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + k)).to(helpers.PLACE)


def copies(model: nn.Module) -> list[Tensor]:
    """Return the parameters as they are now."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def stepping_in_backward(model: nn.Module) -> None:
    """Give each parameter an optimizer of its own, which steps as soon as the gradient is there."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            optimizer = torch.optim.AdamW([parameter], lr=1e-2)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)


def train(model: Callable[[Tensor], Tensor], steps: int = STEPS, **more: Any) -> list[Tensor]:
    """Run some steps of a model; return outputs, gradients, and buffers in the end."""
    return whole_model.train(model, steps=steps, **{"data": batch, **more})


def training(make: Callable[[], nn.Module], loop: Callable[[Any], Sequence[Tensor]] = train, **options: Any) -> Program:
    """Return the program that makes a model, offloads it and runs a training loop."""

    def program(offload: Offload) -> Sequence[Tensor]:
        model = make()
        offload(model, **options)
        return loop(model)

    return program


def each_step(loss: Callable[[Any, int], Tensor], steps: int = STEPS) -> Callable[[Any], list[Tensor]]:
    """Return a training loop: for each step the backward of what `loss` returns for a model, and the gradients."""

    def loop(model: nn.Module) -> list[Tensor]:
        found = []
        for k in range(steps):
            loss(model, k).backward()
            found += gradients(model)
        return found

    return loop


class Spy:
    """A device that notes the bytes of each copy to the host, none of which may be a parameter of `watched`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.offloaded: list[int] = []
        self.watched: nn.Module | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def to_host(self, pairs: Any, stream: Any) -> None:
        owned = memories(self.watched) if self.watched is not None else set()
        for _, source in pairs:
            self.offloaded.append(source.nbytes)
            if not source._is_zerotensor():  # a derivative of zero in forward mode has no memory
                assert source.untyped_storage().data_ptr() not in owned, "a parameter is offloaded"
        self.inner.to_host(pairs, stream)


def memories(module: nn.Module) -> set[int]:
    """Return where the parameters of a module are at this moment; a distributed one is where its own part is."""
    found = {getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in module.parameters()}
    return found - {0}


def both(
    program: Program, *, offloads: bool = True, watch: bool = True, in_time: bool = True
) -> actoffload.OffloadHandle:
    """Run a program without offload and with; what it returns must have equal bits, and nothing may be held.

    Returns the handle of the second run.  `offloads` says whether something has to be offloaded, `watch` whether no
    parameter of the model may be while it runs, and `in_time` whether all has to be reloaded before it is needed.
    """
    handles: list[actoffload.OffloadHandle] = []
    spy: Any = Spy(helpers.place_backend())

    def place(module: nn.Module) -> None:
        if any(parameter.device.type != helpers.PLACE.type for parameter in module.parameters()):
            module.to(helpers.PLACE)

    def offload(module: nn.Module, **options: Any) -> actoffload.OffloadHandle:
        place(module)
        spy.watched = module if watch else None
        # Nothing is measured where a fraction is given.
        chosen = {"layers": "*blocks.?", "min_bytes": 64, "fraction": 1.0, **WAY, **options}
        handles.append(actoffload.offload(module, **chosen))
        return handles[-1]

    torch.manual_seed(0)
    wanted = program(lambda module, **options: place(module))
    with no_gc(), use(spy):
        torch.manual_seed(0)
        got = program(offload)
        (handle,) = handles
        spy.watched = None
        equal(list(got), list(wanted))
        nothing_held(handle)
    nothing_installed()
    statistics = handle.statistics()
    assert (statistics.tensors_offloaded > 0) == offloads
    assert statistics.reloaded_on_demand == 0 or not in_time
    assert not WAY.get("recompute") or any(group.recomputed for group in handle.report().groups)
    assert sum(spy.offloaded) == statistics.bytes_offloaded
    return handle
