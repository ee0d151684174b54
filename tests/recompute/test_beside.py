"""Recomputation beside checkpointing and saved-tensor hooks of the program, transforms and compiled groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composing import BLOCKS, STEPS, WIDTH, Mlp, Net, Offload, batch, dropping, gradients, train
from recomputing import FIRST, Counted, check, counted, fractions, policies, simple
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole_model import offload

from actoffload.device import ReferenceDevice

# The program checkpoints, or has hooks of its own


class Checkpointing(nn.Module):
    """Checkpoints a part of itself; counts how often that part runs."""

    runs = 0

    def __init__(self, reentrant: bool, inner: Any = dropping) -> None:
        super().__init__()
        self.reentrant, self.one, self.two = reentrant, inner(), nn.Linear(WIDTH, WIDTH)

    def part(self, x: Tensor) -> Tensor:
        Checkpointing.runs += 1
        return self.one(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(checkpoint(self.part, x, use_reentrant=self.reentrant))


@policies
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_group_that_checkpoints_a_part_of_itself_is_left_alone(reentrant, policy):
    Checkpointing.runs = 0
    handle = check(simple(counted(lambda: Checkpointing(reentrant))), policy, recomputed=0)
    assert Checkpointing.runs == 2 * 4 * 2 * BLOCKS  # without us and with, steps, forward and backward
    assert "checkpoints a part of them" in handle.plan.because


@policies
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_group_that_the_program_checkpoints_is_left_alone(reentrant, policy):
    class Around(Net):
        def call(self, block, x):
            return checkpoint(block, x, use_reentrant=reentrant)

    handle = check(simple(lambda: Around(lambda: Counted(dropping()))), policy, recomputed=2 * 4 * BLOCKS)
    assert reentrant or "such as those of torch.utils.checkpoint: blocks.0 ... 5." in handle.plan.because


def test_checkpointing_that_is_switched_on_later():
    """As with `gradient_checkpointing_enable` of Hugging Face: a flag of the modules."""

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.checkpoints = dropping(), False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)

    def use(model):
        found = train(model, 1)
        for block in model.blocks:
            block.inner.checkpoints = True
        return found + train(model, 2)

    check(simple(counted(Switched), use), recomputed=FIRST + BLOCKS)


@policies
@pytest.mark.parametrize("where", ["inside", "around"])
def test_saved_tensor_hooks_of_the_program(where, policy):
    class Inside(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x).sin()

    class Around(Net):
        def call(self, block, x):
            with torch.autograd.graph.save_on_cpu():
                return block(x)

    program = simple(counted(Inside) if where == "inside" else lambda: Around(lambda: Counted(Mlp())))
    handle = check(program, policy, recomputed=0, offloads=False)
    assert "saved-tensor hooks of" in handle.plan.because


def test_vmap_around_the_model():
    def use(model):
        x = torch.stack([batch(k) for k in range(3)])
        y = torch.vmap(model)(x)
        y.square().sum().backward()
        return gradients(model)

    check(simple(counted(Mlp), use), recomputed=FIRST, watch=False)


def test_functional_call():
    """In backward the module has its own parameters again, so recomputation would use the wrong ones."""

    def use(model):
        others = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, (batch(),)).square().sum().backward()
        return [other.grad for other in others.values()]

    handle = check(simple(counted(Mlp), use), recomputed=FIRST)
    assert "because they are called with other parameters, by torch.func.functional_call" in handle.plan.because


@pytest.mark.filterwarnings("ignore:.*functional_call")
def test_functional_call_of_its_former_module():
    def use(model):
        others = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}
        torch.nn.utils.stateless.functional_call(model, others, (batch(),)).square().sum().backward()
        return [other.grad for other in others.values()]

    check(simple(counted(Mlp), use), recomputed=FIRST)


def test_a_group_with_others_inside_is_not_recomputed_and_the_inner_ones_are():
    def program(offload: Offload) -> list[Tensor]:
        model = counted()()
        offload(model, layers=["*blocks.?", "*blocks.?.inner.norm"])
        return train(model)

    handle = check(program, recomputed=0)
    assert "because other groups or kept modules are inside of them: blocks.0 ... 5." in handle.plan.because
    assert "norm" not in handle.plan.because


def test_the_whole_model_as_a_group_with_others_inside():
    def program(offload: Offload) -> list[Tensor]:
        model = counted()()
        offload(model, layers=[model, *model.blocks])
        return train(model)

    handle = check(program, recomputed=FIRST + (STEPS - 1) * BLOCKS)
    reason = "because other groups or kept modules are inside of them"
    assert handle.plan.because == f"Not recomputed, {reason}: (the whole model)."
    assert handle.plan.names.count("(the whole model) (part 2)") == 1
    assert {handle.plan.names[k] for k in handle.plan.recomputed} == {f"blocks.{k}" for k in range(BLOCKS)}
    assert set(handle.report().refused) == {"(the whole model)"}


# Compiled groups

compiles = pytest.mark.filterwarnings("ignore")  # Dynamo reads attributes that warn


@compiles
@fractions
def test_compiled_groups_are_recomputed_as_a_whole(fraction):
    class Run(nn.Module):
        """Counts outside of compiled code."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.inner.compile(backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    offloaded = []
    for policy in ([], True):
        torch._dynamo.reset()
        Counted.backward_calls = 0
        handle = check(simple(counted(Run)), policy, recomputed=FIRST + 3 * BLOCKS, fraction=fraction)
        offloaded.append(handle.statistics().bytes_offloaded)
    assert offloaded[0] == offloaded[1], "the products inside of compiled code are not saved"


@compiles
def test_a_checkpointed_compiled_part():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.inner.compile(backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch._dynamo.reset()
    check(simple(counted(Inner)), recomputed=0)


# CUDA graphs


@pytest.mark.parametrize("random", [False, True])
def test_in_a_captured_graph_groups_are_recomputed_that_draw_no_random_numbers(random, monkeypatch):
    """The state of a generator cannot be read there; the reference device only says that it captures."""
    model = Net(lambda: Counted(dropping() if random else Mlp()))
    handle = offload(model, recompute=True, layers="blocks.?", fraction=0.0)
    train(model, 2)
    states: list[int] = []
    monkeypatch.setattr(ReferenceDevice, "capturing", lambda self: True)
    monkeypatch.setattr(torch, "get_rng_state", lambda: states.append(1))
    x, Counted.backward_calls = batch(), 0
    model(x).sum().backward()
    assert Counted.backward_calls == (0 if random else BLOCKS)
    assert not states
    assert ("Not recomputed, because a CUDA graph is captured" in handle.plan.because) == random
    monkeypatch.undo()
    handle.remove()
