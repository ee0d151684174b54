"""Offload beside compiled autograd: few graphs, equal bits, in-place edits caught, and memory that is given back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from composing import STREAM, WIDTH, Offload, batch, both, gradients
from helpers import make, min_elements, nothing_held
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from wrappers import Two

import actoffload
from actoffload._torch import compiling
from actoffload.engine.passes import Pass

# Dynamo's own, about deprecated parts of torch and about code that it leaves alone.
pytestmark = pytest.mark.filterwarnings("ignore", "error::actoffload.HostMemoryWarning")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def backward(loss: Tensor, **options: bool) -> None:
    """Run a compiled backward."""
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward(**options)


class Block(nn.Linear):
    """Saves its input and the result of tanh, with few operators: each costs Dynamo time."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


def blocks(count: int) -> nn.Sequential:
    """Return a model of small blocks, of which all but the last two are offloaded, and a head."""
    return nn.Sequential(*[Block() for _ in range(count)], nn.Tanh())


def train(model: nn.Module) -> list[Tensor]:
    """Run one step; return the output and the gradients."""
    y = model(batch())
    backward(y.square().sum())
    return [y.detach(), *gradients(model)]


@pytest.mark.parametrize("eager", [True, False])
def test_graphs_break_at_the_groups_only_and_are_compiled_once(eager):
    graphs, breaks = [], []

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model, results = blocks(3), []
        if not eager:
            for block in model[:3]:
                block.compile(backend="aot_eager", fullgraph=True)
        offload(model, layers=Block)
        for _ in range(3):
            counters.clear()
            results += train(model)
            graphs.append(counters["stats"]["unique_graphs"])
            breaks.append(sum(counters["graph_break"].values()))
        return results

    statistics = both(program).statistics()
    of_forward = 0 if eager else 2  # one where the input needs a gradient
    assert graphs == [of_forward + 1, 0, 0, of_forward + 1 + 1 + 3, 0, 0]  # of the head and of each block
    # At the head and at each block; in a compiled one at its first tensor and at the hook that notes its backward.
    # Dynamo counts some twice, as it also compiles the function that calls hooks.
    assert breaks[:3] == [0, 0, 0]
    assert 1 + 3 <= breaks[3] <= 2 * (1 + 3) + 3
    assert breaks[4:] == [0, 0]
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == 3 * 2 * STREAM
    assert statistics.reloaded_on_demand == 0


def test_reloaded_memory_is_freed_group_by_group_also_of_a_retained_graph(monkeypatch):
    reloaded: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    fetch = Pass.fetch

    def fetch_and_count(self: Pass, *arguments: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in reloaded))
        tensor = fetch(self, *arguments)
        reloaded.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Pass, "fetch", fetch_and_count)
    model = blocks(4)
    y = model(batch())
    y.square().sum().backward()
    wanted = gradients(model)
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        handle = actoffload.offload(model, layers=Block, min_bytes=64)
        y = model(batch())
        for last in (False, True):
            backward(y.square().sum(), retain_graph=not last)
            assert all(map(torch.equal, gradients(model), wanted))
    assert alive == 2 * 2 * [0, 1]
    del y
    nothing_held(handle)


def test_an_edit_in_place_of_an_offloaded_tensor_is_caught():
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        model = blocks(3)
        handle = actoffload.offload(model, layers=Block, min_bytes=64)
        y = model(x := batch() * torch.ones(1, requires_grad=True))
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(y.square().sum())
        assert handle.statistics().tensors_offloaded > 0
        del x, y
        nothing_held(handle)


def test_an_edit_in_place_of_a_kept_tensor_is_caught_also_between_two_backwards():
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        model = nn.Sequential(blocks(3), nn.Linear(WIDTH, 1), nn.Tanh(), nn.Tanh())
        handle = actoffload.offload(model, layers=Block, min_bytes=STREAM)  # what the last two save is smaller
        inside: list[Tensor] = []
        model[-2].register_forward_hook(lambda module, args, y: inside.extend((args[0], y)))
        y = model(batch())
        for loss, edited in ((torch.sum, False), (torch.mean, True)):  # compiled apart from each other
            if edited:
                with torch.no_grad():
                    inside[1].add_(1)  # backward comes to another one first
            with (
                compiled_autograd._enable(torch.compile(backend="eager")),
                pytest.raises(RuntimeError, match="modified by an inplace operation") if edited else nullcontext(),
            ):
                torch.autograd.grad(loss(y), inside[0], retain_graph=True)  # reaches no block
        inside.clear()
        del y
        nothing_held(handle)


def test_a_context_around_each_layer():
    model = blocks(3)

    def run(context: Any, sync: Any) -> list[Tensor]:
        x = batch() * 1.0
        for block in model:
            with context:
                x = block(x)
            x = sync(x)
        counters.clear()
        backward(x.square().sum())
        return gradients(model)

    wanted = run(*actoffload.get_cpu_offload_context())
    with min_elements(64):
        context, sync = make(1, 3)
        assert all(map(torch.equal, run(context, sync), wanted))
    assert 0 < sum(counters["graph_break"].values()) <= 5
    assert context.statistics().tensors_offloaded > 0
    nothing_held(context)


def test_without_the_names_of_torch_the_graph_breaks_at_each_tensor(monkeypatch):
    monkeypatch.setattr(compiling, "COMPILED_AUTOGRAD", "torch.no_such_module")

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = blocks(3)
        offload(model, layers=Block)
        return train(model)

    assert both(program).statistics().tensors_offloaded == 2
    assert sum(counters["graph_break"].values()) > 6


def test_tensors_made_of_tensors():
    class Tanhs(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = nn.Sequential(*[Tanhs(nn.Tanh(), nn.Tanh()) for _ in range(3)])
        offload(model, layers=Tanhs)
        x = Two(batch(), batch(1)).requires_grad_()
        y = model(x * 1.0)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(Two(torch.ones_like(batch()), torch.ones_like(batch())))
        assert isinstance(x.grad, Two)
        return [x.grad.a, x.grad.b]

    counters.clear()
    assert both(program).statistics().tensors_offloaded == 2 * 2
    assert counters["stats"]["unique_graphs"] == 1 + 4  # without offload; before, between and behind the groups
