"""Captures are measured with the same workspaces in both arms, so R of a captured step is that of the eager one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import actoffload
from actoffload.measure import MemoryMeter, compare_captures, compare_steps

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_captures_have_the_same_workspaces() -> None:
    layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    pair = actoffload.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=8)
    x = torch.randn(4096, 1024, device="cuda")

    def step(context, sync) -> None:
        layers.zero_grad(set_to_none=False)
        y = x.clone()
        for layer in layers:
            with context:
                y = layer(y)
            y = sync(y)
        y.square().mean().backward()

    nothing = actoffload.get_cpu_offload_context(enabled=False)
    arms = (lambda: step(*nothing)), (lambda: step(*pair))
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    captured = compare_captures(*arms, pair[0], repeats=1, replays=1)
    assert captured.bytes_offloaded == 3 * 2**24
    assert captured.ratio >= 0.995
    eager = compare_steps(*arms, pair[0], repeats=1, steps=1)
    assert abs(captured.drop - eager.drop) <= 2**20
    pair[0].close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_no_time_is_sampled_in_a_capture() -> None:
    meter, x = MemoryMeter(), torch.ones(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1  # an empty capture warns
        with pytest.raises(RuntimeError, match="trace_memory"):
            meter.sample()
