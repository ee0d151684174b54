"""Arguments of recomputed calls: objects with tensors in them, one tensor twice, attributes, sparse tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from composing import BLOCKS, WIDTH, Mlp, Net, batch, gradients
from recomputing import ANY, FIRST, Counted, check, fractions, policies, simple
from torch import Tensor, nn
from whole_model import offload

from actoffload._torch.tensors import storage_expired, storage_weakref
from actoffload.recompute import tensors_inside


@dataclass
class Data:
    """An object that PyTorch does not take apart, as graph libraries pass them to layers."""

    x: Tensor
    scale: Tensor


class OfData(Mlp):
    def forward(self, data: Data) -> Tensor:
        return super().forward(data.x.sin()) * data.scale


class Passing(Net):
    """Passes such an object to the blocks, and puts their outputs into it."""

    def __init__(self) -> None:
        super().__init__(lambda: Counted(OfData()))

    def forward(self, x: Tensor) -> Tensor:
        data = Data(self.inp(x), torch.full((), 0.5))
        for block in self.blocks:
            self.update(data, block(data))
        return self.head(data.x)

    def update(self, data: Data, y: Tensor) -> None:
        data.x = data.x + y


@policies
@fractions
def test_an_object_whose_tensors_have_gradients_is_not_recomputed(policy, fraction):
    handle = check(simple(Passing), policy, recomputed=0, fraction=fraction)
    assert "tensors with gradients, which the program may replace: blocks.0 ... 5" in handle.plan.because


class Scaling(Passing):
    """Passes an object that has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        x, data = self.inp(x), Data(torch.empty(0), torch.full((), 0.5))
        for block in self.blocks:
            x = block(x, data)
            self.after(data)
        return self.head(x)

    def after(self, data: Data) -> None:
        pass


class Scaled(Mlp):
    def forward(self, x: Tensor, data: Data) -> Tensor:
        return super().forward(torch.sin(x)) + torch.tanh(data.scale * x)


def scaling(kind: type[Scaling]) -> nn.Module:
    model = kind()
    model.blocks = nn.ModuleList([Counted(Scaled()) for _ in range(BLOCKS)])
    return model


@policies
@fractions
def test_an_object_without_gradients(policy, fraction):
    check(simple(lambda: scaling(Scaling)), policy, recomputed=FIRST + 3 * BLOCKS, fraction=fraction)


@policies
@pytest.mark.parametrize("how", ["replaced", "edited"])
def test_a_tensor_in_an_object_that_is_changed_after_the_call_is_an_error(how, policy):
    class Changing(Scaling):
        def after(self, data: Data) -> None:
            if how == "edited":
                data.scale.mul_(0.5)
            else:
                data.scale = data.scale * 0.5

    model = scaling(Changing)
    offload(model, recompute=policy, fraction=1.0)
    with pytest.raises(RuntimeError, match="in an object that was passed to a module that is recomputed"):
        model(batch()).sum().backward()


@policies
@pytest.mark.filterwarnings("ignore:Modules of this model cannot be recomputed")
def test_a_call_that_edits_a_tensor_in_its_object_is_not_recomputed(policy):
    class Editing(Scaled):
        def forward(self, x: Tensor, data: Data) -> Tensor:
            data.scale.mul_(0.9)
            return super().forward(x, Data(data.x, data.scale.clone()))

    def make() -> nn.Module:
        model = Scaling()
        model.blocks = nn.ModuleList([Counted(Editing()) for _ in range(BLOCKS)])
        return model

    handle = check(simple(make), policy, recomputed=0)
    assert "they change objects that are passed to them" in handle.plan.because


@policies
def test_inputs_are_freed_when_they_are_offloaded(policy):
    """Nothing but the group refers to them between forward and backward."""
    refs: list[Any] = []

    class Fresh(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            x = x * 1.0
            refs.append(storage_weakref(x.untyped_storage()))
            return block(x)

    model = Fresh(Mlp)
    offload(model, recompute=policy, num_layers=BLOCKS - 2)
    for _ in range(3):
        refs.clear()
        loss = model(batch()).square().sum()
        freed = sum(map(storage_expired, refs))
        loss.backward()
    assert freed == BLOCKS - 2


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    "make",
    [
        Slots,
        lambda x: functools.partial(torch.add, x),
        lambda x: lambda y: y + x,
        lambda x: {x},
        lambda x: Data(x, None).__eq__,
    ],
    ids=["slots", "partial", "closure", "set", "method"],
)
def test_tensors_are_found_in(make):
    x = torch.ones(2)
    assert [of is x for of in tensors_inside([make(x)])] == [True]


