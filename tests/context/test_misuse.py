"""Invariant 10: misuse is named, in one sentence that says what to do; and what still works afterwards."""

from __future__ import annotations

import pytest
import torch
from helpers import forward, make, make_manual, nothing_held
from torch import nn

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


@pytest.fixture
def layers():
    return [nn.Linear(64, 64) for _ in range(4)]


def start():
    return torch.randn(64, 64, requires_grad=True) * 1.0


def step(layers, context, sync):
    """One step that must be all right."""
    before = context.statistics()
    forward(layers, start(), context, sync).sum().backward()
    after = context.statistics()
    assert after.passes == before.passes + 1
    assert after.tensors_offloaded == before.tensors_offloaded + 2
    nothing_held(context)


def inside(context, call):
    with context:
        call()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda context, sync: inside(context, context.__enter__), r"entered twice: leave .* do not nest"),
        (lambda context, sync: inside(context, context.new_pass), "inside the offloading context; leave the context"),
        (lambda context, sync: inside(context, lambda: sync(start().sin())), "inside the offloading context: leave"),
        (lambda context, sync: sync(start()), "called before any layer ran: use `with context"),
    ],
)
def test_calls_in_a_wrong_place(layers, wrong, says):
    context, sync = make(2, 4)
    with pytest.raises(RuntimeError, match=says):
        wrong(context, sync)
    step(layers, context, sync)


def test_sync_twice(layers):
    context, sync = make(2, 4)
    with context:
        y = layers[0](start())
    y = sync(y)
    with pytest.raises(RuntimeError, match=r"called twice for layer 0: call it once .* in a tuple"):
        sync(y)
    del y
    step(layers, context, sync)


def test_an_unsynchronized_layer(layers):
    context, sync = make(2, 4)
    with context:
        y = layers[0](start())
    with pytest.raises(RuntimeError, match=r"Layer 0 was left without .* call sync_function\(output\)"), context:
        pass
    y = sync(y)  # it can be made up for
    for layer in layers[1:]:
        with context:
            y = layer(y)
        y = sync(y)
    y.sum().backward()
    assert context.statistics().passes == 1
    del y
    step(layers, context, sync)


def test_an_unsynchronized_layer_whose_graph_is_gone(layers):
    context, sync = make(2, 4)
    with context:
        layers[0](start())
    step(layers, context, sync)


def test_left_without_being_entered(layers):
    context, sync = make(2, 4)
    with pytest.raises(RuntimeError, match="left but was not entered; use it as `with context:`"):
        context.__exit__(None, None, None)
    step(layers, context, sync)
    with pytest.raises(RuntimeError, match="left but was not entered"):
        context.__exit__(None, None, None)
    step(layers, context, sync)


def test_more_entries_than_layers_begin_a_new_pass(layers):
    context, sync = make(2, 4)
    y = forward(layers + layers + layers[:1], start(), context, sync)
    assert context.statistics().passes == 3
    y.sum().backward()
    del y
    context.reset_statistics()
    nothing_held(context)


MANUAL = {
    "start_offload_layer": "call it once, after the layer's context was left and before",
    "release_activation_forward_gpu_memory": "call it once, after start_offload_layer",
    "start_reload_layer": "call it once, after release_activation_forward_gpu_memory",
}


@pytest.mark.parametrize("call", MANUAL)
@pytest.mark.parametrize("layer_id", [-1, 4, 100, None, "0", 1.0, 1.5, True])
def test_wrong_layer_ids(layers, call, layer_id):
    context, sync, controller = make_manual(4)
    forward(layers, start(), context, sync)
    with pytest.raises(ValueError, match=rf"{call}\(.*\): there is no such layer; .* from 0 to 3"):
        getattr(controller, call)(layer_id)


@pytest.mark.parametrize("call", MANUAL)
def test_manual_before_any_layer_ran(layers, call):
    context, sync, controller = make_manual(4)
    with pytest.raises(RuntimeError, match=rf"{call}\(1\): layer 1 has not run in this pass; .* forward"):
        getattr(controller, call)(1)
    with context:
        x = layers[0](start())
    sync(x)
    with pytest.raises(RuntimeError, match="layer 1 has not run"):
        getattr(controller, call)(1)


@pytest.mark.parametrize(
    ("done", "wrong", "says"),
    [
        ((), "release_activation_forward_gpu_memory", "has its activations on the device"),
        ((), "start_reload_layer", "has its activations on the device"),
        ((0,), "start_offload_layer", "is already being offloaded"),
        ((0,), "start_reload_layer", "is already being offloaded"),
        ((0, 1), "start_offload_layer", "is on the host"),
        ((0, 1), "release_activation_forward_gpu_memory", "is on the host"),
        ((0, 1, 2), "start_offload_layer", "is already being reloaded"),
        ((0, 1, 2), "release_activation_forward_gpu_memory", "is already being reloaded"),
        ((0, 1, 2), "start_reload_layer", "is already being reloaded"),
    ],
)
def test_manual_order(layers, done, wrong, says):
    context, sync, controller = make_manual(4)
    y = forward(layers, start(), context, sync)
    for k in done:
        getattr(controller, list(MANUAL)[k])(0)
    with pytest.raises(RuntimeError, match=rf"{wrong}\(0\): layer 0 {says}; {MANUAL[wrong]}"):
        getattr(controller, wrong)(0)
    y.sum().backward()  # and nothing is broken
    del y
    nothing_held(context)


def test_manual_inside_the_layer(layers):
    context, _, controller = make_manual(4)
    with context:
        layers[0](start())
        with pytest.raises(RuntimeError, match="layer 0 is still in its forward; call it once, after"):
            controller.start_offload_layer(0)
