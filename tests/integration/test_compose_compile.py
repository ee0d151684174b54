"""Offload beside torch.compile: of each layer, of the whole model, before and after; compiled once."""

import types
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


@pytest.mark.parametrize("way", [whole, by_a_function])
def test_offloading_the_compiled_model_itself(way):
    """The root may be what torch.compile returned; a function has no modules, and is no root."""

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = Net(Mlp)
        run = way(model, "aot_eager")
        if isinstance(run, nn.Module):
            offload(run)
        else:
            with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
                actoffload.offload(run)
            offload(model)
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
        if handle is not None:  # without offload, compiled code runs on as it is
            handle.remove()
        results += train(run, 1, owner=model)
        return results

    assert both(program).statistics().passes == 4


@pytest.mark.usefixtures("place")
@pytest.mark.filterwarnings("error:.*recompile_limit", "error:.*lru_cache", "error:.*Dynamo does not know")
@pytest.mark.parametrize(
    ("way", "first", "policy"),
    [
        *((way, "compiled", True) for way in (each, whole, by_a_function)),
        *((way, "offloaded", True) for way in (replaced, whole_in_place)),
        *((way, "offloaded", [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]) for way in (each, whole)),
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
        return [*train(model), *model.buffers()]

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


@pytest.mark.parametrize("steps_before", [0, 1])
def test_calls_of_what_was_compiled_before_are_those_of_the_model(steps_before):
    """A Trainer compiles the model before its callbacks offload it."""
    torch.manual_seed(0)
    model = Net(Mlp)
    wanted = train(model, 2)
    run = torch.compile(model, backend="aot_eager")
    train(run, steps_before, owner=model)
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        handle = actoffload.offload(model, min_bytes=64)
    got = [train(called, 2, owner=model) for called in (run, model)]
    assert handle.statistics().passes == 4
    assert all(name.startswith("blocks.") and "part" not in name for name in handle.groups)
    assert handle.statistics().reloaded_on_demand == 0
    for results in got:
        assert all(map(torch.equal, results, wanted))
    handle.remove()
    assert type(run) is torch._dynamo.OptimizedModule


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
@pytest.mark.parametrize(("way", "first"), [(each, "offloaded"), (replaced, "compiled"), (whole, "offloaded")])
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


def kinds(count: int) -> list[type[nn.Module]]:
    """Return classes whose forwards are compiled apart from each other."""
    found = []
    for k in range(count):
        code = Mlp.forward.__code__.replace(co_name=f"forward{k}")
        forward = types.FunctionType(code, Mlp.forward.__globals__, closure=Mlp.forward.__closure__)
        found.append(type(f"Kind{k}", (Mlp,), {"forward": forward}))
    return found


def test_more_kinds_of_layers_than_dynamo_compiles_a_function_for():
    """The hooks are no functions that Dynamo compiles for each type of module, until it gives up."""
    count = torch._dynamo.config.recompile_limit + 1

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model, backend = Net(Mlp), Counting("eager")
        model.blocks = nn.ModuleList([kind() for kind in 2 * kinds(count)])
        offload(model, layers="blocks.*")
        each(model, backend)
        results = train(model)
        assert backend.graphs == count
        return results

    both(program)


def test_a_module_that_is_offloaded_no_more_runs_compiled_as_before():
    model = Net(Mlp)
    each(model, backend := Counting())
    calls = [block._compiled_call_impl for block in model.blocks]
    wanted = train(model)
    graphs = backend.graphs
    with (
        actoffload.device.use(actoffload.device.ReferenceDevice()),
        actoffload.offload(model, layers="blocks.?", min_bytes=64),
    ):
        assert all(map(torch.equal, train(model), wanted))
        assert backend.graphs == graphs
    assert [block._compiled_call_impl for block in model.blocks] == calls
    assert len(calls) == BLOCKS
    assert all(map(torch.equal, train(model), wanted))
    assert backend.graphs == graphs


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
