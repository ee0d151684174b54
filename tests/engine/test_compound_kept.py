"""Tensor subclasses that stay on the device: held themselves where autograd would do so, and never detached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import forward, make, no_gc, nothing_held, plain, same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from wrappers import Join, N, Split, Two, read, values

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class Layer(nn.Module):
    """Saves a transposed weight, a view of an activation, and what exp returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Two(values(), values()))

    def forward(self, x: Tensor) -> Tensor:
        return Join.apply((Split.apply(x).t() @ self.weight.t()).exp())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the operations that run the Python code of wrappers, and how many wrappers are built from their parts."""
    count: Counter[str] = Counter()
    dispatch, build = Two.__torch_dispatch__.__func__, Two.__tensor_unflatten__.__func__

    def dispatched(cls: Any, func: Any, *more: Any) -> Any:
        count[str(func)] += 1
        return dispatch(cls, func, *more)

    def built(cls: Any, *more: Any) -> Any:
        count["build"] += 1
        return build(cls, *more)

    monkeypatch.setattr(Two, "__torch_dispatch__", classmethod(dispatched))
    monkeypatch.setattr(Two, "__tensor_unflatten__", classmethod(built))
    return count


def step(layer: Layer, at: int, context: Any, sync: Any = lambda x: x) -> list[Tensor]:
    """Train a layer as the first or last of three; return its gradients."""
    x = torch.ones(N, N, requires_grad=True)
    layers: list[Any] = [torch.sin, torch.sin, torch.sin]
    layers[at] = layer
    forward(layers, x * 1.0, context, sync).sum().backward()
    got = layer.weight.grad
    layer.weight.grad = None
    return [x.grad, got.a, got.b]


@pytest.mark.parametrize(("at", "built"), [(0, 2), (2, 1)])
def test_hooks_run_no_operation_of_a_wrapper(counted: Counter[str], at: int, built: int) -> None:
    """No more than hooks that do nothing, for which autograd detaches what they return."""
    layer = Layer()
    counted.clear()
    wanted = step(layer, at, saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
    expected = Counter(counted)
    assert expected["aten.detach.default"]
    context, sync = make(1, 3)
    counted.clear()
    got = step(layer, at, context, sync)
    # What was offloaded is built from its parts.  Of what is kept, only what exp returns: it is an output of its node.
    assert counted.pop("build") == built
    assert counted == expected
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a, b)
    nothing_held(context)


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
    def layer(x: Tensor) -> Tensor:
        return Join.apply(SAVES[saves](Split.apply(x) * 1.0).clone())

    context, sync = make(1, 3)
    x = torch.ones(N, N, requires_grad=True)
    with no_gc():
        y = forward([torch.sin, torch.sin, layer], x * 1.0, context, sync)
        assert context.statistics().resident_bytes > 0
        del y
        nothing_held(context)


def test_a_graph_that_is_differentiated_twice_and_retained() -> None:
    weight = nn.Parameter(Two(values(), values()))

    def layer(x: Tensor) -> Tensor:
        h = weight * 1.0
        return x * Join.apply(h.t() * h.t())

    def gradients(y: Tensor) -> list[Any]:
        (first,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
        return [
            first,
            *(torch.autograd.grad(each.sum(), weight, retain_graph=True)[0] for each in (Join.apply(first), y)),
        ]

    x = torch.ones(N, N, requires_grad=True)
    layers = [torch.sin, torch.sin, layer]
    wanted = gradients(plain(layers, x * 1.0))
    context, sync = make(1, 3)
    got = gradients(forward(layers, x * 1.0, context, sync))
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(read(a), read(b))
    del a, b, got
    nothing_held(context)