@policies
@fractions
def test_one_tensor_that_is_passed_twice_is_one_tensor_again(policy, fraction):
    class Attending(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            x = x.unflatten(0, (4, -1))
            return (x + block(x, x, x, need_weights=False)[0]).flatten(0, 1)

    def make() -> nn.Module:
        return Attending(lambda: Counted(nn.MultiheadAttention(WIDTH, 2, batch_first=True)))

    check(simple(make), policy, recomputed=FIRST + 3 * BLOCKS, fraction=fraction)


@policies
def test_attributes_of_inputs(policy):
    class Marked(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.sin(x * x.factor))

    class Marking(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            x = x * 1.0
            x.factor = 0.5
            return block(x)

    check(simple(lambda: Marking(lambda: Counted(Marked()))), policy, recomputed=FIRST + 3 * BLOCKS)


@policies
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_inputs(layout, requires_grad, policy):
    class Mixing(Mlp):
        def forward(self, x: Tensor, mixing: Tensor) -> Tensor:
            return super().forward(torch.sin(mixing @ x))

    class Graph(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            mixing = torch.eye(len(x)).to_sparse(layout=layout)
            return block(x, mixing.requires_grad_(requires_grad))

    if requires_grad and layout is torch.sparse_csr:
        pytest.skip("PyTorch has no gradient of this product for a matrix in CSR")
    check(simple(lambda: Graph(lambda: Counted(Mixing()))), policy, recomputed=ANY)


@policies
@pytest.mark.parametrize("where", ["attribute", "argument", "elsewhere"])
def test_a_generator_that_only_later_blocks_use(where, policy):
    """The call that is watched draws nothing.  What no module has, and none gets, is an error in backward."""
    generators: dict[str, Any] = {}

    class Noisy(Mlp):
        rate = 0.0

        def forward(self, x: Tensor, generator: Any = None) -> Tensor:
            y = super().forward(torch.sin(x))
            found = {"attribute": getattr(self, "generator", None), "argument": generator}.get(where)
            generator = found or generators["now"]
            return y * (torch.rand(len(x), 1, generator=generator) >= self.rate) if self.rate else y

    class Blocks(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x, generators["now"]) if where == "argument" else block(x)

    def make() -> nn.Module:
        model = Blocks(lambda: Counted(Noisy()))
        generators["now"] = torch.Generator().manual_seed(3)
        for k, block in enumerate(model.blocks):
            block.inner.rate = 0.1 * k
            if where == "attribute":
                block.inner.generator = generators["now"]
        return model

    if where != "elsewhere":
        handle = check(simple(make), policy, recomputed=0)
        assert "a generator of the program: blocks.0 ... 5" in handle.plan.because
    elif policy != []:  # which sees no operators
        model = make()
        offload(model, recompute=policy, fraction=1.0)
        with pytest.raises(RuntimeError, match="draws random numbers from a generator of the program"):
            model(batch()).sum().backward()


@policies
def test_an_argument_that_chooses_what_is_read(policy):
    """The same operators run, and others of them are needed."""

    class Choosing(Mlp):
        def forward(self, x: Tensor, first: bool) -> Tensor:
            one, other = self.up(x) + 1.0, self.down(x) + 2.0
            return torch.tanh(self.down(one if first else other))

    class Alternating(Net):
        steps = 0

        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x, bool(Alternating.steps % 2))

    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for k in range(4):
            Alternating.steps = k
            model(batch(k)).square().sum().backward()
            found += gradients(model)
        return found

    def make() -> nn.Module:
        Alternating.steps = 0
        return Alternating(lambda: Counted(Choosing()))

    # The first call with another flag is watched, too.
    check(simple(make, use), policy, recomputed=FIRST + 4 * BLOCKS - 1)
