"""Saved tensors made of several plain ones: the parts are offloaded, and unpacking returns the same type."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from helpers import Saves, forward, make, no_gc, nothing_held, plain, same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from wrappers import (
    ONE,
    Join,
    N,
    QuantizedTensor,
    SavesWeight,
    Scaled,
    Split,
    Two,
    Uses,
    one_layer,
    read,
    structure,
    values,
)

import actoffload
from actoffload.report import Reason

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


KINDS: dict[str, tuple[Callable[[], Any], int, int]] = {  # how to make it; bytes that leave; parts that stay
    "wrapper": (lambda: Two(values(), values()), 2 * ONE, 0),
    "wrapper of strided parts": (lambda: Two(values(2 * N)[:, ::2], values().t()), 3 * ONE, 0),
    "wrappers in a wrapper": (lambda: Two(Two(values(), values()), Two(values(), values())), 4 * ONE, 0),
    "of eight bits": (lambda: Scaled.of(values()), ONE // 4, 1),
    "of eight bits, transposed": (lambda: Scaled.of(values()).t(), ONE // 4, 1),
    "of eight bits in a wrapper": (lambda: Two(Scaled.of(values()), Scaled.of(values())), ONE // 2, 2),
    "prepared for saving": (lambda: QuantizedTensor(values()), ONE // 2, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_offloaded_and_the_type_is_restored(kind, place):
    build, leaving, staying = KINDS[kind]
    things = [build()]
    expected, saved = structure(things[0]), read(things[0])
    seen: list[Any] = []
    context, sync = make(1, 3)
    leaf = torch.ones(N, N, device=place, requires_grad=True)
    y = forward([lambda x: Uses.apply(x, seen, *things), torch.sin, torch.cos], leaf * 1.0, context, sync)
    gone = weakref.ref(things[0].a if isinstance(things[0], Two) else things[0])
    things.clear()
    assert gone() is None
    statistics = context.statistics()
    assert statistics.bytes_offloaded in (leaving, leaving - 4)  # a slice with a step ends before its storage
    assert statistics.tensors_kept.get(Reason.SMALL, 0) == staying
    assert Reason.SUBCLASS not in statistics.tensors_kept
    assert statistics.resident_bytes == statistics.bytes_saved - leaving
    y.sum().backward()
    assert seen == [[expected]]
    assert same_bits(leaf.grad, torch.autograd.grad(torch.cos(torch.sin(leaf * 1.0)).sum(), leaf)[0] * saved)
    assert context.statistics().bytes_reloaded == statistics.bytes_offloaded
    del y
    nothing_held(context)


class Model(nn.Module):
    """Operations of PyTorch itself on a wrapper: autograd decides what is saved, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Two(values(), values()))

    def forward(self, x: Tensor) -> Tensor:
        h = Split.apply(x)
        h = (h @ self.weight.t()).exp() * h.sin()
        h = torch.nn.functional.gelu(h.t()) @ h.clamp(-1, 1)
        return Join.apply(h)


def test_a_model_on_wrappers_has_equal_bits_and_keeps_its_weights():
    layers = [Model() for _ in range(4)]
    x = torch.randn(N, N, requires_grad=True)
    weights = [part for layer in layers for part in (layer.weight,)]
    wanted = torch.autograd.grad(plain(layers, x).square().mean(), [x, *weights])
    context, sync = make(2, 4)
    with no_gc():
        for _ in range(2):
            got = torch.autograd.grad(forward(layers, x, context, sync).square().mean(), [x, *weights])
            nothing_held(context)
    assert same_bits(got[0], wanted[0])
    for a, b in zip(got[1:], wanted[1:], strict=True):
        assert type(a) is Two
        assert same_bits(a.a, b.a)
        assert same_bits(a.b, b.b)
    statistics = context.statistics()
    assert statistics.tensors_kept[Reason.PARAMETER] == 2 * len(layers)  # one view of its weight in each, each step
    # Two parts each of what goes in and of what exp, sin, the product, gelu and clamp return.
    assert statistics.tensors_offloaded == 2 * 2 * 6 * 2
    assert statistics.bytes_reloaded == statistics.bytes_offloaded == statistics.tensors_offloaded * ONE
    assert statistics.reloaded_on_demand == 0


