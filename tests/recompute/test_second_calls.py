"""Recomputations that end early, that meet what their forward left behind, or that come before backward."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composing import BLOCKS, STEPS, WIDTH, Mlp, Net, batch, train
from recomputing import ANY, FIRST, check, counted, policies, simple
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from whole_model import offload

from actoffload.recompute.watch import ATTRIBUTES, OUTSIDE

ALL = FIRST + STEPS * BLOCKS


class Block(Mlp):
    """Keeps something, of which `look` shows what a step has left."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.depth, self.kept = nn.Dropout(0.5), 0, dict[str, Any]()


class Toggling(Block):
    """Has the first value again after two calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.depth = (self.depth + 1) % 2
        return torch.tanh(super().forward(x) * (1 + self.depth))


class Switching(Block):
    """Switches the mode of a part, which counts nothing at the end."""

    def forward(self, x: Tensor) -> Tensor:
        self.dropout.train()
        y = torch.tanh(self.dropout(super().forward(x)))
        self.dropout.eval()
        return y


class Freezing(Block):
    """Freezes a weight for as long as it runs."""

    def forward(self, x: Tensor) -> Tensor:
        weight = next(self.parameters())
        weight.requires_grad_(False)
        y = torch.tanh(super().forward(x))
        weight.requires_grad_(True)
        return y


class Descending(Block):
    """Counts how deep it is."""

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        y = torch.tanh(super().forward(x) * self.depth)
        self.depth -= 1
        return y


class Passing(Block):
    """Has a tensor in an attribute for as long as it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.passed = 2 * super().forward(x)
        y = torch.tanh(self.passed)
        del self.passed
        return y


def twice(model: nn.Module) -> list[Tensor]:
    """Run two forwards before each backward."""
    found = []
    for k in range(STEPS):
        model.zero_grad()
        (model(batch(k)).sum() + model(2 * batch(k)).square().sum()).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *left(model)]


def left(model: nn.Module) -> list[Tensor]:
    """Return what the attributes of the blocks are."""
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    flags = [[of.depth, of.dropout.training, hasattr(of, "passed")] for of in blocks]
    return [
        torch.tensor([list(map(int, of)) for of in flags]),
        torch.tensor([p.requires_grad for p in model.parameters()]),
    ]


@policies
@pytest.mark.parametrize("block", [Toggling, Switching, Freezing, Descending, Passing])
def test_what_a_recomputation_sets_is_put_back(block, policy):
    """It ends where it has saved what autograd needs, so the rest of the code does not run."""
    check(simple(counted(block), twice), policy, recomputed=ANY)


@policies
def test_a_mode_that_is_switched_before_backward_is_that_of_the_forward(policy):
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for k in range(STEPS):
            loss = model(batch(k)).sum()
            model.eval()
            loss.backward()
            assert not any(of.training for of in model.modules())
            model.train()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    check(simple(counted(Switched), use), policy, recomputed=ALL)


class Switched(Block):
    """Drops in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(super().forward(x)))


class Force(nn.Module):
    """Computes a gradient in its forward, behind an edit of what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu_()
        (force,) = torch.autograd.grad((h * h).sin().sum(), self.first.weight, create_graph=True)
        return x + torch.sin(self.third(torch.sin(self.second(x @ force))))


@policies
def test_a_gradient_that_is_computed_inside_of_a_group(policy):
    """The recomputation for it runs in the forward, whose operators keep their numbers."""
    check(simple(lambda: Net(Force)), policy, recomputed=0)


