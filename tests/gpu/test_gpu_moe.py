"""Grouped experts on a GPU: in a graph, without any tokens, and in a layer that never synchronizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_harness import CUDA, DEVICE, captured, gpu
from helpers import no_synchronization, same_bits
from moe_reference import poison
from torch import Tensor, nn

import actoffload
from actoffload import moe
from actoffload.moe import GroupedMLP, indices_to_multihot

pytestmark = gpu

needs_kernel = pytest.mark.skipif(
    CUDA and moe.capability(torch.device("cuda:0")) not in moe.KERNELS,
    reason="grouped_mm has no kernel for this device",
)

TOKENS, EXPERTS = 4096, 8
HIDDEN, FFN = 512, 768
COUNTS = [700, 0, 1200, 1, 0, 1500, 600, 95]


def on_device(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE)


def experts() -> GroupedMLP:
    torch.manual_seed(1)
    return GroupedMLP(EXPERTS, HIDDEN, FFN).to(DEVICE, torch.bfloat16)


def tokens(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, HIDDEN, generator=generator, device=DEVICE).bfloat16()


@needs_kernel
def test_experts_in_a_graph_take_any_counts() -> None:
    """The counts are on the device and change between replays."""
    mlp, rows = experts(), sum(COUNTS)
    leaf, grad, counts = tokens(rows).requires_grad_(), tokens(rows, seed=7), on_device(COUNTS)

    def run(counts: Tensor = counts) -> list[Tensor]:
        y = mlp(leaf, counts)
        return [y, *torch.autograd.grad(y, [leaf, *mlp.parameters()], grad)]

    results, graph = captured(run)
    for new in (COUNTS[::-1], [rows, 0, 0, 0, 0, 0, 0, 0], [rows // 8] * 8):
        counts.copy_(on_device(new))
        graph.replay()
        assert all(map(same_bits, results, run(on_device(new))))


NO_TOKENS = """
import torch
from actoffload.moe import GroupedMLP

mlp = GroupedMLP(4, 64, 128, device="cuda", dtype=torch.bfloat16)
for rows in (0, 32):
    x = torch.full((rows, 64), float("nan"), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = mlp(x, torch.zeros(4, dtype=torch.int64, device="cuda"), padded=True)
    for result in (y, *torch.autograd.grad(y.sum(), [x, *mlp.parameters()])):
        assert not result.any(), "not zero"
print("all zero")
"""


@needs_kernel
def test_no_tokens_at_all() -> None:
    """Run in a process of its own: such kernels used to hang on empty sums."""
    done = subprocess.run(
        [sys.executable, "-c", NO_TOKENS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(actoffload.__file__).parents[1])},
        check=False,
    )
    assert done.stdout.strip() == "all zero", done.stderr[-2000:]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
@pytest.mark.parametrize("deterministic", [True, False])
@needs_kernel
def test_a_complete_moe_layer_does_not_synchronize(deterministic: bool) -> None:
    """The layer of the guide: half of the experts are local, and the host does not know the number of their tokens."""
    torch.use_deterministic_algorithms(deterministic)
    mlp = experts()
    router = nn.Linear(HIDDEN, 2 * EXPERTS, device=DEVICE, dtype=torch.bfloat16)

    def run(x: Tensor) -> tuple[list[Tensor], Tensor]:
        probs, indices = router(x).float().softmax(dim=-1).to(x.dtype).topk(2)
        indices = torch.where(indices < EXPERTS, indices, -1)
        routing_map, probabilities = indices_to_multihot(indices, probs, EXPERTS)
        order = indices.remainder(EXPERTS + 1).flatten().argsort(stable=True)
        found = order // 2
        y = mlp(x[found], routing_map.sum(dim=0), padded=True)
        y = torch.zeros_like(x).index_add(0, found, y * probs.flatten()[order].unsqueeze(1))
        leaves = [x, *router.parameters(), *mlp.parameters()]
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)], probabilities

    run(tokens(TOKENS).requires_grad_())
    poison()
    x = tokens(TOKENS, seed=3).requires_grad_()
    with no_synchronization():
        results, probabilities = run(x)
    assert all(bool(result.isfinite().all()) for result in results)
    everyone = [mlp(x, [TOKENS * (e == k) for k in range(EXPERTS)]) for e in range(EXPERTS)]
    dense = sum(probabilities[:, e, None].float() * y.float() for e, y in enumerate(everyone))
    assert torch.allclose(results[0].float(), dense, rtol=0, atol=0.02 * dense.abs().max().item())
