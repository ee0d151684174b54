"""The part of the Llama benchmark that says what the hooks and the calls of CUDA cost by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gpu_harness import needs_cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

import actoffload

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from llama_bare import Bare
from llama_model import LlamaSettings, Stack

pytestmark = [pytest.mark.gpu, needs_cuda]


def test_the_least_moves_what_offload_moves_and_gradients_are_equal() -> None:
    settings = LlamaSettings(tokens=256, layers=5, hidden=512, intermediate=1024, heads=4, kv_heads=2, min_bytes=4096)
    stack = Stack(settings, torch.device("cuda", torch.cuda.current_device()))
    inputs = stack.input().detach()
    stack.input = lambda: inputs.clone().requires_grad_()

    def gradients(step) -> list[torch.Tensor]:
        stack.model.zero_grad()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            step()
        return [weight.grad.clone() for weight in stack.model.parameters()]

    want = gradients(lambda: stack.step(stack.twin))
    bare = Bare(stack, 3)
    for _ in range(3):
        got = gradients(lambda: bare.step(lambda: None))
        assert all(map(torch.equal, got, want))
    with actoffload.offload(stack.model, num_layers=3, min_bytes=settings.min_bytes) as handle:
        got = gradients(lambda: stack.step(stack.model))
        assert all(map(torch.equal, got, want))
        # Sines and cosines, which all layers save, are moved in vain by it.
        assert bare.storages == handle.statistics().tensors_offloaded - 2
