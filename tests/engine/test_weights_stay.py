"""Invariant 6: weights stay, under whatever name autograd sees them, and are found where a model changes."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import forward, make, make_manual, nothing_held
from torch import Tensor, nn
from wrappers import Two

import actoffload
from actoffload._torch.tensors import address
from actoffload.engine import eligibility
from actoffload.engine.eligibility import ModelTensors
from actoffload.report import Reason

N = 512
ONE = N * N * 4


def kept(*layers, x: Tensor | None = None, num: int | None = None):
    """Run layers, all but two offloaded; return the statistics after backward."""
    stages = [*layers, torch.relu, torch.relu]
    context, sync = make(len(layers) if num is None else num, len(stages))
    start = torch.randn(4, N, requires_grad=True) if x is None else x
    y = forward(stages, start * 1.0, context, sync)
    y.sum().backward()
    del y
    nothing_held(context)
    return context.statistics()


class Use(nn.Module):
    """Multiplies with a form of its weight."""

    def __init__(self, form, *, frozen: bool = False, buffer: bool = False) -> None:
        super().__init__()
        value = torch.randn(N, N)
        if buffer:
            self.register_buffer("weight", value)
        else:
            self.weight = nn.Parameter(value, requires_grad=not frozen)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.form(self.weight)


FORMS = {
    "itself": lambda w: w,
    "transpose": lambda w: w.t(),
    "permuted": lambda w: w.permute(1, 0),
    "slice": lambda w: w[:, :],
    "reshaped": lambda w: w.view(N // 2, 2, N).flatten(0, 1),
    "data": lambda w: w.data,
    "detached": lambda w: w.detach(),
    "detached transpose": lambda w: w.detach().t(),
    "transpose of data": lambda w: w.data.t(),
}


class Sharded(Use):
    """As sharding wrappers do: its own pre-hook puts the full weight in the place of a shard."""

    def __init__(self, form) -> None:
        super().__init__(form)
        self.full, self.weight.data = self.weight.data, torch.zeros(0)
        self.register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", module.full))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["trained", "frozen", "buffer", "sharded"])
def test_forms_of_a_weight(form, kind):
    make_layer = Sharded if kind == "sharded" else partial(Use, frozen=kind == "frozen", buffer=kind == "buffer")
    statistics = kept(make_layer(FORMS[form]))
    assert statistics.tensors_saved == 0  # the input is small: 4 x N
    reason = Reason.BUFFER if kind == "buffer" else Reason.PARAMETER
    assert statistics.tensors_kept[reason] == 1
    assert statistics.bytes_kept[reason] == ONE


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", ["itself", "transpose", "slice", "reshaped"])
def test_a_parameter_used_without_its_module(form, frozen):
    """A function as a layer: no module says what it owns, but the parameter says what it is."""
    weight = nn.Parameter(torch.randn(N, N), requires_grad=not frozen)
    statistics = kept(lambda x: x @ FORMS[form](weight))
    assert statistics.bytes_offloaded == 0
    assert statistics.tensors_kept[Reason.PARAMETER] == 1


def test_leaves_that_require_grad_stay():
    prompt = torch.randn(N, N, requires_grad=True)  # not a Parameter, but not ours to move either
    statistics = kept(lambda x: x @ prompt, lambda x: x @ prompt.t())
    assert statistics.tensors_kept[Reason.LEAF] == 2
    assert statistics.bytes_offloaded == 0


@pytest.mark.parametrize("which", ["tensor", "view", "base"])
def test_a_mark_reaches_every_view_of_the_storage(which):
    def layer(x: Tensor) -> Tensor:
        hidden = x * 2.0
        view = hidden.t()
        actoffload.mark_not_offload({"tensor": hidden, "view": view[5:], "base": hidden.view(-1)}[which])
        return torch.sin(view).t() * hidden

    context, sync = make(1, 3)
    x = torch.randn(N, N, requires_grad=True) * 1.0
    y = forward([layer, torch.relu, torch.relu], x, context, sync)
    statistics = context.statistics()
    assert statistics.tensors_kept == {Reason.MARKED: 2}
    assert statistics.bytes_offloaded == ONE  # sin(view) alone
    y.sum().backward()


def test_other_layouts_stay():
    sparse = torch.eye(N).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        nested = torch.nested.nested_tensor([torch.randn(N, N), torch.randn(3, N)], requires_grad=True)
    jagged = torch.nested.nested_tensor([torch.randn(N, N), torch.randn(3, N)], layout=torch.jagged)
    context, sync = make(1, 3)
    weight = torch.randn(N, N, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        a = torch.sparse.mm(sparse, x)
        c = (nested * nested).sin().to_padded_tensor(0.0).sum()
        d = torch.sin(jagged.requires_grad_()).values().sum()
        return a + c + d

    y = forward([layer, torch.relu, torch.relu], weight * 1.0, context, sync)
    y.sum().backward()
    tensors_kept = context.statistics().tensors_kept
    assert tensors_kept[Reason.LAYOUT] >= 2
    assert nested.grad is not None


@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_the_program_frees_stays(when):
    """Before it is saved, or between saving and the copy at the end of a layer."""

    class Frees(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, held):
            if when == "before":
                held.untyped_storage().resize_(0)
            ctx.save_for_backward(held)
            return x * 2.0

        @staticmethod
        def backward(ctx, grad):
            (held,) = ctx.saved_tensors
            return grad * held, None

    held = torch.randn(N, N)
    values = held.clone()

    def layer(x: Tensor) -> Tensor:
        y = Frees.apply(x, held)
        held.untyped_storage().resize_(0)
        return y

    context, sync, controller = make_manual(3)
    leaf = torch.randn(N, N, requires_grad=True)
    y = forward([layer, torch.relu, torch.relu], leaf * 1.0, context, sync)
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    statistics = context.statistics()
    assert statistics.tensors_kept[Reason.FREED] == 1
    assert statistics.bytes_offloaded == 0
    held.untyped_storage().resize_(values.nbytes)
    held.data.copy_(values)
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.where(leaf > 0, values, 0.0))


# What is read of a model once


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def reason(tensors: ModelTensors, tensor: Tensor) -> Reason | None:
    return tensors.reason(address(tensor.untyped_storage()))


def ones(*size: int) -> Tensor:
    return torch.ones(*(size or (4, 4)))


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], Tensor]]] = {  # how, and the tensor that is new
    "another parameter": (lambda net: setattr(net[1][0], "weight", nn.Parameter(ones())), lambda net: net[1][0].weight),
    "another memory": (lambda net: setattr(net[1][0].weight, "data", ones()), lambda net: net[1][0].weight),
    # As where weights are moved away and back, and the allocator returns the memory that they had.
    "another storage of the same memory": (
        lambda net: setattr(net[1][0].weight, "data", torch.from_numpy(net[1][0].weight.detach().numpy())),
        lambda net: net[1][0].weight,
    ),
    "one more parameter": (lambda net: setattr(net[1], "scale", nn.Parameter(ones(4))), lambda net: net[1].scale),
    "one that was none": (lambda net: setattr(net[1][0], "bias", nn.Parameter(ones(4))), lambda net: net[1][0].bias),
    "one more module": (lambda net: net.append(nn.Linear(4, 4)), lambda net: net[2].weight),
    "another module": (lambda net: setattr(net[1], "0", nn.Linear(4, 4)), lambda net: net[1][0].weight),
    "another part": (lambda net: setattr(net[1][0].weight, "b", ones()), lambda net: net[1][0].weight.b),
    "another buffer": (lambda net: setattr(net[1][1], "running_mean", ones(4)), lambda net: net[1][1].running_mean),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changed_is_read_again(name: str):
    net = model()
    net[1][0].bias = None
    if name == "another part":
        net[1][0].weight = nn.Parameter(Two(ones(), ones()))
    first = ModelTensors(net)
    assert reason(first, net[0].weight) is Reason.PARAMETER
    change, found = CHANGES[name]
    change(net)
    assert reason(first, found(net)) is None
    expected = Reason.BUFFER if name == "another buffer" else Reason.PARAMETER
    for _ in range(2):
        first = ModelTensors(net, first)
        assert reason(first, found(net)) is expected
        change(net)


@pytest.mark.parametrize("notes", ["kept", "finals"])
def test_notes_on_storages_that_are_gone_are_swept(notes: str) -> None:
    """As many notes as storages that exist, within a factor of two and a constant."""
    found = getattr(eligibility, notes)
    living = [torch.zeros(4) for _ in range(10)]
    mark = eligibility.mark_kept if notes == "kept" else _final
    for tensor in living:
        mark(tensor)
    many = 3 * len(found) + 1000
    for _ in range(many):
        mark(torch.zeros(4))
    assert len(found) < many // 2
    for tensor in living:  # these are as before
        assert not found[tensor.untyped_storage()._cdata].expired


def _final(tensor: torch.Tensor) -> None:
    eligibility.finals.add(tensor.untyped_storage(), eligibility.Final(tensor, object(), whole=False))
