"""Modules are followed by their instance, so that what programs do with classes and forwards comes out as without."""

import copy
import inspect
import io
import types
import typing
from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from whole_model import UNIT, Wave, Waves, data, equal, measured, moved, offload, train

# Graphs of torch.fx


class Sine(Wave):
    """Without annotations, which pickled graphs cannot have as strings."""

    def forward(self, x):
        return torch.sin(x * self.scale)


class Sines(Waves):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Tracer(fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Wave)


def graphs():
    """Return a `GraphModule` with blocks, and a model with blocks of this kind."""
    whole = fx.GraphModule(model := Sines(6, Sine), Tracer().trace(model))
    parts = Waves(6, Sine)
    for k, block in enumerate(parts.blocks):
        parts.blocks[k] = fx.symbolic_trace(block)
    return {"the model": whole, "blocks": parts}


def compile_graphs(model):
    for module in model.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()


@pytest.mark.parametrize("which", ["the model", "blocks"])
@pytest.mark.parametrize("how", [compile_graphs, copy.deepcopy, lambda model: torch.save(model, io.BytesIO())])
def test_a_graph_that_is_compiled_again(which, how):
    model = graphs()[which]
    want = train(copy.deepcopy(model))
    handle = offload(model, layers="blocks.?")
    before = moved(handle, model)
    assert before > 0
    how(model)
    assert moved(handle, model) == before
    model.zero_grad()
    equal(train(model), want)


@pytest.mark.parametrize("which", ["the model", "blocks"])
def test_a_graph_that_is_edited_runs_edited_also_after_removal(which):
    model = graphs()[which]
    edited = model if which == "the model" else model.blocks[2]
    handle = offload(model, layers="blocks.?")
    before = model(data())

    (output,) = (node for node in edited.graph.nodes if node.op == "output")
    with edited.graph.inserting_before(output):
        output.args = (edited.graph.call_function(torch.neg, output.args),)
    edited.recompile()
    after = model(data())
    assert not torch.equal(before, after)
    handle.remove()
    assert torch.equal(model(data()), after)


# Calls of forward


def test_blocks_whose_forward_is_called_are_offloaded():
    class Direct(Waves):
        def forward(self, x):
            for block in self.blocks:
                x = block.forward(x)
            return x

    model = Direct(6)
    want = train(copy.deepcopy(model))
    handle = offload(model, layers="blocks")
    assert moved(handle, model) == moved(handle, model.forward) == 8 * UNIT
    model.zero_grad()
    equal(train(model), want)


def test_a_forward_has_the_signature_of_the_class():
    class Named(Waves):
        def forward(self, x: torch.Tensor, *, labels: int | None = None) -> torch.Tensor:
            """Return the output."""
            return super().forward(x)

    model = Named(6)
    want = inspect.signature(model.forward), typing.get_type_hints(model.forward), inspect.getfullargspec(model.forward)
    offload(model)
    got = inspect.signature(model.forward), typing.get_type_hints(model.forward), inspect.getfullargspec(model.forward)
    assert got[:2] == want[:2]
    assert got[2].kwonlyargs == want[2].kwonlyargs
    assert got[2].args[1:] == want[2].args[1:]
    assert model.forward.__doc__ == "Return the output."


# Forwards that programs set


def twice(module, before):
    return lambda x: before(x) * 2.0


def without(module, before):
    return types.MethodType(lambda self, x: type(self).forward(self, x) * 2.0, module)


@pytest.mark.parametrize("patch", [twice, without])
def test_a_forward_that_was_set_before(patch):
    model = Waves(6)
    for block in model.blocks:
        block.forward = patch(block, block.forward)
    patched = [block.forward for block in model.blocks]
    y = model(data())
    handle = offload(model, layers="blocks")
    assert moved(handle, model) > 0
    assert torch.equal(model(data()), y)
    handle.remove()
    assert [vars(block)["forward"] for block in model.blocks] == patched


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize("patch", [twice, without])
def test_a_forward_that_is_set_later(patch):
    """The module is followed on if it calls ours; if not, a warning says so, and it is followed again later."""
    model = Waves(6)
    handle = offload(model, layers="blocks")
    before, y = moved(handle, model), model(data())
    block = model.blocks[1]
    block.forward = patch(block, block.forward)
    lost = pytest.warns(UserWarning, match=r"forward of the module 'blocks\.1' has been replaced .* not offloaded")
    with lost if patch is without else nullcontext():
        assert not torch.equal(y, y := model(data()))
    assert (moved(handle, model) == before) is (patch is twice)
    handle.remove()
    assert torch.equal(model(data()), y)
    assert moved(offload(model, layers="blocks"), model) == before


def test_hooks_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")
    model = Waves(6)
    want = train(copy.deepcopy(model))
    handle = offload(model, layers="blocks")
    before = moved(handle, model)
    for block in model.blocks:
        hooks.add_hook_to_module(block, hooks.ModelHook())
    assert moved(handle, model) == before
    copied = copy.deepcopy(model)
    copied.zero_grad()
    assert measured(handle, lambda: equal(train(copied), want)).bytes_offloaded == 0
    for block in model.blocks:
        hooks.remove_hook_from_module(block)
    assert moved(handle, model) == before


# Copies


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2.0


def test_mixed_precision_of_accelerate_after_offload():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests choose another precision
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    plain = Waves(6)
    model = copy.deepcopy(plain)
    want = train(accelerator.prepare(plain))
    with offload(model, recompute=False) as handle:
        prepared = accelerator.prepare(model)
        equal(train(prepared), want)
        assert moved(handle, prepared) > 0
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("first", ["parametrized", "offloaded"])
def test_copies_of_parametrized_modules_follow_nothing(first):
    model = Waves(6)

    def register():
        for block in model.blocks:
            parametrize.register_parametrization(block, "scale", Doubled())

    if first == "parametrized":
        register()
    handle = offload(model, layers="blocks")
    if first == "offloaded":
        register()
    before = moved(handle, model)
    assert before > 0
    copied = copy.deepcopy(copy.deepcopy(model))
    handle.reset_statistics()
    want = model(data())
    with torch.no_grad():
        for block in copied.blocks:
            block.parametrizations.scale.original.zero_()
    assert not torch.equal(copied(data()), want)  # runs with its own parameters
    assert torch.equal(model(data()), want)
    mine = offload(copied, layers="blocks")
    assert moved(mine, copied) == before
    assert moved(handle, copied) == 0