def test_wrappers_of_the_same_memory_move_once():
    a, b = values(), values()
    two = Two(a, b)
    grad, statistics = one_layer(lambda x: Uses.apply(x, [], two, two.t(), Two(a, b), a, Two(b, a)))
    assert statistics.bytes_offloaded == 2 * ONE
    assert same_bits(grad, read(two) * read(two).t() * read(two) * a * (b * 2 + a))


def again(weight: Any) -> Any:
    return DTensor.from_local(weight.to_local(), weight.device_mesh, weight.placements)


FORMS: dict[str, Callable[[Any], tuple[Tensor, ...]]] = {
    "itself": lambda weight: (weight,),
    "transpose": lambda weight: (weight.t(),),
    "detached": lambda weight: (weight.detach().t(),),
}
OF_PAIRS = {
    "a part": lambda weight: (weight.a, weight.b.t()),
    "in a wrapper": lambda weight: (Two(weight.detach(), weight.detach()),),
}
OF_SHARDS = {
    "local": lambda weight: (weight.to_local(),),
    "local transpose": lambda weight: (weight.to_local().t(),),
    "view": lambda weight: (weight.view(-1),),
    "wrapped again": lambda weight: (again(weight),),
}


@pytest.mark.parametrize("form", [*FORMS, *OF_PAIRS])
@pytest.mark.parametrize("kind", ["trained", "buffer"])
def test_parameters_and_buffers_stay_under_any_name(form, kind):
    _, statistics = one_layer(SavesWeight(Two(values(), values()), {**FORMS, **OF_PAIRS}[form], kind))
    assert statistics.bytes_offloaded == 0
    assert set(statistics.tensors_kept) == {Reason.BUFFER if kind == "buffer" else Reason.PARAMETER}


@pytest.mark.parametrize("form", [*FORMS, *OF_SHARDS])
@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_sharded_parameters_stay_under_any_name(mesh, form, kind):
    if form == "wrapped again" and kind == "trained" and torch.__version__ < (2, 13):
        pytest.skip("DTensor.from_local has no backward for a missing gradient, before torch 2.13")
    weight = distribute_tensor(values(), mesh, [Shard(0)])
    _, statistics = one_layer(SavesWeight(weight, {**FORMS, **OF_SHARDS}[form], kind))
    assert statistics.bytes_offloaded == 0
    assert statistics.tensors_kept == {Reason.PARAMETER: 1}


def test_a_leaf_that_requires_grad_stays():
    two = Two(values(), values()).requires_grad_()
    _, statistics = one_layer(lambda x: Uses.apply(x, [], two, two.t()))
    assert statistics.tensors_kept == {Reason.LEAF: 2}
    assert statistics.bytes_offloaded == 0


class Opaque(Two):
    """Does not say what it is made of."""

    def __tensor_flatten__(self):
        raise NotImplementedError("not today")


class Closed(Tensor):
    """Has operators of its own, and no way to say it."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


class Single(QuantizedTensor):
    """Has no second one like it."""

    def detach(self) -> Single:
        return self


@pytest.mark.parametrize(
    "build", [lambda: Opaque(values(), values()), lambda: values().as_subclass(Closed), lambda: Single(values())]
)
def test_what_cannot_be_taken_apart_stays(build):
    thing, seen = build(), list[Any]()
    _, statistics = one_layer(lambda x: Saves.apply(x, seen, thing))
    assert type(seen[0]) is type(thing)
    assert statistics.tensors_kept == {Reason.SUBCLASS: 1}
    assert statistics.bytes_offloaded == 0


class Dressed(Tensor):
    """A plain tensor with a class and attributes of its own, as MONAI's."""

    meta: dict[str, float]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(made, cls):
            vars(made).update(*(vars(each) for each in args[:1] if isinstance(each, cls)))
        return made


