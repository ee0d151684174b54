"""Dropout masks are made again where the generator can be set to a place, as that of a GPU can.

Here a generator of Python stands for it, and an operator that draws from it for those of PyTorch.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composing import gradients
from recomputing import Linear, Net, all_ways, batch, check
from torch import Tensor, nn

from actoffload.replay import trace


class Generator:
    """A seed, and the count of the numbers that were drawn."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.seed = self.offset = 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0


GENERATOR = Generator()


@torch.library.custom_op("actoffload_replay_tests::mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def mask(x: Tensor, part: float) -> Tensor:
    """Return which elements stay, and begin the next one 4 numbers later."""
    own = torch.Generator().manual_seed(1000 * GENERATOR.seed + GENERATOR.offset)
    GENERATOR.offset += 4
    return torch.rand(x.shape, generator=own) > part


@pytest.fixture(autouse=True)
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    monkeypatch.setattr(trace, "gpu_generator", lambda: GENERATOR)
    GENERATOR.manual_seed(0)
    return GENERATOR


class Dropping(nn.Module):
    """Two parts that drop elements; the second may do something before."""

    def __init__(self, before: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.one, self.two, self.before = Linear(), Linear(), before

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.one(x))
        y = torch.sin(y * mask(y.detach(), 0.3).to(y.dtype) * mask(y.detach(), 0.1).to(y.dtype))
        self.before()
        z = torch.sin(self.two(y))
        return x + z * mask(z.detach(), 0.5).to(y.dtype)


def use(model: nn.Module, between: Callable[[int], Any] = lambda k: None) -> list[Tensor]:
    """Return the gradients of some steps, and where the generator is behind each; `between` forward and backward."""
    found: list[Tensor] = []
    for k in range(6):
        GENERATOR.manual_seed(k)
        loss = model(batch(k)).square().sum()
        between(k)
        loss.backward()
        found += [*gradients(model), torch.tensor([GENERATOR.seed, GENERATOR.offset])]
    return found


@all_ways
def test_masks_are_made_again(policy, fraction):
    check(lambda: Net(Dropping), use, policy=policy, fraction=fraction)


@pytest.mark.parametrize("change", ["nothing", "offset", "seed"])
def test_masks_are_freed_and_a_generator_that_the_program_sets_before_backward_changes_nothing(change):
    """Of a block its input stays, which is the output of the one before."""

    def between(k: int) -> None:
        if change == "seed":
            GENERATOR.manual_seed(100 + k)
        GENERATOR.offset += 40 * (change != "nothing")

    check(lambda: Net(Dropping), lambda model: use(model, between), freed=0.8)


@pytest.mark.parametrize("when", ["always", "later"])
@pytest.mark.parametrize("how", ["draws", "seeds"])
def test_what_draws_unseen_keeps_the_masks(when, how):
    """Something between the parts that no operator shows: in each call, or in the last steps only."""
    calls = [0]

    def unseen() -> None:
        calls[0] += 1
        if when == "always" or calls[0] > 4 * 4:
            GENERATOR.offset += 8
            if how == "seeds":
                GENERATOR.manual_seed(GENERATOR.seed + 1)

    def counted(model: nn.Module) -> list[Tensor]:
        calls[0] = 0
        return use(model)

    # A call that has drawn more than the traced one keeps all.
    check(lambda: Net(lambda: Dropping(unseen)), counted, freed=None if when == "always" else -1.0)


def test_equal_draws_are_no_twins():
    class Twice(Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(super().forward(x))
            one, two = (mask(y.detach(), 0.5).to(y.dtype) for _ in range(2))
            return (y * one).sin() + (y * two).exp()

    check(lambda: Net(Twice), use, freed=0.7)


# Threads

THREADS = """
import gc, sys, threading, time, torch
from actoffload.replay.proof import read_states
generators = [torch.default_generator] * 20
gc.callbacks.append(lambda *_: time.sleep(1e-5))
gc.set_threshold(1)
sys.setswitchinterval(1e-6)

def ask():
    for _ in range(200):
        read_states(generators)

threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_do_not_wait_for_each_other_where_garbage_is_collected() -> None:
    """PyTorch holds the lock of a generator while it makes an object, which may run Python code of the program."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", THREADS], env=environment, check=True, timeout=60)
