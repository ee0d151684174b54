"""Passes: several in flight, in any order; steps that are cut short; and forwards without gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import forward, make, make_manual, nothing_held, plain, same_bits
from torch import nn

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


@pytest.fixture
def layers():
    torch.manual_seed(5)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)])


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def gradients(layers, loss):
    return torch.autograd.grad(loss, list(layers.parameters()))


def check(layers, seed, loss):
    want = gradients(layers, plain(list(layers), data(seed)).square().sum())
    got = gradients(layers, loss)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_forwards_then_their_backwards_in_any_order(layers, order):
    context, sync = make(3, 5)
    losses = {k: forward(list(layers), data(k), context, sync).square().sum() for k in range(3)}
    held = context.statistics().resident_bytes
    for k in order:
        check(layers, k, losses.pop(k))
        now = context.statistics().resident_bytes
        assert now < held
        held = now
    statistics = context.statistics()
    assert statistics.passes == 3
    assert statistics.reloaded_on_demand == 0
    # The output of the last layer that leaves is the input of one that stays: copied, and never released.
    assert statistics.bytes_reloaded == statistics.bytes_offloaded - 3 * 64 * 64 * 4 > 0
    nothing_held(context)


def test_no_grad_saves_nothing_and_layers_follow_each_other(layers):
    """With a change between the layers no output of ours lives on; the numbers of the layers go on all the same."""
    context, sync = make(3, 5)
    with torch.no_grad():
        for _ in range(3):
            x = data()
            for k, layer in enumerate(layers):
                with context:
                    x = layer(x)
                    assert len(context.current_pass.layers) == k + 1
                x = sync(x) * 1.5
    statistics = context.statistics()
    assert (statistics.passes, statistics.tensors_saved) == (3, 0)


@pytest.mark.parametrize("change", [lambda x: x * 1.5, lambda x: x.detach().requires_grad_(), torch.sin])
def test_a_change_between_layers_with_gradients(layers, change):
    context, sync = make(3, 5)
    x = data()
    kept = []
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
            assert len(context.current_pass.layers) == k + 1
        kept.append(sync(x))
        x = change(kept[-1])
    assert context.statistics().passes == 1


def test_layers_that_save_nothing_and_need_no_gradient_follow_each_other(layers):
    """A frozen front on data that needs no gradient has no graph to go by, though gradients are on."""
    layers[:3].requires_grad_(False)
    context, sync = make(3, 5)
    x = data()
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
            assert len(context.current_pass.layers) == k + 1
        x = sync(x) * 1.5
    x.sum().backward()
    assert context.statistics().passes == 1


def test_new_pass(layers):
    context, sync = make(3, 5)
    held = forward(list(layers)[:2], data(1), context, sync)
    context.new_pass()
    loss = forward(list(layers), data(0), context, sync).square().sum()
    assert context.statistics().passes == 2
    check(layers, 0, loss)
    held.sum().backward()


def test_a_loss_between_the_layers_with_its_own_backward(layers):
    """Its backward ends the pass; the layers behind it begin another one, and all gradients are right."""
    context, sync = make(3, 5)
    x = data()
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
        x = sync(x)
        if k == 2:
            x.square().sum().backward(retain_graph=True)
    x.square().sum().backward()
    got = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    y = plain(list(layers)[:3], data())
    y.square().sum().backward(retain_graph=True)
    plain(list(layers)[3:], y).square().sum().backward()
    assert all(same_bits(a, p.grad) for a, p in zip(got, layers.parameters(), strict=True))


def test_manual_names_an_earlier_pass(layers):
    context, sync, controller = make_manual(5)
    first_loss = forward(list(layers), data(0), context, sync).square().sum()
    first = context.current_pass
    second_loss = forward(list(layers), data(1), context, sync).square().sum()
    assert context.current_pass is not first
    for call in ("start_offload_layer", "release_activation_forward_gpu_memory", "start_reload_layer"):
        getattr(controller, call)(0, in_pass=first)
    with pytest.raises(RuntimeError, match="has its activations on the device"):
        controller.release_activation_forward_gpu_memory(0)
    assert context.statistics().reloaded_ahead > 0
    check(layers, 1, second_loss)
    check(layers, 0, first_loss)
    assert context.statistics().reloaded_on_demand == 0


def test_a_gradient_from_the_middle_brings_nothing_back_ahead():
    """The layers behind still hold their memory, so there is no room to let others in."""
    context, sync = make(2, 5)
    x, outputs = torch.randn(64, 64) * 1.0, []
    layers = [nn.Linear(64, 64) for _ in range(5)]
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)
        outputs.append(x)
    before = context.statistics()
    torch.autograd.grad(outputs[2].sum(), layers[2].weight, retain_graph=True)
    after = context.statistics()
    assert (after.reloaded_ahead, after.reloaded_on_demand) == (0, 0)
    assert after.peak_resident_bytes == before.peak_resident_bytes
    x.sum().backward()
    assert context.statistics().reloaded_ahead == 2