class Products(TorchDispatchMode):
    """Counts the products of linear layers."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator is torch.ops.aten.addmm.default
        return operator(*args, **(kwargs or {}))


def test_products_behind_a_gradient_inside_of_a_group_are_saved():
    """The first one, which is edited, runs again in backward, and no other."""
    model = Net(Force)
    handle = offload(model, recompute=True, fraction=1.0)
    train(model, 3)
    loss = model(batch(0)).sum()
    with Products() as products:
        loss.backward()
    assert products.count == BLOCKS
    handle.remove()


class Tables(nn.Module):
    """Caches a table for each number of rows, which it makes as it makes its products, of weights or of a buffer."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        if fixed:
            del self.first
            matrix = torch.randn(WIDTH, WIDTH)
            self.register_buffer("matrix", matrix)
            self.first = self.of_matrix
        self.cache = dict[int, Tensor]()
        self.register_buffer("frequencies", torch.randn(1, WIDTH))

    def table(self, rows: int) -> Tensor:
        if rows not in self.cache:
            self.cache[rows] = 0.1 * torch.arange(float(rows))[:, None] @ self.frequencies
        return self.cache[rows]

    def of_matrix(self, x: Tensor) -> Tensor:
        return x @ self.matrix

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(len(x))
        return torch.sin(self.second(torch.sin(self.first(x) + table)))


@policies
@pytest.mark.parametrize("fixed", [False, True])
def test_a_saved_product_is_not_taken_for_another_one(fixed, policy):
    def use(model: nn.Module) -> list[Tensor]:
        for block in model.blocks:
            block.table(8)
        found = []
        for k, rows in enumerate((8, 8, 8, 9, 10, 9)):
            torch.manual_seed(k)
            model(torch.randn(rows, WIDTH)).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        return found

    check(simple(lambda: Net(partial(Tables, fixed=fixed)), use), policy, recomputed=0)


# What the first call does not show


class Adding(Mlp):
    """Adds an entry to a dictionary, and replaces it later."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = dict[str, int]()

    def forward(self, x: Tensor) -> Tensor:
        self.kept["number"] = self.kept.get("number", 0) + 1
        return super().forward(x * self.kept["number"])


class Appending(Mlp):
    """Makes a list, and appends to it later."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.kept = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [] if self.kept is None else self.kept
        self.kept.append(1)
        return super().forward(x * len(self.kept))


class OfAnotherKind(nn.Parameter):
    pass


class WritingOutside(Mlp):
    """Has a parameter of a class of its own, and writes to what is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        outside = torch.zeros(WIDTH)
        self.scale, self.outside = OfAnotherKind(torch.rand(WIDTH)), lambda: outside

    def forward(self, x: Tensor) -> Tensor:
        self.outside().add_(1)
        return super().forward(x * self.scale * self.outside().clone())


@policies
@pytest.mark.parametrize(
    ("block", "reason", "recomputed"),
    [(Adding, ATTRIBUTES, 0), (Appending, ATTRIBUTES, FIRST), (WritingOutside, OUTSIDE, 0)],
)
def test_what_only_later_calls_show_is_not_recomputed(block, reason, recomputed, policy):
    handle = check(simple(counted(block)), policy, recomputed=recomputed)
    assert reason in handle.plan.because


class Registering(Mlp):
    """Registers a buffer in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if "mean" in self._buffers:
            return super().forward(x - self.mean)
        self.register_buffer("mean", x.detach().mean(0))
        return super().forward(2 * x)


class Growing(Mlp):
    """Makes a module in its first call, with random weights."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "part"):
            self.part = nn.Linear(WIDTH, WIDTH)
        return F.dropout(super().forward(self.part(x)), 0.5)


@policies
@pytest.mark.parametrize("block", [Registering, Growing])
def test_calls_that_add_parts_are_watched_again(block, policy):
    """Each block has a first call, which is not recomputed; the second one is watched for all."""
    check(simple(counted(block)), policy, recomputed=STEPS * BLOCKS - 1)


@torch.library.custom_op("actoffload_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Return random numbers, which the operator's tags do not say."""
    return torch.rand_like(x)


@policies
def test_operators_of_others_that_draw_random_numbers_run_again(policy):
    class Noisy(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x) + noise(x.detach()), 0.5)

    check(simple(counted(Noisy)), policy, recomputed=ALL)


def test_forwards_without_backward_do_not_refer_to_each_other():
    class Remembering(Mlp):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.tanh(super().forward(x))
            return self.kept * x

    model, counts = Net(Remembering), []
    handle = offload(model, recompute=True, fraction=1.0)
    for k in range(12):
        model(batch(k))
        gc.collect()
        counts.append(sum(isinstance(of, Tensor) for of in gc.get_objects()))
    assert len(set(counts[-4:])) == 1
    handle.remove()
