"""One rank of a program of several: runs cases without offload and with, and returns what it saw."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import composing
import helpers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composing import WIDTH, Block, Net, Offload, both, checkpointing, dropping, gradients, stepping_in_backward, train
from processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from actoffload import gather_reports
from actoffload.device import accelerator


def batch(k: int) -> Tensor:
    """Return the data of a step, different in each rank."""
    return composing.batch(10 * k + dist.get_rank())


def steps(model: nn.Module, count: int = composing.STEPS) -> list[Tensor]:
    return train(model, count, data=batch)


class Skipping(Net):
    """Skips another block in each forward, the same in all ranks."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = self.inp(x)
        for k, block in enumerate(self.blocks):
            x = block(x) if k != self.forwards % 3 else x
        return self.head(x)


class Detached(Block):
    """Uses a weight in a way in which autograd does not see that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.more(x) + F.linear(x, self.more.weight.detach())


class Gathering(Block):
    """Attends to the keys and values of all ranks, each of which has a part of the sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, *(torch.cat(all_gather(part.contiguous()), dim=-2) for part in (k, v)))


# Distributed data parallel


def data_parallel(make: Callable[[], nn.Module] = Net, inside: bool = False, **options: Any) -> Any:
    def program(offload: Offload) -> list[Tensor]:
        net = make().to(helpers.PLACE)
        if inside:
            offload(net)
        model = DistributedDataParallel(net, **options)
        if not inside:
            offload(model)
        return steps(model)

    return program


def without_synchronization(offload: Offload) -> list[Tensor]:
    model = DistributedDataParallel(Net(dropping).to(helpers.PLACE))
    offload(model)
    results = []
    for k in range(composing.STEPS):
        with model.no_sync():
            model(batch(2 * k)).square().sum().backward()
        model(batch(2 * k + 1)).square().sum().backward()
        results += gradients(model)
    return results


# Fully sharded data parallel


def sharded(
    make: Callable[[], Net] = Net,
    first: str = "sharded",
    frozen: bool = False,
    compiled: str = "",
    count: int = composing.STEPS,
    **options: Any,
) -> Any:
    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        net = make().to(helpers.PLACE)
        if frozen:
            for block in net.blocks:
                block.up.requires_grad_(False)
        if first == "offloaded":
            offload(net)
        if compiled == "before":
            compile_blocks(net)
        shard(net, **options)
        if compiled == "after":
            compile_blocks(net)
        if first == "sharded":
            offload(net)
        return steps(net, count)

    return program


def shard(net: Net, **options: Any) -> None:
    """Shard each block and what is around them."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh(), **options)
    fully_shard(net, mesh=mesh(), **options)


def compile_blocks(net: Net) -> None:
    for block in net.blocks:
        block.compile(backend="aot_eager")


def accumulating(offload: Offload) -> list[Tensor]:
    net = Net(dropping).to(helpers.PLACE)
    shard(net)
    offload(net)
    results = []
    for k in range(4):
        net.set_requires_gradient_sync(k % 2 == 1)
        net(batch(k)).square().sum().backward()
        if k % 2:
            results += gradients(net)
    return results


def sharded_stepping_in_backward(offload: Offload) -> list[Tensor]:
    """Shard, and let each parameter's part step as soon as its gradient is there."""
    net = Net(dropping).to(helpers.PLACE)
    shard(net)
    offload(net)
    stepping_in_backward(net)
    for k in range(composing.STEPS):
        net(batch(k)).square().mean().backward()
    return [parameter.to_local().detach().clone() for parameter in net.parameters()]


def mesh() -> Any:
    return init_device_mesh(helpers.PLACE.type, (dist.get_world_size(),))


# Options of offload


def offloading(program: Any, **options: Any) -> Any:
    """Return a program that passes further options to `offload`."""
    return lambda offload: program(lambda model, **more: offload(model, **options, **more))


