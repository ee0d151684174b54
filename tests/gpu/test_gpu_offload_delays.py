"""`actoffload.offload` under random delays on every stream: random models keep every bit of their gradients."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_harness import CUDA, DEVICE, WIDTH, Delayed, Mlp, Result, Slow, lenient, loss, make_input
from offload_harness import Net, make, offload, step
from torch import Tensor, nn

import actoffload
from actoffload.device import use

pytestmark = [pytest.mark.gpu, *lenient]

PROGRAMS = 40 if CUDA else 6
ROWS = 2048 if CUDA else 64
LONGEST = 1_000_000  # clock cycles, about 0.6 ms; a copy of 4 MiB takes about 0.1 ms


class Tree(nn.Module):
    """Run the parts in order, twice, in a random order, with some left out, or as residual branches."""

    def __init__(self, way: str, parts: list[nn.Module], source: random.Random) -> None:
        super().__init__()
        self.way, self.source = way, source
        self.parts = nn.ModuleList(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        return Tree(self.way, [copy.deepcopy(part, memo) for part in self.parts], copy.deepcopy(self.source, memo))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.parts)
        if self.way == "twice":
            parts += parts
        elif self.way == "any order":
            self.source.shuffle(parts)
        elif self.way == "some":
            parts = [part for part in parts if self.source.random() < 0.7]
        for part in parts:
            x = (x + part(x)) * 0.5 if self.way == "residual" else part(x)
        return x


WAYS = ("in order", "twice", "any order", "some", "residual")
LEAVES = (lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH), nn.GELU, nn.Tanh, lambda: Mlp(WIDTH))


def tree(source: random.Random, drawn: random.Random, depth: int = 0) -> nn.Module:
    """Return a random model; `drawn` decides the order of the parts at each call."""
    if depth == 3 or (depth and source.random() < 0.4):
        return source.choice(LEAVES)()
    parts = [tree(source, drawn, depth + 1) for _ in range(source.randint(2, 4))]
    return Tree(source.choice(WAYS), parts, drawn)


def offloaded(source: random.Random, model: nn.Module) -> actoffload.OffloadHandle:
    """Offload a model with random arguments."""
    names = [name for name, _ in model.named_modules() if name]
    chosen = source.sample(names, min(6, len(names)))
    arguments = {
        "layers": source.choice([["*"], [nn.Linear, Mlp], ["*.parts.*", "0"], chosen]),
        "fraction": source.choice([1.0, 1.0, 0.5]),
        "max_inflight": source.choice([None, None, 1, 2]),
        "max_host_bytes": source.choice([None, None, None, 1 << 28]),
    }
    others = sorted({*names} - {*chosen})
    more = {
        "keep": source.choice([(), nn.LayerNorm, *others[:1]]),
        "num_layers": source.choice([None, None, 2, 4]),
    }
    try:
        return offload(model, **arguments, **more)
    except ValueError:  # a module is in layers and in keep, or num_layers exceeds the number of groups
        return offload(model, **arguments)


def run(model: nn.Module, program: int) -> list[Result]:
    """Run steps of one pass, of two passes with their backwards in any order, and with a graph that is discarded."""
    source = random.Random(program)
    results = []
    for seed in range(4):
        kind = source.choice(["one", "one", "two", "discarded"])
        rows = source.choice([ROWS, ROWS // 2])
        outputs = [model(make_input(model, seed, rows))]
        if kind == "two":
            outputs.append(model(make_input(model, seed + 10, rows)))
            source.shuffle(outputs)
        elif kind == "discarded":
            outputs = [model(make_input(model, seed, rows))]
        for output in outputs:
            loss(output).backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append(Result(torch.cat([output.detach() for output in outputs]), grads))
        model.zero_grad()
    return results


@pytest.fixture
def delayed() -> Iterator[Delayed]:
    device = Delayed(d2h=LONGEST, h2d=LONGEST, compute=LONGEST // 4)
    with use(device):
        yield device


def test_random_models_under_delays(delayed: Delayed) -> None:
    with_reloads = 0
    for program in range(PROGRAMS):
        source = random.Random(program)
        torch.manual_seed(program)
        model = nn.Sequential(Mlp(WIDTH), tree(source, random.Random(program)), nn.Linear(WIDTH, WIDTH))
        model.to(DEVICE)
        plain = copy.deepcopy(model)
        handle = offloaded(source, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actoffload.HostMemoryWarning)  # max_host_bytes may be too low
            warnings.filterwarnings("ignore", "None of the groups")
            want, got = run(plain, program), run(model, program)
        assert len(want) == len(got)
        for k, (one, other) in enumerate(zip(want, got, strict=True)):
            assert other.differences(one) == [], f"program {program}, step {k}: {handle}"
        with_reloads += handle.statistics().bytes_reloaded > 0
        assert handle.statistics().resident_bytes == handle.statistics().host_bytes_used == 0
        handle.remove()
    assert with_reloads >= PROGRAMS // 2
    assert delayed.delays > 0


@pytest.mark.parametrize(
    "how",
    [
        *({}, {"num_layers": 3}, {"num_layers": 7}, {"max_inflight": 1}),
        *({"recompute": True}, {"recompute": True, "num_layers": 7}, {"recompute": True, "num_layers": 3}),
    ],
)
def test_blocks_under_delays(how: dict[str, Any], delayed: Delayed) -> None:
    model = make("mlp", 8)
    want = [step(model, seed, ROWS) for seed in range(6)]
    handle = offload(slowed(model), **how)
    for seed in range(6):
        assert step(model, seed, ROWS).differences(want[seed]) == []
    assert handle.statistics().bytes_reloaded > 0
    assert delayed.delays > 0


def slowed(model: Net, longest: int = LONGEST // 4) -> Net:
    """Replace the blocks of a model by ones with random delays of compute."""
    source = random.Random(1)
    model.blocks = nn.ModuleList([Slow(block, source, longest) for block in model.blocks])
    return model
