"""Random delays on every stream change no bit of the gradients."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import helpers
import pytest
import torch
import torch.distributed as dist
from adversary import harness
from adversary.programs import Program, programs_of_models
from gpu_harness import (
    DEVICE,
    WIDTH,
    Delayed,
    Mlp,
    Net,
    Run,
    Way,
    collect,
    default_context,
    gpu,
    loss,
    make,
    make_input,
    manual_context,
    occupy,
    slow_down,
    step,
    whole,
)
from hypothesis import given, settings
from torch import Tensor, nn
from whole_model import equal
from wrappers import Two, Uses, read

import actoffload
from actoffload.device import use

pytestmark = gpu

ROWS = 2048
LONGEST = 1_000_000  # clock cycles, about 0.6 ms; a copy of 4 MiB takes about 0.1 ms


def several_passes(model: Net, seed: int, run: Run) -> list[Tensor]:
    """Run three forwards, then their backwards in a random order, one of them twice on a retained graph."""
    outputs = [run(make_input(model, 3 * seed + k, ROWS)) for k in range(3)]
    losses = [loss(output) for output in outputs]
    order = random.Random(seed).sample(range(3), 3)
    losses[order[0]].backward(retain_graph=True)
    for k in order:
        losses[k].backward()
    return collect(model, torch.stack(outputs))


def one_pass(model: Net, seed: int, run: Run) -> list[Tensor]:
    return step(model, seed, ROWS, run)


WAYS: dict[str, Way] = {
    "context": lambda model: default_context(model, 5),
    "manual": manual_context,
    "manual, one stream": lambda model: manual_context(model, stream=torch.cuda.Stream()),
    "whole model": whole(),
    "three blocks": whole(num_layers=3),
    "one at a time": whole(max_inflight=1),
    "recomputed": whole(recompute=True),
    "recomputed, three blocks": whole(recompute=True, num_layers=3),
}
LANES = ("d2h", "h2d", "compute")


@pytest.mark.parametrize(
    ("way", "passes", "lanes"),
    [
        *((way, one_pass, LANES) for way in WAYS),
        *((way, several_passes, LANES) for way in ("context", "whole model")),
        *(("context", passes, (lane,)) for passes in (one_pass, several_passes) for lane in LANES),
    ],
)
def test_delays(way: str, passes: Callable[..., list[Tensor]], lanes: tuple[str, ...]) -> None:
    model = make("mlp")
    want = [passes(model, seed, model) for seed in range(8)]
    delayed = Delayed(**dict.fromkeys(lanes, 2 * LONGEST // len(lanes)))
    with use(delayed):
        run, handle = WAYS[way](slow_down(model, LONGEST // 4))
        for seed, expected in enumerate(want):
            delayed.random.seed(seed)
            equal(passes(model, seed, run), expected)
    assert delayed.delays > 0
    statistics = handle.statistics()
    assert statistics.bytes_offloaded > 0
    assert statistics.bytes_reloaded > 0
    assert statistics.resident_bytes == 0


class AcceleratorRun(harness.Run):
    """A program of random modules, whose streams are those of the accelerator."""

    def __init__(self, program: Program, offloads: bool) -> None:
        super().__init__(program, None)
        if offloads:
            self._open(None)

    def maybe_fail(self) -> None:
        """Let each backward pass: a thread of the accelerator may drop what an error left at any time."""


@pytest.mark.parametrize("recompute", [False, True])
def test_random_models(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "PLACE", DEVICE)
    delayed, reloaded = Delayed(d2h=LONGEST, h2d=LONGEST, compute=LONGEST // 4), []

    @settings(max_examples=30)
    @given(programs_of_models(recompute=recompute))
    def check(program: Program) -> None:
        with harness.scaled_down(), use(delayed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # windows of one group; host memory that is exhausted on purpose
            want = AcceleratorRun(program, False).go()
            run = AcceleratorRun(program, True)
            equal(run.go(), want)
        reloaded.append(run.context.statistics().bytes_reloaded)
        run.context.remove()

    check()
    # Of what is recomputed little is left to reload.
    assert sum(nbytes > 0 for nbytes in reloaded) > len(reloaded) // (15 if recompute else 5)
    assert delayed.delays > 0


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank with NCCL."""
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_copy_waits_for_the_collective_that_writes_it() -> None:
    """NCCL computes the sum on its own stream, after a slow kernel; no stream has waited for it before the copy."""
    import torch.distributed._functional_collectives as collectives

    def some_input(seed: int) -> Tensor:
        return torch.randn(4096, 512, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)

    context, sync = actoffload.get_cpu_offload_context(True, 1, 3)
    with alone():
        for _ in range(2):
            leaf = some_input(0).requires_grad_()
            with context:
                occupy(50_000_000)
                thing = collectives.all_reduce(some_input(1), "sum", dist.group.WORLD)
                assert type(thing) is collectives.AsyncCollectiveTensor
                y = Uses.apply(leaf * 1, [], Two(thing, thing))
            y = sync(y)
            del thing
            y = helpers.forward([lambda x: x * 1.0] * 2, y, context, sync)
            y.sum().backward()
            assert torch.equal(leaf.grad, read(Two(some_input(1), some_input(1))))
    assert context.statistics().bytes_offloaded == 2 * 4096 * 512 * 4


@pytest.mark.multi_gpu
@pytest.mark.parametrize("split", [2, 4])
def test_blocks_on_two_devices(split: int) -> None:
    class There(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.layer, self.device = Mlp(WIDTH).to(device), device

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.to(self.device))

    torch.manual_seed(0)
    model = nn.ModuleList([There("cuda:0" if k < split else "cuda:1") for k in range(6)])
    context, sync = actoffload.get_cpu_offload_context(True, 4, 6)
    for seed in range(3):
        want = step(model, seed, ROWS, lambda x: helpers.plain(model, x))
        equal(step(model, seed, ROWS, lambda x: helpers.forward(model, x, context, sync)), want)
    statistics = context.statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0
