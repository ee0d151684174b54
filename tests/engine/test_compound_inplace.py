"""Invariant 8 for tensors made of several: what autograd catches without offloading is caught with it.

An in-place operation on a wrapper is counted on the wrapper, and not on its parts, so each check must know both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import forward, make, nothing_held, same_bits
from torch import Tensor
from wrappers import Join, N, Split, Two, Uses, read, values

import actoffload

MODIFIED = "modified by an inplace operation"


pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def two_more(x: Tensor, context: Any, sync: Any) -> Tensor:
    """Run the two kept layers after an offloaded one."""
    return forward([torch.sin, torch.cos], x, context, sync)


EDITS = {
    "the wrapper": lambda two: two.add_(1),
    "a view of it": lambda two: two[1].mul_(2),
    "its transpose": lambda two: two.t().zero_(),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_a_wrapper_that_was_changed_raises(edit, layer, offload):
    """In a layer that leaves, and in one that stays."""
    context, sync = make(1, 3) if offload else actoffload.get_cpu_offload_context()
    x = torch.ones(N, N, requires_grad=True) * 1.0
    for k in range(3):
        with context:
            h = Split.apply(x)
            x = Join.apply(h.sin())
            if k == layer:
                with torch.no_grad():
                    EDITS[edit](h)
        x = sync(x)
        del h
    with pytest.raises(RuntimeError, match=MODIFIED):
        x.sum().backward()
    del x
    if offload:
        nothing_held(context)


def test_a_part_that_was_changed_raises_if_it_left():
    """Autograd would use the new values, unseen; what left cannot follow."""
    two = Two(values(), values())
    context, sync = make(1, 3)
    x = torch.ones(N, N, requires_grad=True)
    with context:
        y = Uses.apply(x, [], two)
    two.b.add_(1)
    y = two_more(sync(y), context, sync)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()
    del y
    nothing_held(context)


class Spoils(torch.autograd.Function):
    """Changes in backward what it saved."""

    @staticmethod
    def forward(ctx, x, two):
        ctx.save_for_backward(two)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (two,) = ctx.saved_tensors
        grad = grad * read(two)
        two.mul_(2)
        return grad, None


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("again", ["the same", "a view", "another function"])
def test_what_backward_changes_raises_for_the_next(offload, again):
    context, sync = make(1, 3) if offload else actoffload.get_cpu_offload_context()
    things = [Two(values(), values())]
    leaf = torch.ones(N, N, requires_grad=True)
    with context:
        x = leaf * 1.0
        if again == "a view":
            x = Uses.apply(x, [], things[0].t())
        elif again == "another function":
            x = Uses.apply(x, [], things[0])
        x = Spoils.apply(x, things.pop())
    x = two_more(sync(x), context, sync)
    with pytest.raises(RuntimeError, match=MODIFIED):  # noqa: PT012
        x.sum().backward(retain_graph=again == "the same")
        x.sum().backward()
    del x
    if offload:
        nothing_held(context)


def two_saves(first: Any, change: Any, second: Any) -> tuple[Tensor, Any]:
    """Save something, change it, and save something else on the same memory; return the second's gradient.

    The graph of the first never runs backward, which would raise; but what it saved is there until the end.
    """
    context, sync = make(1, 3)
    leaf = torch.ones(N, N, requires_grad=True)
    with context:
        x = leaf * 1.0
        dropped = Uses.apply(x, [], first)
        change()
        y = Uses.apply(x, [], second())
    z = two_more(sync(y), context, sync)
    (grad,) = torch.autograd.grad(y, leaf, torch.ones(N, N))
    del dropped, x, y, z
    nothing_held(context)
    return grad, context.statistics()


def test_a_copy_made_before_a_change_is_not_used_after_it():
    two = Two(values(), values())
    nest = Two(two, Two(two.b, two.a))
    cases = [
        (two, lambda: two.add_(1), lambda: two),
        (two, lambda: two.add_(1), lambda: two.t()),
        (two.t(), lambda: two.add_(1), lambda: two),
        (two, lambda: two.t().add_(1), lambda: Two(two.a, two.b)),
        (two, lambda: two.add_(1), lambda: two.b),
        (two.a, lambda: two.add_(1), lambda: two),
        (two.a, lambda: two.a.add_(1), lambda: two),
        (Two(two.a, two.b), lambda: two.add_(1), lambda: two),
        (nest, lambda: two.add_(1), lambda: two),
        (nest, lambda: nest.add_(1), lambda: two),
        (nest, lambda: nest.add_(1), lambda: two.a),
    ]
    for first, change, second in cases:
        grad, _ = two_saves(first, change, second)
        assert same_bits(grad, read(second()))
