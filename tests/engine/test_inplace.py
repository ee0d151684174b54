"""Invariant 8: a tensor that is changed after it was saved raises autograd's own error; nothing else does."""

from __future__ import annotations

import pytest
import torch
from helpers import forward, make, make_manual, min_elements, plain, same_bits
from torch import Tensor, nn

MODIFIED = "modified by an inplace operation"


pytestmark = pytest.mark.usefixtures("offload_small_tensors")


VIEWS = {
    "itself": lambda t: t,
    "transpose": lambda t: t.t(),
    "rows": lambda t: t[:32],
    "columns": lambda t: t[:, ::4],
}


def start() -> Tensor:
    return torch.randn(64, 64, requires_grad=True) * 1.0


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("where", "change"), [("offloaded", "the tensor"), ("resident", "a view"), ("kept", "another element")]
)
def test_changed_before_backward(view, where, change):
    held = torch.randn(64, 64)
    view_of = VIEWS[view]

    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, part):
            ctx.save_for_backward(part)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            (part,) = ctx.saved_tensors
            return grad * part.sum(), None

    def layer(x):
        return Part.apply(x, view_of(held))

    nothing = [torch.relu] * 3
    layers = [*nothing, layer] if where == "resident" else [layer, *nothing]
    with min_elements(64 * 64 + 1 if where == "kept" else 64):
        context, sync = make(2, 4)
        y = forward(layers, start(), context, sync)
    assert (context.statistics().bytes_offloaded > 0) == (where != "kept")
    with torch.no_grad():
        {"the tensor": held, "a view": held.t(), "another element": held[63:, 63:]}[change].add_(1.0)
    with pytest.raises(RuntimeError, match=MODIFIED) as caught:
        y.sum().backward()
    shape = ", ".join(map(str, view_of(held).shape))
    assert f"[torch.FloatTensor [{shape}]] is at version 1; expected version 0 instead" in str(caught.value)


def test_changed_between_two_backwards():
    held = torch.randn(64, 64)
    context, sync = make(1, 3)
    y = forward([lambda x: x * held, torch.relu, torch.relu], start(), context, sync)
    y.sum().backward(retain_graph=True)
    held.add_(1.0)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


class Scribble(torch.autograd.Function):
    """Changes what it saved in its backward, as no function should."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.save_for_backward(held)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors[0].mul_(3.0)
        return grad, None


@pytest.mark.parametrize("view", ["itself", "transpose"])
def test_a_backward_that_changes_what_others_saved(view):
    """The tensor has been reloaded when it is changed; the next user must hear of it, as without offload."""
    held = torch.randn(64, 64)

    def layer(x):
        return Scribble.apply(x * VIEWS[view](held), held)

    context, sync = make(1, 3)
    y = forward([layer, torch.relu, torch.relu], start(), context, sync)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


FINE = {
    "relu_": lambda x: torch.relu_(x * 2.0),
    "in place before saving": lambda x: torch.sin((x * 1.0).add_(1.0)),
    "on the result": lambda x: (x * torch.ones(64, 64)).mul_(torch.full((64, 64), 2.0)),
    "sigmoid_ then add": lambda x: torch.sigmoid_(x * 1.0) + 1.0,
    "on a copy": lambda x: torch.sin(x) + x.clone().add_(1.0),
    "masked_fill_": lambda x: torch.softmax((x * 1.0).masked_fill_(x > 1, 0.5), -1),
    "slice": lambda x: _slice(x),
    "dropout in place": lambda x: nn.functional.dropout(x * 1.0, 0.5, inplace=True),
}


def _slice(x: Tensor) -> Tensor:
    out = torch.zeros(64, 64)
    out[:32] = torch.sin(x[:32])
    out[32:] = torch.cos(x[32:])
    return out


@pytest.mark.parametrize("name", FINE)
def test_no_false_alarm(name):
    x = torch.randn(64, 64)
    grads = []
    for offload in (False, True):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        context, sync = make(2, 4)
        layers = [FINE[name]] * 4
        y = forward(layers, leaf * 1.0, context, sync) if offload else plain(layers, leaf * 1.0)
        y.square().sum().backward()
        grads.append(leaf.grad)
    assert same_bits(*grads)


def test_what_a_user_got_from_a_node_stays_his():
    """A saved tensor that was read, or that a second-order graph holds, outlives the release."""
    data = torch.randn(64, 64)
    layer = nn.Linear(64, 64)
    context, sync, controller = make_manual(2)
    with context:
        y = layer(data)
    y = sync(y)
    seen = y.grad_fn._saved_mat1
    (first,) = torch.autograd.grad(y.square().sum(), layer.weight, create_graph=True)
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    assert seen.shape == (64, 64)
    assert same_bits(seen, data)
    (second,) = torch.autograd.grad(first.sum(), layer.weight)
    assert second.shape == (64, 64)
