"""Replay on a GPU of what only a GPU has: its compiler and kernels, budgets, and the peak of a block in backward."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from gpu_harness import DEVICE, flash, gpu, make, offload, run_step, step
from torch import Tensor, nn
from whole_model import equal

import actoffload
from actoffload.measure import MemoryMeter

pytestmark = gpu


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_bit_by_bit(recompute: bool, dynamic: bool) -> None:
    torch._dynamo.reset()
    model = make("mlp", 6)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=dynamic)
    want = [step(model, seed, 4096 >> (seed % 2 * dynamic)) for seed in range(3)]
    for how in ({}, {"num_layers": 4}, *([{"fraction": 0.0}] * recompute)):
        with offload(model, recompute=recompute, **how) as handle:
            for seed in range(3):
                equal(step(model, seed, 4096 >> (seed % 2 * dynamic)), want[seed])
            assert "Not recomputed" not in handle.plan.because
    torch._dynamo.reset()


# Budgets


def settled(handle: actoffload.OffloadHandle, peak: Callable[[int], int]) -> list[int]:
    """Return the peaks of the passes until the plan is final, and of two with it."""
    peaks = [peak(0), peak(1)]
    while handle.settling:
        peaks.append(peak(len(peaks) % 2))
    return [*peaks, peak(0), peak(1)]


@pytest.mark.parametrize(("kind", "share"), [("mlp", 0.25), ("mlp", 0.75), ("attention", 0.5)])
def test_a_budget_is_kept_in_every_pass_and_every_bit(kind: str, share: float) -> None:
    """The budget lies between the peaks of the leanest plan and of no offload."""
    model, rows = make(kind, 16), 32768
    with flash():
        want = [step(model, seed, rows) for seed in range(2)]

        def peak(seed: int) -> int:
            with MemoryMeter() as meter:
                run_step(model, seed, rows)
            model.zero_grad()
            return meter.peak_bytes

        model.zero_grad()
        without = peak(0)
        handle = offload(model, fraction=None, memory_budget=1024)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no plan reaches that
            least = settled(handle, peak)[-1]
        handle.remove()
        budget = int(least + share * (without - least))
        handle = offload(model, fraction=None, memory_budget=budget)
        peaks = settled(handle, peak)
        assert max(peaks) <= budget
        plan = handle.plan
        assert plan.peak_bytes is not None
        assert 0.95 * plan.peak_bytes <= peaks[-1] <= plan.peak_bytes + 4096  # results of the alarm
        for seed in range(2):
            model.zero_grad()
            equal(step(model, seed, rows), want[seed])
    handle.remove()


# Kernels


class LigerBlock(nn.Module):
    """Queries times keys, and a gated MLP, with functions of Liger, whose kernels dispatch does not see.

    The rotary embedding writes to the queries and keys that it gets, and returns them.
    """

    dropped = 3 * 1536 + 2 * 512  # features of a token

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.liger = pytest.importorskip("liger_kernel.transformers")
        self.norm = self.liger.LigerRMSNorm(width)
        self.queries, self.keys = nn.Linear(width, width), nn.Linear(width, width)
        config = SimpleNamespace(hidden_size=width, intermediate_size=3 * width, hidden_act="silu")
        self.mlp = self.liger.LigerSwiGLUMLP(config)
        self.register_buffer("angles", torch.arange(1024.0)[None, :, None] / torch.arange(1.0, 65.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (linear(x).unflatten(-1, (8, 64)).transpose(1, 2) for linear in (self.queries, self.keys))
        q, k = self.liger.liger_rotary_pos_emb(q, k, self.angles.cos(), self.angles.sin())
        x = x + (q * k).transpose(1, 2).flatten(2)
        return x + self.mlp(self.norm(x))


class ExpertBlock(nn.Module):
    """Experts that are counted on the device; half of the rows belong to none."""

    dropped = 3 * 1536

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.experts = actoffload.moe.GroupedMLP(8, width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        counts = torch.full((8,), len(rows) // 16, device=x.device)
        return x + self.experts(rows.sin(), counts, padded=True).view_as(x)


class FourBitBlock(nn.Module):
    """A gated MLP with frozen weights in 4 bits, and trained ones of low rank beside each."""

    dropped = 3 * 1536

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        linear = pytest.importorskip("bitsandbytes").nn.Linear4bit
        for name, rows, columns in (("gate", width, 3 * width), ("up", width, 3 * width), ("down", 3 * width, width)):
            self.add_module(name, linear(rows, columns, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"))
            self.add_module(f"{name}_lora", nn.Sequential(nn.Linear(rows, 8), nn.Linear(8, columns)))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x) + self.gate_lora(x), self.up(x) + self.up_lora(x)
        y = nn.functional.silu(gate) * up
        return x + self.down(y) + self.down_lora(y)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("block", [LigerBlock, ExpertBlock, FourBitBlock])
def test_functions_with_kernels_of_their_own_are_replayed(block: Callable[[], nn.Module], fraction: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(6)]).to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 1024, 512, device=DEVICE, dtype=torch.bfloat16)

    def run() -> tuple[list[Tensor], int]:
        model.zero_grad()
        y = model(x * 1.0)
        saved = torch.cuda.memory_allocated()
        y.float().square().mean().backward()
        return [weight.grad.cpu() for weight in model.parameters() if weight.grad is not None], saved

    want, without = run()
    with actoffload.offload(model, recompute=True, min_bytes=2**16, fraction=fraction) as handle:
        for _ in range(5):
            got, saved = run()
            assert all(map(torch.equal, got, want))
        assert "Not recomputed" not in handle.plan.because
        dropped = model[0].dropped  # gate, up and their product; queries and keys
        assert without - saved > 5 * 4 * 1024 * dropped * 2


class DroppingBlock(nn.Module):
    """A transformer block with dropout in its attention, behind it, and in the MLP."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(self.dropout(nn.functional.gelu(self.up(x)))))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_dropout_is_drawn_again(fraction: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[DroppingBlock() for _ in range(6)]).to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 1024, 512, device=DEVICE, dtype=torch.bfloat16)
    weights = list(model.parameters())

    def run(k: int) -> tuple[list[Tensor], int]:
        torch.manual_seed(k)
        with flash():
            y = model(x * 1.0)
            saved = torch.cuda.memory_allocated()
            if k % 2:
                torch.manual_seed(100 + k)  # before backward, which draws nothing
            state = torch.cuda.get_rng_state()
            gradients = torch.autograd.grad(y.float().square().mean(), weights)
        assert torch.equal(state, torch.cuda.get_rng_state())
        return [each.cpu() for each in gradients], saved

    want = [run(k) for k in range(4)]
    before = torch.cuda.memory_allocated()
    with actoffload.offload(model, recompute=True, min_bytes=2**16, fraction=fraction) as handle:
        for _ in range(2):
            for k in range(4):
                got, saved = run(k)
                equal(got, want[k][0])
        inputs = 6 * x.nbytes
        assert saved - before < 1.5 * inputs < 0.2 * (want[3][1] - before), "of a block, its input stays"
        assert "Not recomputed" not in handle.plan.because
        if not fraction:  # the masks stay, because offsets cannot be read in a graph
            graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
            with flash(), torch.cuda.graph(graph):
                made = torch.autograd.grad(model(x * 1.0).float().square().mean(), weights)
            for k in range(4):
                generator.manual_seed(k)
                graph.replay()
                equal([each.cpu() for each in made], want[k][0])


def test_the_halves_of_a_block_are_made_again_one_after_the_other() -> None:
    """The MLP is used and freed before attention is made again, so the peak is less than that of checkpointing."""

    class Block(nn.Module):
        def __init__(self, width: int = 1024) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            normed = self.norms[1](x)
            return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))

    model = nn.Sequential(*[Block() for _ in range(2)]).to(DEVICE, torch.bfloat16)
    x = torch.randn(1, 16384, 1024, device=DEVICE, dtype=torch.bfloat16)

    def peak(run: nn.Module) -> int:
        model.zero_grad()
        with MemoryMeter() as meter, flash():
            run(x * 1.0).float().square().mean().backward()
        return meter.peak_bytes

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for block in model:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    base = torch.cuda.memory_allocated()
    checkpointed = [peak(Checkpointed()) for _ in range(3)][-1]
    with actoffload.offload(model, recompute=True, fraction=0.0):
        replayed = [peak(model) for _ in range(5)][-1]
    assert replayed - base < 0.97 * (checkpointed - base)
