"""Grouped experts on a GPU: no synchronization, tensors named by the arguments are kept, equal bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_harness import CUDA, DEVICE, gpu
from helpers import forward, no_synchronization, plain, same_bits
from moe_reference import reference
from torch import Tensor, nn

import actoffload
from actoffload.moe import GroupedMLP, indices_to_multihot
from actoffload.moe import grouped_linear as groups
from actoffload.report import Reason

pytestmark = gpu

needs_kernel = pytest.mark.skipif(
    CUDA and not groups._has_kernel(torch.device("cuda:0")), reason="grouped_mm has no kernel for this device"
)

TOKENS, EXPERTS = 4096, 8
HIDDEN, FFN = 512, 768
COUNTS = [700, 0, 1200, 1, 0, 1500, 600, 95]


def on_device(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE)


def experts(activation: str = "swiglu", dtype: torch.dtype = torch.bfloat16, **more: Any) -> GroupedMLP:
    torch.manual_seed(1)
    return GroupedMLP(EXPERTS, HIDDEN, FFN, activation=activation, **more).to(DEVICE, dtype)


def tokens(rows: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def run_experts(mlp: GroupedMLP, x: Tensor, counts: Any, grad: Tensor, **more: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = mlp(leaf, counts, **more)
    return [y, *torch.autograd.grad(y, [leaf, *mlp.parameters()], grad)]


def exact(mlp: GroupedMLP, x: Tensor, counts: list[int], grad: Tensor) -> list[Tensor]:
    """Compute the same in float64, one expert at a time, with operations that autograd differentiates."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *mlp.parameters())]
    y = reference(leaves[0], counts, *leaves[1:], mlp.activation)
    return [y, *torch.autograd.grad(y, leaves, grad.double())]


def poison() -> None:
    """Fill the memory that the allocator returns next with NaN."""
    blocks = [torch.full((n,), float("nan"), device=DEVICE, dtype=torch.bfloat16) for n in [1 << 20, 1 << 23] * 4]
    del blocks


@pytest.mark.parametrize("way", ["device", "list"])
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@needs_kernel
def test_experts_against_plain_autograd(activation: str, way: str) -> None:
    mlp = experts(activation)
    x, grad = tokens(sum(COUNTS)), tokens(sum(COUNTS), seed=7)
    counts = on_device(COUNTS) if way == "device" else COUNTS
    run_experts(mlp, x, counts, grad)
    poison()
    with no_synchronization():
        got = run_experts(mlp, x, counts, grad)
    for mine, theirs in zip(got, exact(mlp, x, COUNTS, grad), strict=True):
        assert mine.dtype is torch.bfloat16
        assert torch.allclose(mine.double(), theirs, rtol=0, atol=0.02 * theirs.abs().max().item())
    for gradient in got[2:]:
        for count, of_expert in zip(COUNTS, gradient, strict=True):
            assert count or not of_expert.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_counts_on_the_device_without_a_kernel_are_refused_and_a_list_is_not(dtype: torch.dtype) -> None:
    mlp = experts(dtype=dtype)
    x, grad = tokens(sum(COUNTS), dtype=dtype), tokens(sum(COUNTS), seed=7, dtype=dtype)
    counts = on_device(COUNTS)
    with no_synchronization():
        with pytest.raises(ValueError, match=r"Give tokens_per_expert as a list of ints"):
            mlp(x, counts)
        got = run_experts(mlp, x, COUNTS, grad)
    for mine, theirs in zip(got, exact(mlp, x, COUNTS, grad), strict=True):
        assert torch.allclose(mine.double(), theirs, rtol=0, atol=0.01 * theirs.abs().max().item())


class Layer(nn.Module):
    """A residual layer of experts with fixed routing to the even experts."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.mlp = experts(**more)

    def forward(self, x: Tensor) -> Tensor:
        indices = torch.arange(len(x), device=x.device).view(-1, 1) * EXPERTS // len(x) // 2 * 2
        probs = x[:, :1].sigmoid()
        routing_map, probabilities = indices_to_multihot(indices, probs, EXPERTS)
        return x + self.mlp(x, routing_map.sum(dim=0)) * probabilities.sum(dim=1, keepdim=True)


SAVED = {"fc1_input": HIDDEN, "activation_input": 2 * FFN, "fc2_input": FFN}


@pytest.mark.parametrize(
    "kept", [(), ("fc1_input",), ("activation_input",), ("fc2_input",), tuple(SAVED)], ids="+".join
)
@needs_kernel
def test_a_stack_of_experts_offloads_without_synchronization(kept: tuple[str, ...]) -> None:
    layers = nn.ModuleList([Layer(**{f"keep_{name}": True for name in kept}) for _ in range(5)])
    context, sync = actoffload.get_cpu_offload_context(True, 2, 5)

    def step(seed: int, run: Any = lambda layers, x: forward(layers, x, context, sync)) -> list[Tensor]:
        x = tokens(TOKENS, seed).requires_grad_()
        y = run(layers, x * 1.0)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *layers.parameters()])]

    for seed in range(2):
        step(seed)
    for seed in range(2, 4):
        want = step(seed, plain)
        context.reset_statistics()
        with no_synchronization():
            got = step(seed)
        assert all(map(same_bits, want, got))
        assert all(bool(t.isfinite().all()) for t in got)
        statistics = context.statistics()
        rows = [TOKENS * width * 2 for name, width in SAVED.items()]
        of_experts = [n for n, name in zip(rows, SAVED, strict=True) if name not in kept]
        # The slice of the sigmoid saves the input once more, as a small tensor; the product saves the expert output.
        outputs = TOKENS * HIDDEN * 2
        assert statistics.bytes_offloaded == 2 * (sum(of_experts) + outputs)
        assert statistics.reloaded_on_demand == 0
        assert statistics.tensors_kept.get(Reason.MARKED, 0) == 5 * len(kept)
        assert statistics.resident_bytes == statistics.host_bytes_used == 0


@needs_kernel
def test_experts_in_a_graph_take_any_counts() -> None:
    """The counts are on the device and change between replays."""
    mlp, rows = experts(), sum(COUNTS)
    x, grad, counts = tokens(rows), tokens(rows, seed=7), on_device(COUNTS)
    leaf = x.clone().requires_grad_()

    def run() -> list[Tensor]:
        y = mlp(leaf, counts)
        return [y, *torch.autograd.grad(y, [leaf, *mlp.parameters()], grad)]

    results, graph = captured(run)
    for new in (COUNTS[::-1], [rows, 0, 0, 0, 0, 0, 0, 0], [rows // 8] * 8):
        counts.copy_(on_device(new))
        graph.replay()
        assert all(map(same_bits, results, run_experts(mlp, x, on_device(new), grad)))


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


def captured(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Any]:
    """Capture `run` in a CUDA graph after a warm-up on a side stream; return its results and the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph
