"""Tensors made of several that are changed in place, which autograd catches (invariant 8), or stay on the device.

An in-place operation on a wrapper is counted on the wrapper, and not on its parts, so each check must know both.
"""

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from helpers import forward, make, min_elements, no_gc, nothing_held, same_bits
from torch import Tensor, nn
from wrappers import Join, N, Split, Two, Uses, read, values

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
def test_a_wrapper_that_was_changed_raises(edit, layer):
    """In a layer that leaves, and in one that stays."""
    context, sync = make(1, 3)
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


@pytest.mark.parametrize(
    ("again", "kind"),
    [("the same", "wrapper"), *product(("a view", "another function"), ("wrapper", "plain"))],
)
def test_what_backward_changes_raises_for_the_next(again, kind):
    """It has been reloaded when it is changed; the next user must hear of it, as without offload."""
    context, sync = make(1, 3)
    things = [values() if kind == "plain" else Two(values(), values())]
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


# Subclasses that stay on the device


class View(torch.autograd.Function):
    """Returns a view, and saves it."""

    @staticmethod
    def forward(ctx, two):
        view = two.t()
        ctx.save_for_backward(view)
        return view

    @staticmethod
    def backward(ctx, grad):
        (view,) = ctx.saved_tensors
        return (grad * view).t()


def edited(two: Tensor) -> Tensor:
    two.t().exp_()
    return two


SAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "a view as an input": lambda two: two.t().sin(),
    "a view of a leaf as an input": lambda two: two * nn.Parameter(Two(values(), values())).t(),
    "an output": lambda two: two.exp(),
    "a view that was edited in place as an output": edited,
    "a view as an output of a function": View.apply,
}


@pytest.mark.parametrize("saves", SAVES)
def test_what_is_held_makes_no_cycle(saves: str) -> None:
    results: list[weakref.ref[Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        result = SAVES[saves](Split.apply(x) * 1.0)
        results.append(weakref.ref(result))
        return Join.apply(result.clone())

    context, sync = make(1, 3)
    x = torch.ones(N, N, requires_grad=True)
    with no_gc(), min_elements(1 << 30):  # a wrapper whose parts all stay is held as it is
        y = forward([torch.sin, torch.sin, layer], x * 1.0, context, sync)
        del y
        assert results[0]() is None
