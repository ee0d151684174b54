"""The reference of the host-time benchmark: the same copies with hooks and CUDA calls alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gpu_harness import needs_cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

import actoffload

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytest.importorskip("transformers", reason="transformers is not installed")

from host_time import Bare
from workloads import Settings, Stack

pytestmark = [pytest.mark.gpu, needs_cuda]


def test_bare_copies_what_offload_copies_and_gradients_are_equal() -> None:
    settings = Settings(5, (1, 256, 512), "bfloat16", heads=4, kv_heads=2, intermediate=1024, min_bytes=4096)
    stack = Stack(settings, torch.device("cuda", torch.cuda.current_device()))
    inputs = stack.input().detach()
    stack.input = lambda: inputs.clone().requires_grad_()

    def gradients(step) -> list[torch.Tensor]:
        stack.model.zero_grad()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            step()
        return [weight.grad.clone() for weight in stack.model.parameters()]

    want = gradients(stack.step)
    bare = Bare(stack, 3)
    for _ in range(3):
        got = gradients(bare.step)
        assert all(map(torch.equal, got, want))
    with actoffload.offload(stack.model, num_layers=3, min_bytes=settings.min_bytes) as handle:
        got = gradients(lambda: stack.step(stack.model))
        assert all(map(torch.equal, got, want))
        # `offload` also copies cosines and sines, which all layers save; they are wasted copies.
        assert len(bare.order) == handle.statistics().tensors_offloaded - 2
