"""What modules keep in attributes, outside of themselves and in arguments: recomputed with equal bits, or not."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composing import BLOCKS, STEPS, WIDTH, Mlp, Net, batch, train
from recomputing import ANY, FIRST, check, counted, policies, simple
from torch import Tensor, nn
from torch.nn import Parameter
from whole_model import equal, offload

from actoffload.recompute.watch import ATTRIBUTES, CHANGES, DROPOUT, OBJECTS, OUTSIDE, Watch, _Seen

ALL = FIRST + STEPS * BLOCKS


class Keeping(Mlp):
    """Subtracts what it keeps from call to call."""

    kept: Any

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        raise NotImplementedError

    def keep(self, mean: Tensor) -> Tensor | float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.tanh(y - self.keep(x.detach().mean(0)))


class Steps(Keeping):
    def begin(self) -> None:
        self.kept = 0

    def keep(self, mean: Tensor) -> float:
        self.kept += 1
        return 0.1 * self.kept


class Pair(Keeping):
    def begin(self) -> None:
        self.kept = torch.zeros(WIDTH), torch.ones(WIDTH)

    def keep(self, mean: Tensor) -> Tensor:
        self.kept = 0.9 * self.kept[0] + 0.1 * mean, self.kept[1] * 0.5
        return self.kept[0] + self.kept[1]


class NewList(Keeping):
    def begin(self) -> None:
        self.kept = [torch.zeros(WIDTH)]

    def keep(self, mean: Tensor) -> Tensor:
        self.kept = [0.9 * self.kept[0] + 0.1 * mean]
        return self.kept[0]


class AddedLater(Keeping):
    """The first call of all does not have the attribute."""

    def begin(self) -> None:
        pass

    def keep(self, mean: Tensor) -> Tensor:
        self.kept = 0.9 * self.kept + 0.1 * mean if hasattr(self, "kept") else mean
        return self.kept


@policies
@pytest.mark.parametrize("block", [Steps, Pair, NewList])
def test_attributes_that_a_call_replaces_are_put_back_for_its_recomputation(block, policy):
    check(simple(counted(block)), policy, recomputed=ALL)


@policies
def test_attributes_that_only_some_blocks_replace(policy):
    """The first block, which is watched for all, does not."""

    class Odd(Steps):
        numbers = iter(range(10**6))

        def __init__(self) -> None:
            super().__init__()
            self.number = next(self.numbers)

        def keep(self, mean: Tensor) -> float:
            return super().keep(mean) if self.number % 2 else 0.5

    def make() -> nn.Module:
        Odd.numbers = iter(range(10**6))
        return counted(Odd)()

    check(simple(make), policy, recomputed=ALL)


@policies
def test_an_attribute_that_the_first_call_adds_is_absent_in_its_recomputation(policy):
    check(simple(counted(AddedLater)), policy, recomputed=ANY)


def test_attributes_are_those_of_the_program_again_after_a_recomputation():
    class Kept(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.tanh(self.up(x))
            return x + self.down(self.hidden)

    model = Net(Kept)
    offload(model, recompute=True, layers="blocks.?", fraction=1.0)
    for _ in range(3):
        loss = model(batch()).square().sum()
        before = [block.hidden for block in model.blocks]
        loss.backward()
        assert all(block.hidden is was for block, was in zip(model.blocks, before, strict=True))


@policies
def test_a_number_that_the_program_sets_before_backward_is_that_of_the_forward(policy):
    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sin() * self.scale

    def use(model: Any) -> list[Tensor]:
        for k in range(3):
            loss = model(batch(k)).square().sum()
            for block in model.blocks:
                block.inner.scale *= 0.7
            loss.backward()
        return [of.grad for of in model.parameters()]

    check(simple(counted(Scaled), use), policy, recomputed=ANY)


def test_a_tensor_in_an_attribute_that_is_edited_before_backward_is_an_error():
    class Shifted(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.ones(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.shift

    model = Net(Shifted)
    offload(model, recompute=True, layers="blocks.?")
    train(model, 2)
    loss = model(batch()).square().sum()
    model.blocks[1].shift.mul_(2.0)
    with pytest.raises(RuntimeError, match="parameter, buffer or attribute of a Shifted"):
        loss.backward()


def reason(module: nn.Module, *args: Any) -> str | None:
    watch = Watch(module)
    watch(module, *args)
    return watch.reason


@pytest.mark.parametrize(
    "kept", [{"n": 0.0}, deque([0.0]), SimpleNamespace(n=0.0), [[0.0]], np.zeros(1), {"n": [0.0]}], ids=repr
)
def test_what_is_changed_inside_of_an_attribute_is_not_recomputed(kept):
    class Inside(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.kept = kept

        def forward(self, x: Tensor) -> Tensor:
            of = self.kept
            if isinstance(of, SimpleNamespace):
                of.n += 0.1
            elif isinstance(of, dict) and isinstance(of["n"], float):
                of["n"] += 0.1
            else:
                of = of["n"] if isinstance(of, dict) else of
                of = of[0] if isinstance(of[0], list) else of
                of[0] += 0.1
            return super().forward(x)

    assert reason(Inside(), batch()) == ATTRIBUTES


def test_an_object_whose_numbers_change_and_an_iterator_are_not_recomputed():
    class Stepped(Mlp):
        def forward(self, x: Tensor, of: Any) -> Tensor:
            of.n += 1
            return super().forward(x) * of.n

    class Iterating(Mlp):
        def forward(self, x: Tensor, of: Any) -> Tensor:
            return super().forward(x) * next(of)

    assert reason(Stepped(), batch(), SimpleNamespace(n=0)) == OBJECTS
    assert reason(Iterating(), batch(), iter([1.0, 2.0])) == OBJECTS


def test_writes_to_what_is_outside_of_a_group():
    outside = torch.zeros(WIDTH)

    class Writing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            outside.mul_(0.9).add_(x.detach().mean(0))
            return super().forward(x) - outside

    class Making(Mlp):
        """Writes to what it made itself."""

        def forward(self, x: Tensor) -> Tensor:
            shift = torch.tensor([0.5]).repeat(WIDTH)
            shift[::2] += x.detach().mean()
            value = torch.tensor(0.5)
            value += 1
            return super().forward(x) - shift.add_(1) * value

    assert reason(Writing(), batch()) == OUTSIDE
    assert reason(Making(), batch()) == ""


def test_what_is_offloaded_in_the_watched_call_is_no_write_of_the_group():
    class Reused(Mlp):
        """Keeps what is saved, so that it is copied before the call has returned."""

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.tanh(self.up(x))
            self.hidden.retain_grad()
            return x + self.down(self.hidden)

    handle = check(simple(counted(Reused)), recomputed=ANY)
    assert "Not recomputed" not in handle.plan.because


def test_buffers_that_are_views_of_one_memory():
    class Overlapping(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("both", torch.zeros(2, WIDTH))
            self.register_buffer("mean", self.both[0])

        def forward(self, x: Tensor) -> Tensor:
            self.both.mul_(0.9).add_(x.detach().mean(0))
            return super().forward(x) - self.mean

    assert reason(Overlapping(), batch()) == CHANGES


@policies
def test_parameters_among_arguments_are_themselves(policy):
    class Weighted(Mlp):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            scale = weight.factor * (2.0 if isinstance(weight, Parameter) and weight.is_leaf else 1.0)
            return torch.tanh(super().forward(x) @ weight) * scale

    class Passing(Net):
        def __init__(self, make: Any) -> None:
            super().__init__(make)
            self.weight = Parameter(torch.eye(WIDTH))
            self.weight.factor = 0.7

        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x, self.weight)

    from recomputing import Counted

    check(simple(lambda: Passing(lambda: Counted(Weighted()))), policy, recomputed=ALL)


def test_dropout_of_recurrent_layers_of_cudnn():
    """It needs a GPU to run, but not to be seen."""
    operator, mode = torch.ops.aten._cudnn_rnn.default, _Seen(())
    given = [None] * 11
    for dropout, training, want in ((0.5, True, DROPOUT), (0.0, True, ""), (0.5, False, "")):
        mode.reason = ""
        with pytest.raises(Exception):  # noqa: B017, PT011 - there is no such kernel
            mode.__torch_dispatch__(operator, (), (*given, dropout, training, False, (), None))
        assert mode.reason == want


def test_lazy_modules():
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.LazyLinear(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    torch.manual_seed(0)
    model = Net(Lazy)
    offload(model, recompute=True, layers="blocks.?", fraction=1.0)
    torch.manual_seed(1)
    model(batch())
    before = {name: of.detach().clone() for name, of in model.named_parameters()}
    found = train(model)
    torch.manual_seed(0)
    plain = Net(Lazy)
    plain(batch())
    plain.load_state_dict(before)
    equal(found, train(plain))


@pytest.mark.parametrize("how", ["detach", "cast", "keep"])
def test_what_a_hook_takes_now_and_then_is_not_left_out(how):
    """Recomputation runs the hook again, and would hand it a tensor without memory."""

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5 + 1

    class Frozen(nn.Module):
        """Its product is saved, so that what only the product reads need not run again, as with adapters."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.base = Scale(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.gate = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.base(self.scale(x)) * torch.tanh(self.gate(x))

    torch.manual_seed(0)
    model, taken, step = Net(Frozen), {}, 0

    def take(module: nn.Module, args: Any, output: Tensor) -> None:
        if step % 3 == 2:
            taken[module] = {"detach": output.detach, "cast": output.double, "keep": lambda: output}[how]()

    for block in model.blocks:
        block.scale.register_forward_hook(take)
    handle = offload(model, recompute=True, layers="blocks.?", fraction=1.0)
    for step in range(9):
        taken.clear()
        loss = model(batch(step)).square().sum()
        want = [of.clone() for of in taken.values()]
        loss.backward()
        assert len(want) == (BLOCKS if step % 3 == 2 else 0)
        assert all(map(torch.equal, taken.values(), want))
    assert handle.plan.recomputed
