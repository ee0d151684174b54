"""Every number of the statistics, in cases that can be counted by hand."""

import dataclasses

import pytest
import torch
from helpers import forward, make, nothing_held
from torch import nn

from actoffload.context import OffloadContext
from actoffload.device import ReferenceDevice
from actoffload.engine.engine import Engine
from actoffload.report import Reason, Statistics
from actoffload.schedule import DefaultSchedule

N = 512
ONE = N * N * 4  # bytes of one tensor, 1 MiB


class Two(nn.Module):
    """Saves two tensors of 1 MiB that nothing else saves, one small one, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, N))

    def forward(self, x):
        row = torch.exp(x[:1] * 1.0)  # saves its result, which is small
        return torch.sin(torch.cos(x * 1.0) * 1.0) * self.weight * 1.0 + row


def run(layers, num):
    context, sync = make(num, len(layers))
    return context, sync, forward(layers, torch.randn(N, N, requires_grad=True), context, sync)


def test_a_forward_and_its_backward_by_hand():
    # Each layer saves: the arguments of cos and sin, and the result of sin (for the gradient of the weight): 3 MiB.
    context, _, y = run([Two() for _ in range(5)], 3)
    forward_only = context.statistics()
    want = Statistics(
        passes=1,
        tensors_saved=15,
        bytes_saved=15 * ONE,
        tensors_offloaded=9,
        bytes_offloaded=9 * ONE,
        tensors_kept={Reason.SMALL: 5, Reason.PARAMETER: 5},
        bytes_kept={Reason.SMALL: 5 * N * 4, Reason.PARAMETER: 5 * ONE},
        resident_bytes=6 * ONE,
        peak_resident_bytes=6 * ONE,
        # 9 MiB, grown tensor by tensor in slabs of at least 2 MiB
        host_bytes=10 * ONE,
        host_bytes_used=9 * ONE,
        host_bytes_high_water=9 * ONE,
    )
    assert forward_only == want
    y.sum().backward()
    assert context.statistics() == dataclasses.replace(
        want,
        reloaded_ahead=9,
        bytes_reloaded=9 * ONE,
        resident_bytes=0,
        host_bytes_used=0,
    )
    del y
    assert context.statistics().host_bytes == 10 * ONE  # kept for the next step


def test_reset():
    context, _, y = run([Two() for _ in range(4)], 2)
    y.sum().backward()
    del y
    before = context.statistics()
    context.reset_statistics()
    # The high-water mark of the pool is the largest ever, as documented.
    assert context.statistics() == Statistics(
        host_bytes=before.host_bytes, host_bytes_high_water=before.host_bytes_high_water
    )


def test_host_memory_of_a_large_batch_can_be_freed():
    context, sync = make(3, 5)
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(5)]
    for rows in (4096, 512):
        forward(layers, torch.randn(rows, 512), context, sync).sum().backward()
    before = context.statistics().host_bytes
    freed = context.trim()
    after = context.statistics()
    assert before >= freed >= 0.9 * before > 0
    assert after.host_bytes == before - freed
    forward(layers, torch.randn(512, 512), context, sync).sum().backward()
    assert context.statistics().host_bytes_used == 0
    assert 0 < context.statistics().host_bytes < before / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_the_limit_in_bytes_is_the_same_for_every_type(dtype: torch.dtype) -> None:
    """Each of two layers saves a tensor of exactly the limit, and one that is an element smaller."""
    context = OffloadContext(Engine(DefaultSchedule(1, 2).plan(), ReferenceDevice(), min_bytes=ONE))
    count = ONE // dtype.itemsize
    enough, small = (torch.ones(n, dtype=dtype, requires_grad=True) for n in (count, count - 1))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(enough * 1.0).sum().real + torch.sin(small * 1.0).sum().real

    y = forward([layer, layer], torch.zeros(()), context, context.synchronize)
    y.backward()
    del y
    nothing_held(context)
    statistics = context.statistics()
    assert statistics.tensors_offloaded == 1
    assert statistics.bytes_offloaded == ONE
    assert statistics.tensors_kept[Reason.SMALL] >= 2
