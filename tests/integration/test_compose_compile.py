"""Offload beside torch.compile: of each layer, of the whole model, before and after; compiled once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from composing import (
    BLOCKS,
    OFFLOADED,
    ROWS,
    STEPS,
    STREAM,
    WIDTH,
    Mlp,
    Net,
    Offload,
    batch,
    both,
    dropping,
    gradients,
    train,
)
from helpers import forward, make, nothing_held, plain
from torch import Tensor, nn
from torch._dynamo import compiled_autograd, lookup_backend
from whole_model import nothing_installed

import actoffload

# Dynamo's own, about deprecated parts of torch and about code that it leaves alone.
pytestmark = [
    pytest.mark.filterwarnings("ignore", "error::actoffload.HostMemoryWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]

Run = Callable[[Tensor], Tensor]


class Counting:
    """A backend of torch.compile that counts the graphs which it is given."""

    def __init__(self, inner: str = "aot_eager") -> None:
        self.graphs = 0
        self.inner = lookup_backend(inner)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.inner(graph, inputs)


def each(model: Net, backend: Any, **options: Any) -> Run:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, **options)
    return model


def replaced(model: Net, backend: Any, **options: Any) -> Run:
    for k, block in enumerate(model.blocks):
        model.blocks[k] = torch.compile(block, backend=backend, fullgraph=True, **options)
    return model


def whole(model: Net, backend: Any, **options: Any) -> Run:
    return torch.compile(model, backend=backend, **options)


def whole_in_place(model: Net, backend: Any, **options: Any) -> Run:
    model.compile(backend=backend, **options)
    return model


def by_a_function(model: Net, backend: Any, **options: Any) -> Run:
    return torch.compile(lambda x: model(x) * 1.0, backend=backend, **options)


WAYS = [each, replaced, whole, whole_in_place, by_a_function]


def compiled(offload: Offload, way: Any, first: str, backend: Any, recompute: Any = False, **options: Any) -> Any:
    """Compile a model and offload it, in one order or the other; return the model and what runs it."""
    torch._dynamo.reset()
    model = Net(dropping if way is each else Mlp)
    if first == "offloaded":
        offload(model, recompute=recompute)
    run = way(model, backend, **options)
    if first == "compiled":
        offload(model, recompute=recompute)
    return model, run


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("way", "first"), [(each, "offloaded"), *((way, ("compiled", "offloaded")[k % 2]) for k, way in enumerate(WAYS))]
)
def test_ways_to_compile(way, first):
    def program(offload: Offload) -> list[Tensor]:
        backend = Counting()
        model, run = compiled(offload, way, first, backend)
        results = train(run, 2, owner=model)
        graphs = backend.graphs
        assert graphs > 0
        results += train(run, 10, owner=model)  # more often than Dynamo compiles anything again before it gives up
        assert backend.graphs == graphs
        return results

    handle = both(program)
    assert len(handle.groups) == BLOCKS  # each block is followed once, not by its hooks and around its compiled call
    statistics = handle.statistics()
    assert statistics.passes == 12
    assert statistics.bytes_offloaded == statistics.bytes_reloaded > 12 * OFFLOADED * STREAM


@pytest.mark.usefixtures("offload_small_tensors")
@pytest.mark.parametrize("way", ["in place, as one graph", "functions that call them"])
def test_compiled_layers_in_a_context_are_compiled_once(way):
    model, backend = Net(Mlp, 3), Counting()
    layers = list(model.blocks)
    if way == "in place, as one graph":  # what Dynamo sees includes the hooks of the context
        each(model, backend)
    else:
        layers = [torch.compile(lambda x, block=block: block(x), backend=backend) for block in layers]
    context, sync = make(1, 3)

    def step(offloads: bool = True) -> list[Tensor]:
        y = forward(layers, batch(), context, sync) if offloads else plain(layers, batch())
        y.square().sum().backward()
        return gradients(model)

    want = step(False)
    step()
    graphs = backend.graphs
    for _ in range(10):  # more often than Dynamo compiles anything again before it gives up
        assert all(map(torch.equal, step(), want))
    assert backend.graphs == graphs > 0
    assert context.statistics().tensors_offloaded > 0


def test_offloading_the_compiled_model_itself():
    """The root may be what torch.compile returned."""

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = Net(Mlp)
        run = whole(model, "aot_eager")
        offload(run)
        return train(run, owner=model)

    assert both(program).statistics().passes == STEPS


@pytest.mark.parametrize("way", [whole, whole_in_place])
def test_a_model_that_ran_compiled_before(way):
    """Dynamo guards on the forwards of modules, so what it has compiled around the groups is compiled once more."""

    def program(offload: Offload) -> list[Tensor]:
        model, backend = Net(Mlp), Counting()
        run = way(model, backend)
        results = train(run, 1, owner=model)
        handle = offload(model)
        results += train(run, 2, owner=model)
        graphs = backend.graphs
        results += train(run, 2, owner=model)
        assert backend.graphs == graphs
        results += train(model, 1)
        if handle is not None:  # without offload, compiled code runs on as it is
            handle.remove()
        results += train(run, 1, owner=model)
        return results

    handle = both(program)
    assert handle.statistics().passes == 5
    assert handle.groups == tuple(f"blocks.{k}" for k in range(BLOCKS))


@pytest.mark.usefixtures("place")
@pytest.mark.filterwarnings("error:.*recompile_limit", "error:.*lru_cache", "error:.*Dynamo does not know")
@pytest.mark.parametrize(
    ("way", "first", "policy"),
    [
        *((way, "compiled", True) for way in (each, whole, by_a_function)),
        (replaced, "offloaded", True),
        (whole_in_place, "offloaded", [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
    ],
)
def test_compiled_groups_are_recomputed_as_they_were_compiled(way, first, policy):
    """As many graphs are compiled as with offloading alone: those of the groups, and none of what recomputes them."""

    def program(recompute: Any, offload: Offload) -> list[Tensor]:
        backend = Counting()
        model, run = compiled(offload, way, first, backend, recompute)
        results = train(run, 2, owner=model)
        graphs.append(backend.graphs)
        results += train(run, 3, owner=model)
        assert backend.graphs == graphs[-1]
        return results

    graphs: list[int] = []
    both(partial(program, False))
    handle = both(partial(program, policy))
    assert "Not recomputed" not in handle.plan.because
    assert sum(group.recomputed for group in handle.report().groups) == BLOCKS
    _, offloaded, _, recomputed = graphs
    assert recomputed == offloaded


class Normed(nn.Module):
    """Updates running statistics in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.norm(torch.sin(self.linear(x))))