def counting_gathers(offload: Offload) -> list[Tensor]:
    """Shard, and return how many all-gathers the steps behind the first one need, besides their results."""
    net = Net(dropping).to(helpers.PLACE)
    shard(net)
    offload(net, recompute=True)
    results = steps(net, 1)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as gather:
        results += steps(net, 2)
    assert gather.call_count >= 2 * 2 * composing.BLOCKS
    return [*results, torch.tensor(gather.call_count)]


# Tensor parallel


def tensor_parallel(offload: Offload) -> list[Tensor]:
    net = Net().to(helpers.PLACE)
    for block in net.blocks:
        parallelize_module(block, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    offload(net)
    return train(net)


# Context parallel


def context_parallel(offload: Offload) -> list[Tensor]:
    net = Net(Gathering).to(helpers.PLACE)
    offload(net)
    return steps(net)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES: dict[str, Callable[[Offload], list[Tensor]]] = {
    "ddp": data_parallel(lambda: Net(dropping)),
    "ddp around an offloaded model": data_parallel(inside=True),
    "ddp, unused parameters": data_parallel(Skipping, find_unused_parameters=True),
    "ddp, static graph": data_parallel(static_graph=True),
    "ddp, checkpointed": data_parallel(lambda: checkpointing(Net(dropping), use_reentrant=False)),
    "ddp, no_sync": without_synchronization,
    "fsdp": sharded(lambda: Net(dropping)),
    "fsdp, offloaded first": sharded(first="offloaded"),
    "fsdp, not resharded": sharded(reshard_after_forward=False),
    "fsdp, bfloat16": sharded(mp_policy=HALF),
    "fsdp, frozen weights": sharded(frozen=True),
    "fsdp, detached weights": sharded(lambda: Net(Detached)),
    "fsdp, checkpointed": sharded(lambda: checkpointing(Net(dropping), use_reentrant=False)),
    "fsdp, checkpointed and compiled": sharded(
        lambda: checkpointing(Net(dropping), use_reentrant=False), compiled="before"
    ),
    "fsdp, accumulating": accumulating,
    "fsdp, steps inside of backward": sharded_stepping_in_backward,
    "fsdp, compiled after": sharded(compiled="after"),
    "tensor parallel": tensor_parallel,
    "context parallel": context_parallel,
    "fsdp, measured": offloading(sharded(lambda: Net(dropping), count=8), fraction=None),
    "ddp, recomputed": offloading(data_parallel(lambda: Net(dropping)), recompute=True),
    "ddp, static graph, recomputed": offloading(data_parallel(static_graph=True), recompute=True),
    "fsdp, not resharded, recomputed": offloading(sharded(reshard_after_forward=False), recompute=True),
    "fsdp, bfloat16, recomputed": offloading(sharded(mp_policy=HALF), recompute=True),
    "fsdp, accumulating, recomputed": offloading(accumulating, recompute=True),
    "fsdp, steps inside of backward, recomputed": offloading(sharded_stepping_in_backward, recompute=True),
    "fsdp, compiled, recomputed": offloading(sharded(compiled="before"), recompute=True),
    "fsdp, recomputed, without further all-gathers": counting_gathers,
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


def run_cases(device: torch.device, names: list[str]) -> list[dict[str, Any]]:
    """Run some of `CASES`, as one of several ranks; return what it saw of each.

    An accelerator copies the small tensors in several chunks, as it does large ones.
    """
    warnings.simplefilter("ignore")
    helpers.PLACE = device
    accelerator.TO_HOST = accelerator.TO_DEVICE = accelerator.SEPARATED = 2048
    with helpers.deterministic() if device.type == "cuda" else nullcontext():
        return [seen(name) for name in names]


def compose(names: list[str], world: int, device: str) -> dict[str, list[dict[str, Any]]]:
    """Run cases in a process for each rank; return what each rank saw of each case."""
    ranks = run_ranks(run_cases, names, world=world, device=device)
    return dict(zip(names, zip(*ranks, strict=True), strict=True))
