"""Offload beside DistributedDataParallel, fully_shard and tensor parallelism, in two processes and in one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import composing
import helpers
import pytest
import torch
import torch.distributed as dist
from composing import (
    BLOCKS,
    OFFLOADED,
    STEPS,
    STREAM,
    WIDTH,
    Block,
    Net,
    Offload,
    both,
    checkpointing,
    dropping,
    gradients,
    stepping_in_backward,
    train,
    training,
)
from processes import LIMIT, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from actoffload import gather_reports
from actoffload.device import accelerator

pytestmark = pytest.mark.timeout(LIMIT + 300)


Loop = Callable[[nn.Module], list[Tensor]]


def batch(k: int) -> Tensor:
    """Return the data of a step, different in each rank."""
    return composing.batch(10 * k + dist.get_rank())


# Models


def net() -> Net:
    return Net(dropping)


def checkpointed() -> Net:
    return checkpointing(net(), use_reentrant=False)


def frozen() -> Net:
    model = Net()
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


class Skipping(Net):
    """Skips another block in each forward, the same in all ranks."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = self.inp(x)
        for k, block in enumerate(self.blocks):
            x = block(x) if k != self.forwards % 3 else x
        return self.head(x)


class Gathering(Block):
    """Attends to the keys and values of all ranks, each of which has a part of the sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, *(torch.cat(all_gather(part.contiguous()), dim=-2) for part in (k, v)))


# Training loops


def steps(model: nn.Module, count: int = STEPS) -> list[Tensor]:
    return train(model, count, data=batch)


def accumulating(model: Any) -> list[Tensor]:
    """Communicate in every second step only."""
    results = []
    for k in range(4):
        parallel = isinstance(model, DistributedDataParallel)
        if not parallel:
            model.set_requires_gradient_sync(k % 2 == 1)
        with model.no_sync() if parallel and k % 2 == 0 else nullcontext():
            model(batch(k)).square().sum().backward()
        if k % 2:
            results += gradients(model)
    return results


def stepping(model: nn.Module) -> list[Tensor]:
    """Let each parameter's part step as soon as its gradient is there."""
    stepping_in_backward(model)
    for k in range(STEPS):
        model(batch(k)).square().mean().backward()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def counting_gathers(model: nn.Module) -> list[Tensor]:
    """Return also how many all-gathers the steps behind the first one need."""
    results = steps(model, 1)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as gather:
        results += steps(model, 2)
    assert gather.call_count >= 2 * 2 * BLOCKS
    return [*results, torch.tensor(gather.call_count)]


# Programs


def data_parallel(make: Callable[[], Net] = Net, loop: Loop = steps, inside: bool = False, **options: Any) -> Any:
    def program(offload: Offload) -> list[Tensor]:
        model = make().to(helpers.PLACE)
        if inside:
            offload(model)
        wrapped = DistributedDataParallel(model, **options)
        if not inside:
            offload(wrapped)
        return loop(wrapped)

    return program


def sharded(
    make: Callable[[], Net] = Net, loop: Loop = steps, first: str = "", compiled: bool = False, **options: Any
) -> Any:
    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = make().to(helpers.PLACE)
        if first == "offloaded":
            offload(model)
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        shard(model, **options)
        if first != "offloaded":
            offload(model)
        return loop(model)

    return program


