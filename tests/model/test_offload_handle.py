"""The handle: what it shows, how offloading is paused and ended, and handles that are lost, copied or outlived."""

import copy
import pickle

import pytest
import torch
from helpers import nothing_held
from torch import nn
from whole_model import UNIT, Transformer, Waves, data, equal, hooks, nothing_installed, offload, train

import actoffload


def step(model, seed: int = 0) -> None:
    model(data(seed)).sum().backward()


# What it shows


def test_print_of_several_kinds_with_kept_modules():
    handle = offload(Transformer(3), layers=["*.attention", "*.mlp"], keep=["head", "inp"])
    assert str(handle) == (
        "offload of Transformer: 4 of 6 groups are offloaded\n"
        "  *.attention: 2 of 3 offloaded\n"
        "    offloaded  blocks.0.attention, blocks.1.attention\n"
        "    kept       blocks.2.attention\n"
        "  *.mlp: 2 of 3 offloaded\n"
        "    offloaded  blocks.0.mlp, blocks.1.mlp\n"
        "    kept       blocks.2.mlp\n"
        "  keep: inp, head\n"
        "  Nothing is measured on a machine without an accelerator: all groups are offloaded but the last "
        "two and the last of each kind."
    )


def test_print_of_a_removed_or_paused_handle_and_of_one_that_offloads_nothing():
    handle = offload(Waves(6))
    assert repr(handle) == "<OffloadHandle of Waves: 4 of 6 groups>"
    with handle.paused():
        assert str(handle).startswith("offload of Waves (paused): 4 of 6")
    assert str(handle).startswith("offload of Waves: 4 of 6")
    handle.remove()
    assert str(handle).startswith("offload of Waves (removed): 4 of 6")
    assert repr(handle) == "<OffloadHandle of Waves: 4 of 6 groups, removed>"
    with pytest.raises(RuntimeError, match=r"This handle was removed, so it cannot .*: call offload again"):
        handle.recording().__enter__()
    assert str(offload(Waves(6), num_layers=0)) == (
        "offload of Waves: 0 of 6 groups are offloaded\n  layer: 0 of 6 offloaded\n    kept       blocks.0 ... 5"
    )


# Pausing and removing


def test_paused():
    model = Waves(6)
    reference = copy.deepcopy(model)
    handle = offload(model)
    assert handle.active
    assert handle.installed
    with handle.paused() as same:
        assert same is handle
        assert not handle.active
        assert handle.installed
        with handle.paused():
            equal(train(model), train(reference))
        equal(train(model), train(reference))
        assert handle.statistics() == offload(Waves(6)).statistics()
    assert handle.active
    equal(train(model), train(reference))
    assert handle.statistics().passes == 3


def test_remove_leaves_the_model_as_it_was():
    model = Transformer(6)
    model.blocks[1].register_forward_hook(lambda *_: None)
    before, state = hooks(model), list(model.state_dict())
    keys = [set(module.__dict__) for module in model.modules()]
    handle = offload(model, layers=["blocks.*", "*.mlp"], keep="*.norm1")
    classes = [type(module) for module in model.modules()]
    assert hooks(model) == before
    assert list(model.state_dict()) == state
    step(model)
    handle.remove()
    assert hooks(model) == before
    assert [set(module.__dict__) for module in model.modules()] == keys
    assert type(model) is Transformer
    assert [type(module).__name__ for module in model.modules()] == [kind.__name__ for kind in classes]
    nothing_installed()
    assert not handle.installed
    assert not handle.active
    with handle:
        handle.remove()
    assert handle.statistics().host_bytes == 0
    before = handle.statistics()
    step(model)
    assert handle.statistics() == before


# Lost, copied or outlived by its model, whose modules may be replaced


def test_a_dropped_handle_is_found_again():
    model = Waves(6)
    assert actoffload.OffloadHandle.of(model) is None
    offload(model, num_layers=3)
    found = actoffload.OffloadHandle.of(model)
    for other in (copy.deepcopy(model), model.blocks):
        assert actoffload.OffloadHandle.of(other) is None
    step(model)
    assert found.statistics().bytes_offloaded == 3 * 2 * UNIT
    assert found.report().totals.calls_offloaded == 3
    assert str(found).startswith("offload of Waves: 3 of 6 groups are offloaded")
    again = actoffload.OffloadHandle.of(model)
    again.remove()
    assert not found.installed
    assert actoffload.OffloadHandle.of(model) is None
    nothing_installed()
    found.remove()
    assert offload(model).installed


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_has_its_handle_is_copied_as_a_plain_one(way):
    model = Waves(6)
    model.handle = offload(model, num_layers=3, max_host_bytes=2**22)
    step(model)
    other = way(model)
    assert other.handle is None
    assert model.handle.installed
    step(other)
    assert model.handle.statistics().passes == 1


@pytest.mark.parametrize("change", ["replace", "delete", "kept"])
def test_a_deleted_module_is_reported_once_and_the_others_are_offloaded(change):
    model = Transformer(6)
    handle = offload(model, layers="blocks", keep="blocks.4.mlp")
    step(model)
    if change == "replace":
        model.blocks[1] = copy.deepcopy(Transformer(6).blocks[1])
    elif change == "delete":
        del model.blocks[1]
    else:
        model.blocks[4].mlp = copy.deepcopy(model.blocks[0].mlp)
    reference = copy.deepcopy(model)
    name = "blocks.4.mlp" if change == "kept" else r"blocks\.1.*"
    with pytest.warns(UserWarning, match=f"module '{name}' has been replaced or deleted since offload") as caught:
        step(model)
    assert caught[0].filename == __file__, "where the model was called"
    step(model)
    for each in (model, reference):
        each.zero_grad()
        step(each)
    equal([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    nothing_held(handle)
    handle.reset_statistics()
    step(model)
    assert handle.statistics().bytes_offloaded > 0


def test_a_part_of_a_model_that_nothing_refers_to():
    """As `offload(model[:3])`: the container is deleted at once, its children are not."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    handle = offload(model[:3])
    with pytest.warns(UserWarning, match="the module that was passed to offload has been deleted"):
        model(torch.randn(2, 8)).sum().backward()
    model(torch.randn(2, 8)).sum().backward()
    handle.remove()
