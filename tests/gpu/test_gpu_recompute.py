"""Recomputation on a GPU: equal bits, budgets that are kept, captured graphs, and no synchronization."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_harness import CUDA, DEVICE, Result, flash, lenient, needs_cuda, steady
from offload_harness import Net, make, offload, run_step, step
from test_gpu_graphs import WholeStep
from torch import Tensor, nn

import actoffload
from actoffload.measure import MemoryMeter

pytestmark = [pytest.mark.gpu, *lenient]

ROWS = 4096 if CUDA else 256


def everything(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return True


POLICIES = {
    "nothing": True,
    "products": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    "everything": everything,
    "attention": [torch.ops.aten._scaled_dot_product_flash_attention.default],
}
OPTIONS: dict[str, dict[str, Any]] = {"kept": {"fraction": 0.0}, "offloaded": {}, "half": {"num_layers": 4}}


class Dropping(Net):
    """Drops after each block."""

    def __init__(self, kind: str = "mlp", count: int = 8) -> None:
        super().__init__(kind, count)
        self.blocks = nn.ModuleList([nn.Sequential(block, nn.Dropout(0.2)) for block in self.blocks])


class Compiled(Net):
    """Compiles each block."""

    def __init__(self, kind: str = "mlp", count: int = 6) -> None:
        super().__init__(kind, count)
        for block in self.blocks:
            block.compile()


def seeded(model: nn.Module, seed: int) -> Result:
    torch.manual_seed(seed)
    return step(model, seed, ROWS)


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["attention", "mlp", "dropping"])
def test_bit_by_bit(kind: str, policy: str, how: str) -> None:
    model = make("mlp", 8, Dropping) if kind == "dropping" else make(kind, 8)
    with flash():
        want = [seeded(model, seed) for seed in range(4)]
        handle = offload(model, recompute=POLICIES[policy], **OPTIONS[how])
        for seed in range(4):
            assert seeded(model, seed).differences(want[seed]) == []
    assert len(handle.plan.recomputed) == 8
    statistics = handle.statistics()
    assert statistics.reloaded_on_demand == 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0
    handle.remove()


@needs_cuda
def test_compiled_blocks_bit_by_bit() -> None:
    model = make("mlp", 6, Compiled)
    want = [step(model, seed, ROWS) for seed in range(3)]
    for how in OPTIONS.values():
        handle = offload(model, recompute=True, **how)
        for seed in range(3):
            assert step(model, seed, ROWS).differences(want[seed]) == []
        handle.remove()


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_compiled_as_a_whole_bit_by_bit() -> None:
    """Backward runs in another thread than forward, and recomputes there what was compiled."""
    model = make("mlp", 6)
    for compiled in (True, False):
        torch._dynamo.reset()
        if compiled:
            model.compile(backend="aot_eager")
        want = [step(model, seed, ROWS) for seed in range(3)]
        for how in OPTIONS.values():
            handle = offload(model, recompute=True, **how)
            for seed in range(3):
                assert step(model, seed, ROWS).differences(want[seed]) == []
            assert handle.report().refused == {}
            handle.remove()
        model._compiled_call_impl = None
    torch._dynamo.reset()


class Uncounted(nn.Module):
    """Running statistics without a count of the batches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=True)


NORMS = {"batch": nn.BatchNorm2d, "uncounted": Uncounted, "half": nn.BatchNorm2d, "compiled": nn.BatchNorm2d}


@pytest.mark.parametrize("policy", [POLICIES["products"], True], ids=["products", "nothing"])
@pytest.mark.parametrize("kind", NORMS)
def test_running_statistics_are_updated_once(kind: str, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    width, x = 16, torch.randn(4, 16, 32, 32, device=DEVICE)

    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), NORMS[kind](width), nn.ReLU(inplace=True))

    def train(offloads: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[block() for _ in range(6)]).to(DEVICE).to(memory_format=torch.channels_last)
        for each in model if kind == "compiled" else ():
            each.compile()
        handle = offload(model, layers="?", recompute=policy) if offloads else None
        found = []
        for _ in range(4):
            model.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=kind == "half"):
                y = model(x)
            y.float().square().mean().backward()
            found += [y.detach(), *(weight.grad.clone() for weight in model.parameters())]
        if handle is not None:
            if kind == "compiled":  # a second run of compiled code would update them again
                assert "would update running statistics twice" in handle.plan.because
            else:
                assert len(handle.plan.recomputed) == 6
            handle.remove()
        return [*found, *model.buffers()]

    assert all(map(torch.equal, train(True), train(False)))


# Budgets


def settled(handle: actoffload.OffloadHandle, peak: Callable[[int], int]) -> list[int]:
    """Return the peaks of the passes until the plan is final, and of two with it."""
    peaks = [peak(0), peak(1)]
    while handle.settling:
        peaks.append(peak(len(peaks) % 2))
    return [*peaks, peak(0), peak(1)]


@needs_cuda
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
        assert 0.97 * plan.peak_bytes <= peaks[-1] <= plan.peak_bytes + 4096  # results of the alarm
        for seed in range(2):
            model.zero_grad()
            assert step(model, seed, rows).differences(want[seed]) == []
    handle.remove()


# Graphs, and the host


@needs_cuda
@pytest.mark.parametrize("policy", ["nothing", "products"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "attention"])
def test_a_captured_step(kind: str, policy: str) -> None:
    model = make(kind, 8)
    with flash():
        want = [step(model, seed, ROWS) for seed in range(4)]
        model.zero_grad()
        handle = offload(model, recompute=POLICIES[policy], num_layers=4)
        graph = WholeStep(model, lambda layers, x: model(x), ROWS)
        assert len(handle.plan.recomputed) == 8
        assert "Not recomputed" not in handle.plan.because
        for seed in range(4):
            assert graph.replay(seed).differences(want[seed]) == []
    handle.remove()


@needs_cuda
def test_a_captured_step_with_dropout() -> None:
    """Masks are kept, so nothing is drawn again."""
    model = make("mlp", 8, Dropping)
    handle = offload(model, recompute=True, num_layers=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actoffload.HostMemoryWarning)  # the steps before saved less
        graph = WholeStep(model, lambda layers, x: model(x), ROWS)
    assert "Not recomputed" not in handle.plan.because
    first, second = graph.replay(0), graph.replay(0)
    assert first.differences(second), "each replay draws other numbers"
    handle.remove()


@needs_cuda
@pytest.mark.parametrize("policy", ["nothing", "products"])
def test_a_steady_step_neither_synchronizes_nor_allocates(policy: str) -> None:
    model = make("attention", 8)
    handle = offload(model, recompute=POLICIES[policy], num_layers=6)
    with flash():
        for seed in range(4):
            run_step(model, seed)
        with steady():
            for seed in range(4, 8):
                run_step(model, seed)
    handle.remove()
