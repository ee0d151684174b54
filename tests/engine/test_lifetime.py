"""Invariant 2: what autograd drops is given back at once, by reference counts alone."""

from __future__ import annotations

import contextlib
import random
import weakref

import pytest
import torch
from helpers import forward, make, make_manual, no_gc, nothing_held
from torch import nn

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def start():
    return torch.randn(64, 64, requires_grad=True) * 1.0


def model(layers: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(layers)]


def untouched(context) -> None:
    """Check that nothing of a context is installed any more."""
    assert not torch.nn.modules.module._global_forward_pre_hooks
    before = context.statistics()
    y = torch.sin(start())
    assert y.grad_fn._saved_self.shape == (64, 64)
    assert context.statistics() == before


def count(things: list[weakref.ref]) -> int:
    return sum(ref() is not None for ref in things)


def test_memory_is_freed_node_by_node():
    """The resident bytes fall while backward runs; nothing waits for its end."""
    context, sync = make(2, 6)
    levels = []
    layers = model(6)
    x = start()
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)
        x.register_hook(lambda g: levels.append(context.statistics().resident_bytes))
    full = context.statistics().resident_bytes
    x.sum().backward()
    # In layers. The outputs of layers 5 to 0 get their gradients in this order; layers 1 and 0 are reloaded into what
    # the backward of layers 5 and 4 has freed.
    assert levels == [k * (full // 4) for k in (4, 3, 3, 3, 2, 1)]


def test_looking_at_a_saved_tensor_outside_of_backward():
    context, sync = make(1, 3)
    x = start()
    y = forward([torch.sin, torch.relu, torch.relu], x, context, sync)
    node = y.grad_fn.next_functions[0][0].next_functions[0][0]
    assert node.name() == "SinBackward0"
    assert torch.equal(node._saved_self, x)
    y.sum().backward()
    del y, node
    nothing_held(context)


class ChaosError(Exception):
    """What a random abort raises."""


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        raise ChaosError("in backward")


@pytest.mark.parametrize("manual", [False, True])
def test_hundreds_of_steps_with_random_aborts(manual):
    rng = random.Random(7)
    layers = nn.ModuleList(model(5))
    context, sync, *controller = make_manual(5) if manual else make(3, 5)
    held_back = []
    completed = 0

    def step(kind: str, where: int) -> None:
        nonlocal completed
        x = start()
        for k, layer in enumerate(layers):
            with context:
                x = layer(x)
                if kind == "backward" and k == where:
                    x = Explode.apply(x)
                if kind == "forward" and k == where:
                    raise ChaosError("in forward")
            if kind == "before sync" and k == where:
                return
            x = sync(x)
            if manual and k < 3:
                controller[0].start_offload_layer(k)
                if rng.random() < 0.7:
                    controller[0].release_activation_forward_gpu_memory(k)
                    if rng.random() < 0.3:
                        controller[0].start_reload_layer(k)
            if kind == "early exit" and k == where:
                return
            if kind == "hook" and k == where:
                x.register_hook(lambda g: (_ for _ in ()).throw(ChaosError("in a hook")))
        if kind == "thrown away":
            return
        if kind == "held back":
            held_back.append(x)
            return
        x.sum().backward(retain_graph=kind == "retained")
        if kind == "retained":
            x.sum().backward()
        completed += 1

    kinds = ["fine", "forward", "backward", "hook", "before sync", "early exit", "thrown away", "retained", "held back"]
    with no_gc():
        for k in range(240):
            kind, where = rng.choice(kinds), rng.randrange(5)
            with contextlib.suppress(ChaosError):
                step(kind, where)
            if len(held_back) > 3:
                held_back.pop(rng.randrange(4)).sum().backward()
            if not held_back:
                nothing_held(context)
                untouched(context)
            if k == 120:
                held_back.clear()
                nothing_held(context)
                host = context.statistics().host_bytes
        held_back.clear()
        nothing_held(context)
        assert completed > 20
    untouched(context)
    assert context.statistics().host_bytes <= 2 * host
    # And the next step is right.
    layers.zero_grad()
    x = torch.randn(64, 64)
    y = nn.Sequential(*layers)(x)
    want = torch.autograd.grad(y.sum(), list(layers.parameters()))
    got = torch.autograd.grad(forward(list(layers), x, context, sync).sum(), list(layers.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