@pytest.mark.parametrize("edited", [False, True])
def test_a_subclass_without_operators_of_its_own_is_offloaded(edited):
    plain_values, seen = values(), list[Any]()
    thing = plain_values.clone().as_subclass(Dressed)
    thing.meta = {"factor": 2.0}
    context, sync = make(1, 3)
    leaf = torch.ones(N, N, requires_grad=True)
    y = forward([lambda x: Saves.apply(x, seen, thing), torch.sin, torch.cos], leaf * 1.0, context, sync)
    statistics = context.statistics()
    assert statistics.bytes_offloaded == ONE
    assert Reason.SUBCLASS not in statistics.tensors_kept
    if edited:
        thing.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return
    y.sum().backward()
    assert type(seen[0]) is Dressed
    assert seen[0].meta == {"factor": 2.0}
    assert same_bits(seen[0].as_subclass(Tensor), plain_values)


def test_parts_that_find_no_host_memory_stay():
    two = Two(values(), values())
    with pytest.warns(actoffload.HostMemoryWarning):
        grad, statistics = one_layer(lambda x: Uses.apply(x, [], two), max_host_bytes=0)
    assert same_bits(grad, read(two))
    assert statistics.tensors_kept[Reason.HOST_FULL] == 2


def test_a_jagged_tensor_that_is_unpacked_is_ragged_in_the_same_way():
    """Its ragged size is the same symbol, so it goes together with tensors that stayed; large offsets stay too."""
    offsets = torch.arange(0, 201, 2)
    tensor, other = (torch.nested.nested_tensor_from_jagged(torch.randn(200, 4), offsets) for _ in range(2))
    seen: list[Any] = []
    _, statistics = one_layer(lambda x: Saves.apply(x, seen, tensor.transpose(1, 2)))
    (back,) = seen
    assert statistics.bytes_offloaded == 200 * 4 * 4
    assert statistics.tensors_kept == {Reason.MARKED: 1}
    assert back.shape == tensor.transpose(1, 2).shape
    assert back.offsets() is offsets
    assert back.values().data_ptr() != tensor.values().data_ptr()
    assert same_bits((back + other.transpose(1, 2)).values(), (tensor + other).values().t())


# Distributed tensors: their local parts are offloaded


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of two ranks of which this process is the first; the other one is imagined, and has the same data."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_what_is_unpacked_has_placements_and_both_shapes(mesh):
    whole = torch.randn(16, 32)
    tensor = distribute_tensor(whole, mesh, [Shard(1)]).t()
    expected = tensor.to_local().clone()  # before torch 2.13 an imagined scatter leaves whatever was in the memory
    seen: list[Any] = []
    _, statistics = one_layer(lambda x: Saves.apply(x, seen, tensor))
    assert statistics.bytes_offloaded == 16 * 16 * 4
    (back,) = seen
    assert back._spec == tensor._spec
    assert (back.shape, back.stride(), back.requires_grad) == (tensor.shape, tensor.stride(), False)
    local = back.to_local()
    assert local.data_ptr() != tensor.to_local().data_ptr()
    assert local.stride() == tensor.to_local().stride()
    assert same_bits(local, expected)


def test_a_collective_is_waited_for_before_its_result_is_copied(mesh, monkeypatch):
    tensor = collectives.all_reduce(torch.ones(16, 32), "sum", (mesh, 0))
    assert type(tensor) is collectives.AsyncCollectiveTensor
    waited: list[int] = []
    copy = actoffload.device.ReferenceDevice.to_host
    monkeypatch.setattr(
        actoffload.device.ReferenceDevice, "to_host", lambda *args: [waited.append(tensor.completed), copy(*args)]
    )
    seen: list[Any] = []
    one_layer(lambda x: Saves.apply(x, seen, tensor))
    assert waited == [True]
    assert type(seen[0]) is type(tensor)
    assert same_bits(seen[0] + 1, tensor + 1)