@pytest.mark.usefixtures("place")
def test_compiled_code_that_updates_running_statistics_is_not_run_again():
    def program(offload: Offload) -> list[Tensor]:
        model = Net(Normed)
        each(model, Counting())
        offload(model, recompute=True)
        return train(model)

    assert "would update running statistics twice" in both(program).plan.because


def test_a_model_is_compiled_after_it_was_recomputed():
    """The eager calls saved outputs of operators; the compiled ones are recomputed whole, and eager ones as before."""

    def program(offload: Offload) -> list[Tensor]:
        model = Net(Mlp)
        offload(model, recompute=True)
        results = train(model, 3)
        results += train(torch.compile(model, backend="aot_eager"), 3, owner=model)
        return results + train(model, 2)

    assert "Not recomputed" not in both(program).plan.because


@pytest.mark.parametrize("first", ["compiled", "offloaded"])
@pytest.mark.parametrize("way", [whole, whole_in_place, by_a_function])
def test_one_graph_of_the_whole_model_is_refused_with_what_to_do(way, first):
    torch.manual_seed(0)
    model = Net(Mlp)
    wanted = train(model, 1)

    def offload() -> actoffload.OffloadHandle:
        with actoffload.device.use(actoffload.device.ReferenceDevice()):
            return actoffload.offload(model, layers="blocks.?", min_bytes=64)

    handle = offload() if first == "offloaded" else None
    run = way(model, "aot_eager", fullgraph=True)
    if first == "compiled":
        train(run, 1, owner=model)  # the single graph, which exists already, is no way around it
        handle = offload()
    assert handle is not None
    with pytest.raises(Exception, match="actoffload follows the chosen modules") as caught:
        run(batch())
    assert type(caught.value).__name__ == "Unsupported"
    assert "compile them one by one: for layer in layers: layer.compile(fullgraph=True)" in str(caught.value)
    nothing_installed()
    model._compiled_call_impl = None
    assert all(map(torch.equal, train(model, 1), wanted))
    assert handle.statistics().tensors_offloaded > 0


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("way", "first"), [(each, "offloaded"), (whole, "compiled")])
def test_changing_shapes(way, first):
    """Dynamic shapes are compiled once, and their symbolic sizes are not offloaded."""
    rows = (ROWS, 64, 80, 33, ROWS, 70)

    def program(offload: Offload) -> list[Tensor]:
        backend = Counting()
        model, run = compiled(offload, way, first, backend, dynamic=True)
        results, graphs = [], []
        for k, count in enumerate(rows):
            y = run(batch(k, count))
            y.square().sum().backward()
            results += [y.detach(), *gradients(model)]
            graphs.append(backend.graphs)
            del y
        assert graphs[-1] == graphs[1] > 0
        return results

    statistics = both(program).statistics()
    assert statistics.bytes_offloaded == statistics.bytes_reloaded > OFFLOADED * STREAM * sum(rows) // ROWS


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_backward_in_compiled_autograd_is_refused(fullgraph):
    model = Net(Mlp)
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        handle = actoffload.offload(model, min_bytes=64)
        y = model(batch())
        with (
            compiled_autograd._enable(torch.compile(backend="eager", fullgraph=fullgraph)),
            pytest.raises(Exception, match="cannot run in compiled autograd: set"),
        ):
            y.sum().backward()
        assert handle.statistics().tensors_offloaded > 0
        del y
        model(batch()).sum().backward()
        if not fullgraph:  # otherwise Dynamo keeps its error, whose frames have the tensors
            nothing_held(handle)
