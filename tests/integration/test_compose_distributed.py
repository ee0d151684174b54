"""Offload beside DistributedDataParallel, fully_shard and tensor parallelism, in two processes and in one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compose_ranks import CASES, Skipping, compose, shard
from composing import BLOCKS, OFFLOADED, STEPS, STREAM, WIDTH, Net, Offload, both, copied, dropping, train, training
from processes import LIMIT
from torch import Tensor, nn

from actoffload.report import Reason

pytestmark = pytest.mark.timeout(LIMIT + 300)

WORLDS = [
    pytest.param(("cpu", 2), id="2 processes"),
    pytest.param(("cuda", 2), id="2 accelerators", marks=pytest.mark.multi_gpu(2)),
    pytest.param(("cuda", 4), id="4 accelerators", marks=pytest.mark.multi_gpu(4)),
]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """All cases, run once: starting processes takes longer than running them."""
    device, world = request.param
    return {"device": device, **compose(list(CASES), world, device)}


def offloaded(make: Any) -> int:
    return both(training(make)).statistics().bytes_offloaded


WEIGHTS = 8 * WIDTH * WIDTH * 4
"""Bytes of the weights of a block's linears."""


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
        if name in (
            "ddp around an offloaded model",
            "ddp, static graph",
            "fsdp, offloaded first",
            "fsdp, not resharded",
        ):
            assert seen["bytes_offloaded"] == offloaded(Net)
        if name == "ddp, unused parameters":
            assert seen["bytes_offloaded"] == offloaded(Skipping)
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
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("first", ["sharded", "offloaded"])
def test_fully_shard_in_one_process(place, first, reshard):
    def program(offload: Offload) -> list[Tensor]:
        net = Net(dropping).to(place)
        if first == "offloaded":
            handle = offload(net)
        shard(net, reshard_after_forward=reshard)
        if first == "sharded":
            handle = offload(net)
        if handle is not None:
            assert handle.groups == tuple(f"blocks.{k}" for k in range(BLOCKS))
        return train(net)

    handle = both(program)
    statistics = handle.statistics()
    assert statistics.bytes_offloaded == offloaded(lambda: Net(dropping))
    assert statistics.bytes_kept[Reason.PARAMETER] >= STEPS * BLOCKS * WEIGHTS
    weights = {linear.weight.nbytes for linear in Net().modules() if isinstance(linear, nn.Linear)}
    assert copied(handle)
    assert not copied(handle) & {nbytes // parts for nbytes in weights for parts in (1, 2)}


@pytest.mark.usefixtures("alone")
def test_fully_sharded_blocks_that_are_found_by_themselves(place):
    def program(offload: Offload) -> list[Tensor]:
        net = Net().to(place)
        shard(net)
        handle = offload(net, layers=None)
        assert handle is None or handle.groups == tuple(f"blocks.{k}" for k in range(BLOCKS))
        return train(net)

    both(program)
