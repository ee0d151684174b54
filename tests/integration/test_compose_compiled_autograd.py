"""Offload beside compiled autograd: few graphs, equal bits, in-place edits caught, and memory that is given back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from composing import STREAM, Mlp, Offload, batch, both, gradients
from helpers import any_size, make, nothing_held
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import actoffload
from actoffload import _torch
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
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward(**options)


def blocks(count: int) -> nn.Sequential:
    """Return a model of small blocks, of which all but the last two are offloaded."""
    return nn.Sequential(*[Mlp() for _ in range(count)])


def train(model: nn.Module) -> list[Tensor]:
    """Run one step; return the output and the gradients."""
    y = model(batch())
    backward(y.square().sum())
    return [y.detach(), *gradients(model)]


@pytest.mark.parametrize("eager", [True, False])
def test_graphs_break_at_the_groups_only_and_are_compiled_once(eager):
    graphs, breaks, at_unpack = [], [], []

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model, results = blocks(4), []
        if not eager:
            for block in model:
                block.compile(backend="aot_eager", fullgraph=True)
        offload(model, layers="?")
        for _ in range(3):
            counters.clear()
            results += train(model)
            graphs.append(counters["stats"]["unique_graphs"])
            breaks.append(sum(counters["graph_break"].values()))
            at_unpack.append(sum(n for text, n in counters["graph_break"].items() if "_graph_break" in text))
        return results

    statistics = both(program).statistics()
    of_forward = 0 if eager else 2  # one where the input needs a gradient
    assert graphs == [of_forward + 1, 0, 0, of_forward + 1 + 4, 0, 0]
    assert breaks[:3] == [0, 0, 0]
    # A compiled block unpacks before the hook that notes that its backward has begun.
    assert at_unpack[3:] == [0 if eager else 4, 0, 0]
    assert 4 <= breaks[3] <= 4 + at_unpack[3] + 2
    assert breaks[4:] == [0, 0]
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == 3 * 2 * (2 * STREAM)
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
        handle = actoffload.offload(model, layers="?", min_bytes=64)
        y = model(batch())
        for last in (False, True):
            backward(y.square().sum(), retain_graph=not last)
            assert all(map(torch.equal, gradients(model), wanted))
    assert alive == 2 * 2 * [0, 1, 2]
    del y
    nothing_held(handle)


@pytest.mark.parametrize("edited", ["kept", "offloaded"])
def test_an_edit_in_place_is_caught_also_after_a_backward_that_raised(edited):
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        model = blocks(3)
        handle = actoffload.offload(model, layers="?", min_bytes=64)
        saved: list[Tensor] = []
        model[2 if edited == "kept" else 0].up.register_forward_hook(lambda module, args, y: saved.append(args[0]))
        y = model(batch() * torch.ones(1, requires_grad=True))

        def interrupt(gradient: Tensor) -> None:
            raise KeyboardInterrupt

        hook = model[0].up.weight.register_hook(torch.compiler.disable(interrupt))
        with pytest.raises(KeyboardInterrupt):
            backward(y.square().sum(), retain_graph=True)
        hook.remove()
        with torch.no_grad():
            saved.pop().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(y.square().sum())
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
    with any_size(64):
        context, sync = make(1, 3)
        assert all(map(torch.equal, run(context, sync), wanted))
    assert 0 < sum(counters["graph_break"].values()) <= 5
    assert context.statistics().tensors_offloaded > 0
    nothing_held(context)


def test_without_the_names_of_torch_the_graph_breaks_at_each_tensor(monkeypatch):
    monkeypatch.setattr(_torch, "COMPILED_AUTOGRAD", "torch.no_such_module")

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = blocks(3)
        offload(model, layers="?")
        return train(model)

    assert both(program).statistics().tensors_offloaded == 2
    assert sum(counters["graph_break"].values()) > 6
