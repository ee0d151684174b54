"""`Checkpoint` by itself: each program has the bits of the same program that saves everything."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from actoffload import offload
from actoffload.recompute.checkpoint import Checkpoint

WIDTH = 8


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]


def inputs() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def checkpointed(function: Callable[..., Any], *tensors: Tensor) -> Any:
    kept = Checkpoint(function, tensors)
    with kept.hooks():
        return function(*tensors)


def directly(function: Callable[..., Any], *tensors: Tensor) -> Any:
    return function(*tensors)


def alike(program: Callable[[Callable[..., Any]], list[Tensor]]) -> None:
    """Check that a program gets the same bits with checkpointing and without."""
    for one, other in zip(program(checkpointed), program(directly), strict=True):
        assert torch.equal(one, other)


def product(matrices: list[Tensor], x: Tensor) -> Tensor:
    for matrix in matrices:
        x = torch.sigmoid(x @ matrix)
    return x


class Counter(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator.name() == self.name
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("draws", [False, True], ids=["deterministic", "dropout"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("outside", [False, True], ids=["backward inside", "backward outside"])
def test_gradients(draws, autocast, outside):
    def program(call):
        matrices, x = weights(), inputs()
        torch.manual_seed(2)

        def function(x):
            return F.dropout(product(matrices, x), 0.5 if draws else 0.0)

        cast = torch.autocast("cpu", torch.bfloat16)
        with cast if autocast else nullcontext():
            y = call(function, x)
            if not outside:
                y.sum().backward()
        with nullcontext() if autocast else cast:  # autocast of a backward is that of its forward
            if outside:
                y.sum().backward()
        after = torch.rand(3)  # the generator goes on as if nothing had been drawn again
        return [x.grad, after, *(of.grad for of in matrices)]

    alike(program)


def test_it_runs_again_once_and_only_as_far_as_it_has_to():
    matrices, x = weights(), inputs()

    def function(x):
        return (
            product(matrices, x) + x @ matrices[0].detach()
        )  # nothing is saved behind the sigmoid but the last matrix

    y = checkpointed(function, x)
    with Counter("aten::mm") as mode:
        y.sum().backward()
    assert mode.count == 3 + 7  # of the forward without the last one, and of the backward


def test_nothing_is_saved_and_what_is_recomputed_is_freed_as_it_is_read():
    refs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            made = x * 2
            refs.append(weakref.ref(made.untyped_storage()))
            ctx.save_for_backward(made)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            del ctx
            alive.append(sum(ref() is not None for ref in refs))
            return gradient

    def function(x):
        for _ in range(4):
            x = Seen.apply(x)
        return x.exp()

    gc.disable()
    try:
        y = checkpointed(function, inputs())
        assert not any(ref() is not None for ref in refs)
        refs.clear()
        y.sum().backward()
        assert not any(ref() is not None for ref in refs)
    finally:
        gc.enable()
    # Each backward passes by its own tensor unread, which is freed all the same with the node behind it.
    assert alive == [4, 3, 2, 1]


def test_a_tensor_may_be_read_several_times_in_one_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return x.square()

        @staticmethod
        def backward(ctx, gradient):
            (one,), (other,) = ctx.saved_tensors, ctx.saved_tensors
            return (one + other) * gradient

    def program(call):
        x = inputs()
        call(lambda x: Twice.apply(x.exp()), x).sum().backward()
        return [x.grad]

    alike(program)


def several_times(y, x, matrices, times):
    for k in range(times):
        y.backward(retain_graph=k < times - 1)
    return [x.grad, *(of.grad for of in matrices)]


def one_part_first(y, x, matrices):
    return [torch.autograd.grad(y, of, retain_graph=True)[0] for of in (matrices[2], x, matrices[0])]


def gradients_of_gradients(y, x, matrices):
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    slope.square().sum().backward()
    return [slope, x.grad, *(of.grad for of in matrices)]


USES = {
    "twice": partial(several_times, times=2),
    "three times": partial(several_times, times=3),
    "a part first": one_part_first,
    "gradients of gradients": gradients_of_gradients,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_several_backwards(use):
    def program(call):
        matrices, x = weights(), inputs()
        y = call(lambda x: product(matrices, x), x).sum()
        return use(y, x, matrices)

    alike(program)


def test_a_gradient_inside_of_the_call_and_of_the_recomputation():
    def program(call):
        matrices, x = weights(), inputs()

        def function(x):
            inner = product(matrices[:1], x)
            (slope,) = torch.autograd.grad(inner.sum(), x, create_graph=True)
            return product(matrices[1:], inner * slope)

        call(function, x).sum().backward()
        return [x.grad, *(of.grad for of in matrices)]

    alike(program)


def test_reading_a_saved_tensor_outside_of_a_backward():
    x = inputs()
    y = checkpointed(torch.sigmoid, x)
    for _ in range(2):
        assert torch.equal(y.grad_fn._saved_result, torch.sigmoid(x))
    y.sum().backward()
    assert torch.equal(x.grad, (y * (1 - y)).detach())


def test_the_default_device_is_that_of_the_forward():
    found = []

    def function(x):
        found.append(torch.empty(0).device.type)
        return x.exp()

    x = inputs()
    with torch.device("meta"):
        y = checkpointed(function, x)
    z = checkpointed(function, x)
    y.sum().backward()
    with torch.device("meta"):
        z.backward(torch.ones_like(z, device="cpu"))
    assert found == ["meta", "cpu", "meta", "cpu"]


def test_a_function_that_handles_every_exception_ends_when_all_is_recomputed():
    found = []

    def function(x):
        try:
            y = x.exp().sin()
            found.append("end")
        except Exception:
            found.append("handled")
            raise
        finally:
            x = x.cos()  # saves once more while the recomputation ends
        return y

    x = inputs()
    y = checkpointed(lambda x: function(x), x)
    y.sum().backward()
    assert found == ["end", "end"]
    assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())


def test_other_tensors_than_before_are_an_error():
    number = 3

    def function(x):
        for _ in range(number):
            x = x[: 5 - number].exp()
        return x

    y = checkpointed(function, inputs())
    number = 2
    with pytest.raises(
        RuntimeError, match=r"ran other operators .* shape \(2, 8\) and torch.float32 on cpu, and now .*"
    ):
        y.sum().backward()


def test_fewer_tensors_than_before_are_an_error():
    number = 3

    def function(x):
        for _ in range(number):
            x = x.exp()
        return x

    y = checkpointed(function, inputs())
    number = 2
    with pytest.raises(RuntimeError, match="ran other operators than in its forward"):
        y.sum().backward()


def test_an_error_names_the_group():
    """One note, although the recomputations of other groups have succeeded before it."""
    times = [1, 1, 1]

    class Repeating(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear, self.number = nn.Linear(8, 8), number

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(times[self.number]):
                x = self.linear(x).exp()
            return x

    model = nn.Sequential(*map(Repeating, range(3)))
    handle = offload(model, layers="?", recompute=True)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
    y = model(torch.ones(4, 8))
    times[1] = 0
    with pytest.raises(RuntimeError, match="ran other operators") as caught:
        y.sum().backward()
    assert caught.value.__notes__ == ["This was raised in backward, while the group '1' (Repeating) was recomputed."]
    handle.remove()


def test_an_input_that_was_written_to_is_an_error():
    x = inputs().exp()
    y = checkpointed(torch.sin, x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="an input of a module that is recomputed in backward was written to"):
        y.sum().backward()
