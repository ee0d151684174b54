"""Handles that are lost, copied or outlived by their model, and models whose modules are replaced."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import nothing_held
from torch import nn
from whole_model import UNIT, Transformer, Waves, data, equal, nothing_installed, offload

import actoffload


def step(model, seed: int = 0) -> None:
    model(data(seed)).sum().backward()


def test_a_dropped_handle_is_found_again():
    model = Waves(6)
    offload(model, num_layers=3)
    found = actoffload.OffloadHandle.of(model)
    step(model)
    assert found.statistics().bytes_offloaded == 3 * 2 * UNIT
    assert len(found.report().offloaded_groups) == 3
    assert str(found).startswith("offload of Waves: 3 of 6 groups are offloaded")
    again = actoffload.OffloadHandle.of(model)
    again.remove()
    assert not found.installed
    assert actoffload.OffloadHandle.of(model) is None
    nothing_installed()
    found.remove()
    assert offload(model).installed


def test_the_handle_of_a_model_that_is_not_offloaded():
    model = Waves(6)
    assert actoffload.OffloadHandle.of(model) is None
    offload(model)
    assert actoffload.OffloadHandle.of(copy.deepcopy(model)) is None
    assert actoffload.OffloadHandle.of(model.blocks) is None


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_has_its_handle_is_copied_as_a_plain_one(way):
    model = Waves(6)
    model.handle = offload(model, num_layers=3, max_host_bytes=2**22)
    step(model)
    handle = way(model.handle)
    other = way(model)
    if way is not copy.copy:  # whose handle is that of the original
        handle = other.handle
    assert not handle.installed
    assert "(removed)" in str(handle)
    with pytest.raises(RuntimeError, match="nothing to report yet"):
        handle.report()
    with handle.paused():
        handle.remove()
    assert model.handle.installed
    step(other)
    assert model.handle.statistics().passes == 1 + (way is copy.copy)  # which shares the blocks


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
    name = "blocks.4.mlp" if change == "kept" else "blocks.1"
    with pytest.warns(UserWarning, match=f"module '{name}' has been replaced or deleted since offload") as caught:
        step(model)
    assert caught[0].filename == __file__  # where the model was called
    step(model)
    for each in (model, reference):
        each.zero_grad()
        step(each)
    equal([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    nothing_held(handle)
    handle.reset_statistics()
    step(model)
    assert handle.statistics().bytes_offloaded > 0


def test_a_removed_handle_raises():
    handle = offload(Waves(6))
    handle.remove()
    with pytest.raises(RuntimeError, match=r"This handle was removed, so it cannot .*: call offload again"):
        handle.recording().__enter__()


def test_two_handles_around_each_other_warn():
    model = Transformer(5)
    offload(model)
    whole = nn.Sequential(model)
    with (
        offload(whole, layers="0.blocks"),
        pytest.warns(UserWarning, match="forward of another offloaded model"),
    ):
        step(whole)


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_a_module_that_is_lost_before_the_first_forward(change):
    model = Transformer(6)
    offload(model)
    if change == "replace":
        model.blocks[1] = copy.deepcopy(Transformer(6).blocks[1])
    else:
        del model.blocks[1]
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"module 'blocks.1.*' has been replaced or deleted since offload"):
        step(model)
    step(reference)
    equal([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    step(model)


def test_a_part_of_a_model_that_nothing_refers_to():
    """As `offload(model[:3])`: the container is deleted at once, its children are not."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    handle = offload(model[:3])
    with pytest.warns(UserWarning, match="the module that was passed to offload has been deleted"):
        model(torch.randn(2, 8)).sum().backward()
    model(torch.randn(2, 8)).sum().backward()
    handle.remove()
