"""Distributed tensors: their local parts leave, sharded parameters stay."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import Saves, forward, make, no_gc, nothing_held, plain, same_bits
from torch import Tensor, nn
from wrappers import SavesWeight, one_layer

import actoffload
from actoffload.report import Reason

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


@contextmanager
def imagined(kind: str) -> Iterator[Any]:
    """A mesh of two ranks of which this process is the first; the other one is imagined, and has the same data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh(kind, (2,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[Any]:
    with imagined("cpu") as found:
        yield found


@pytest.fixture
def mesh_there(place: torch.device) -> Iterator[Any]:
    with imagined(place.type) as found:
        yield found


def parts_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if type(a) is Tensor:
        assert same_bits(a, b)
        return
    for name in a.__tensor_flatten__()[0]:
        if isinstance(getattr(a, name), Tensor):
            parts_equal(getattr(a, name), getattr(b, name))


class Parallel(nn.Module):
    """An MLP, its first linear split by rows and its second by columns."""

    def __init__(self, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.to(mesh.device_type)
        parallelize_module(self, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_tensor_parallel_model(mesh_there, place):
    """All on the way between the two linears is DTensor."""
    from torch.distributed.tensor import DTensor

    layers = [Parallel(mesh_there) for _ in range(4)]
    assert isinstance(layers[0].up.weight, DTensor)
    parameters = [p for layer in layers for p in layer.parameters()]
    for weight in parameters:  # an imagined scatter leaves whatever was in the memory
        nn.init.normal_((weight.to_local() if isinstance(weight, DTensor) else weight).detach(), std=0.1)
    x = torch.randn(16, 32, device=place, requires_grad=True)
    wanted = torch.autograd.grad(plain(layers, x * 1.0).square().mean(), [x, *parameters])
    context, sync = make(2, 4)
    with no_gc():
        for _ in range(2):
            y = forward(layers, x * 1.0, context, sync)
            got = torch.autograd.grad(y.square().mean(), [x, *parameters])
            del y
            nothing_held(context)
    for a, b in zip(got, wanted, strict=True):
        parts_equal(a, b)
    statistics = context.statistics()
    # A layer's input, the norm's output (which the first linear wraps), and the halves of gelu's input and output.
    assert statistics.bytes_offloaded == 2 * 2 * 4 * 16 * 32 * 4
    assert set(statistics.tensors_kept) == {Reason.PARAMETER, Reason.SMALL}
    assert statistics.bytes_reloaded == statistics.bytes_offloaded
    assert statistics.reloaded_on_demand == 0


def test_what_is_unpacked_has_placements_and_both_shapes(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

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


def again(weight: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(weight.to_local(), weight.device_mesh, weight.placements)


FORMS = {
    "itself": lambda w: (w,),
    "transpose": lambda w: (w.t(),),
    "detached": lambda w: (w.detach().t(),),
    "local": lambda w: (w.to_local(),),
    "local transpose": lambda w: (w.to_local().t(),),
    "view": lambda w: (w.view(-1),),
    "wrapped again": lambda w: (again(w),),
}


@pytest.mark.parametrize("kind", ["trained", "frozen"])
@pytest.mark.parametrize("form", FORMS)
def test_sharded_parameters_stay_under_any_name(mesh, form, kind):
    from torch.distributed.tensor import Shard, distribute_tensor

    if form == "wrapped again" and kind == "trained" and torch.__version__ < (2, 13):
        pytest.skip("DTensor.from_local has no backward for a missing gradient, before torch 2.13")
    weight = distribute_tensor(torch.randn(32, 32), mesh, [Shard(0)])
    _, statistics = one_layer(SavesWeight(weight, FORMS[form], kind))
    assert statistics.bytes_offloaded == 0
    assert statistics.tensors_kept == {Reason.PARAMETER: 1}


def test_a_collective_is_waited_for_before_its_result_is_copied(mesh, monkeypatch):
    import torch.distributed._functional_collectives as collectives

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
