"""`indices_to_multihot` on a GPU: no synchronization, and the same bits as indexing with a mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_harness import DEVICE, lenient, needs_cuda
from moe_harness import captured, generator, no_synchronization, same_bits
from torch import Tensor

from actoffload.moe import indices_to_multihot

pytestmark = [pytest.mark.gpu, *lenient]

TOKENS, TOPK, EXPERTS = 4096, 2, 8


def masked(indices: Tensor, probs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Build the tables by indexing with a mask."""
    here = indices != -1
    rows = torch.arange(len(indices), device=indices.device).repeat_interleave(here.sum(dim=1))
    routing_map = torch.zeros(len(indices), num_experts, dtype=torch.bool, device=indices.device)
    probabilities = probs.new_zeros(len(indices), num_experts)
    routing_map[rows, indices[here]] = True
    probabilities[rows, indices[here]] = probs[here]
    return routing_map, probabilities


def routing(dtype: torch.dtype, seed: int = 0, keep: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices without duplicates in a row, probabilities, and a gradient of the table."""
    scores = torch.rand(TOKENS, EXPERTS, generator=generator(seed), device=DEVICE)
    probs, indices = scores.to(dtype).topk(TOPK)
    away = torch.rand(indices.shape, generator=generator(seed + 1), device=DEVICE) > keep
    grad = torch.randn(TOKENS, EXPERTS, generator=generator(seed + 2), device=DEVICE).to(dtype)
    return indices.masked_fill(away, -1), probs, grad.masked_fill(grad.abs() < 0.1, -0.0)


def tables(function: Callable[..., tuple[Tensor, Tensor]], drawn: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    indices, probs, grad = drawn
    leaf = probs.clone().requires_grad_()
    routing_map, probabilities = function(indices, leaf, EXPERTS)
    return [routing_map, probabilities, *torch.autograd.grad(probabilities, leaf, grad)]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("keep", [0.7, 1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tables_have_the_bits_of_indexing_with_a_mask(dtype: torch.dtype, keep: float, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    drawn = routing(dtype, keep=keep)
    want = tables(masked, drawn)
    with no_synchronization():
        got = tables(indices_to_multihot, drawn)
    assert all(map(same_bits, want, got))


@needs_cuda
def test_indexing_with_a_mask_synchronizes() -> None:
    """Indexing with a mask synchronizes in forward and in backward: the test above can fail."""
    indices, probs, grad = routing(torch.float32)
    with no_synchronization(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        masked(indices, probs, EXPERTS)
    probs.requires_grad_()
    _, probabilities = masked(indices, probs, EXPERTS)
    with no_synchronization(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        probabilities.backward(grad)


@needs_cuda
def test_tables_in_a_graph() -> None:
    torch.use_deterministic_algorithms(False)
    indices, probs, grad = routing(torch.bfloat16)
    leaf = probs.clone().requires_grad_()

    def run() -> list[Tensor]:
        routing_map, probabilities = indices_to_multihot(indices, leaf, EXPERTS)
        return [routing_map, probabilities, *torch.autograd.grad(probabilities, leaf, grad)]

    results, graph = captured(run)
    for seed in (5, 6):
        drawn = routing(torch.bfloat16, seed)
        with torch.no_grad():
            for place, value in zip((indices, leaf, grad), drawn, strict=True):
                place.copy_(value)
        graph.replay()
        assert all(map(same_bits, results, tables(masked, drawn)))