def shard(model: Net, **options: Any) -> None:
    """Shard each block and what is around them."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh(), **options)
    fully_shard(model, mesh=mesh(), **options)


def mesh() -> Any:
    return init_device_mesh(helpers.PLACE.type, (dist.get_world_size(),))


def tensor_parallel(offload: Offload) -> list[Tensor]:
    model = Net().to(helpers.PLACE)
    for block in model.blocks:
        parallelize_module(block, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    offload(model)
    return train(model)


def context_parallel(offload: Offload) -> list[Tensor]:
    model = Net(Gathering).to(helpers.PLACE)
    offload(model)
    return steps(model)


def offloading(program: Any, **options: Any) -> Any:
    """Return a program that passes further options to `offload`."""
    return lambda offload: program(lambda model, **more: offload(model, **options, **more))


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES: dict[str, Callable[[Offload], list[Tensor]]] = {
    "ddp": data_parallel(net),
    "ddp around an offloaded model": data_parallel(inside=True),
    "ddp, unused parameters": data_parallel(Skipping, find_unused_parameters=True),
    "ddp, checkpointed": data_parallel(checkpointed),
    "ddp, no_sync": data_parallel(net, accumulating),
    "fsdp": sharded(net),
    "fsdp, offloaded first": sharded(first="offloaded"),
    "fsdp, not resharded": sharded(reshard_after_forward=False),
    "fsdp, bfloat16": sharded(mp_policy=HALF),
    "fsdp, frozen weights": sharded(frozen),
    "fsdp, checkpointed": sharded(checkpointed),
    "fsdp, accumulating": sharded(net, accumulating),
    "tensor parallel": tensor_parallel,
    "context parallel": context_parallel,
    "fsdp, measured": offloading(sharded(net, partial(steps, count=8)), fraction=None),
    "ddp, recomputed": offloading(data_parallel(net), recompute=True),
    "fsdp, bfloat16, recomputed": offloading(sharded(mp_policy=HALF), recompute=True),
    "fsdp, steps inside of backward, recomputed": offloading(sharded(net, stepping), recompute=True),
    "fsdp, compiled, recomputed": offloading(sharded(compiled=True), recompute=True),
    "fsdp, recomputed, without further all-gathers": offloading(sharded(net, counting_gathers), recompute=True),
    "tensor parallel, recomputed": offloading(tensor_parallel, recompute=True),
    "context parallel, recomputed": offloading(context_parallel, recompute=True),
}


def seen(name: str) -> dict[str, Any]:
    """Run a case; return numbers from its statistics."""
    try:
        handle = both(CASES[name], in_time="measured" not in name)
        statistics, reports = handle.statistics(), gather_reports(handle.report())
    except BaseException as error:
        error.add_note(f"In the case {name!r}.")
        raise
    return {
        "bytes_offloaded": statistics.bytes_offloaded,
        "bytes_reloaded": statistics.bytes_reloaded,
        "recomputed": sum(group.recomputed for group in handle.report().groups),
        "by_rank": [report.totals.bytes_offloaded for report in reports.reports],
        "kept": {reason.name: nbytes for reason, nbytes in statistics.bytes_kept.items()},
    }


def run_cases(device: torch.device) -> list[dict[str, Any]]:
    """Run all `CASES`, as one of several ranks; return what it saw of each.

    An accelerator copies the small tensors in several chunks, as it does large ones.
    """
    warnings.simplefilter("ignore")
    helpers.PLACE = device
    accelerator.TO_HOST = accelerator.TO_DEVICE = accelerator.SEPARATED = 2048
    with helpers.deterministic() if device.type == "cuda" else nullcontext():
        return [seen(name) for name in CASES]


# The tests


WORLDS = [
    pytest.param(("cpu", 2), id="2 processes"),
    pytest.param(("cuda", 2), id="2 accelerators", marks=pytest.mark.multi_gpu(2)),
    pytest.param(("cuda", 4), id="4 accelerators", marks=pytest.mark.multi_gpu(4)),
]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """All cases, run once: starting processes takes longer than running them."""
    device, world = request.param
    return {
        "device": device,
        **dict(zip(CASES, zip(*run_ranks(run_cases, world=world, device=device), strict=True), strict=True)),
    }


def offloaded(make: Any) -> int:
    return both(training(make)).statistics().bytes_offloaded


WEIGHTS = 8 * WIDTH * WIDTH * 4
"""Bytes of the weights of a block's linears."""


AS_PLAIN = {
    **dict.fromkeys(("ddp around an offloaded model", "fsdp, offloaded first", "fsdp, not resharded"), Net),
    "ddp, unused parameters": Skipping,
}
"""Models of which as much is offloaded as without other ranks."""


@pytest.mark.parametrize("name", CASES)
def test_several_ranks(ranks, name):
    """In each rank the bits are the same, no parameter was offloaded, whole or in parts, and nothing is held."""
    for seen in ranks[name]:
        assert seen["bytes_reloaded"] == seen["bytes_offloaded"] > 0
        if "measured" in name:
            continue
        # Each rank knows the same of all, and of itself what it knew before: the latest pass of all that were run.
        assert seen["by_rank"] == ranks[name][0]["by_rank"]
        assert 0 < seen["by_rank"][ranks[name].index(seen)] <= seen["bytes_offloaded"]
        half = "bfloat16" in name
        if "recomputed" in name:
            assert seen["recomputed"] > 0
            continue
        assert not seen["recomputed"]
        assert "checkpointed" in name or seen["kept"]["PARAMETER"] > 0
        if ranks["device"] != "cpu":  # whose kernels save other tensors
            continue
        if "checkpointed" in name:
            assert seen["bytes_offloaded"] == STEPS * OFFLOADED * STREAM
        else:
            assert seen["kept"]["PARAMETER"] >= STEPS * (OFFLOADED + 1) * WEIGHTS // (2 if half else 1) * 2 // 3
        if name in AS_PLAIN:
            assert seen["bytes_offloaded"] == offloaded(AS_PLAIN[name])
        if half:
            assert seen["bytes_offloaded"] == pytest.approx(offloaded(Net) / 2, rel=0.02)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, place: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_fully_sharded_blocks_that_are_found_by_themselves(place):
    def program(offload: Offload) -> list[Tensor]:
        net = Net().to(place)
        shard(net)
        handle = offload(net, layers=None)
        assert handle is None or handle.groups == tuple(f"blocks.{k}" for k in range(BLOCKS))
        return train(net)

    both(program)
