"""Compatibility of `actoffload.offload` with other parts of PyTorch on a GPU: equal bits, and bytes are offloaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composing import OFFLOADED, Offload, both, gradients
from gpu_harness import CUDA, DEVICE, KINDS, ROWS, WIDTH, Block, lenient, make_input, needs_cuda
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import actoffload
from actoffload import device as devices

pytestmark = [pytest.mark.gpu, *lenient]


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_blocks(dynamic: bool) -> None:
    if not (CUDA and (shutil.which("gcc") or shutil.which("cc"))):
        pytest.skip("inductor needs CUDA, and a C compiler for what starts its kernels")

    def program(offload: Offload) -> list[Tensor]:
        torch._dynamo.reset()
        model = Stack("mlp")
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=dynamic)
        offload(model)
        results = train(model)
        if dynamic:
            model(make_input(model, 7, rows=ROWS // 2)).square().mean().backward()
            results += gradients(model)
        return results

    offloaded(program)


STEPS = 3


class Stack(nn.Module):
    """Six blocks: of a kind in `KINDS`, or made by a function."""

    def __init__(self, kind: str | Callable[[], nn.Module], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        make = (lambda: KINDS[kind](WIDTH)) if isinstance(kind, str) else kind
        self.blocks = nn.ModuleList([make() for _ in range(OFFLOADED + 2)])
        self.to(DEVICE, dtype or (torch.float32 if kind in ("linear", "mlp") else torch.bfloat16))

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def offloaded(program: Callable[[Offload], list[Tensor]], **options: Any) -> actoffload.report.Statistics:
    """Run a program without and with offloading on the device of this machine; require equal bits."""
    statistics = both(program, device=devices.backend(), **options).statistics()
    assert statistics.bytes_offloaded > 0
    assert statistics.reloaded_on_demand == 0
    return statistics


def train(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None, steps: int = STEPS) -> list[Tensor]:
    found = []
    for k in range(steps):
        y = (model if run is None else run)(make_input(model, k).requires_grad_() * 1.0)
        y.float().square().mean().backward()
        found += [y.detach(), *gradients(model)]
        del y
    return found


def training(make: Callable[[], nn.Module]) -> Callable[[Offload], list[Tensor]]:
    def program(offload: Offload) -> list[Tensor]:
        model = make()
        offload(model)
        return train(model)

    return program


HEADS = 8


class Attending(Block):
    """A block whose attention is a function of query, key and value, each [1, heads, rows, head width]."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(WIDTH, HEADS)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(1, rows, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(rows, width))
        return x + self.mlp(self.norm2(x))


def with_backend(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def exists(backend: SDPBackend) -> bool:
    q = torch.zeros(1, HEADS, 128, WIDTH // HEADS, device=DEVICE, dtype=torch.bfloat16)
    try:
        with_backend(backend)(q, q, q)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_attention_backends(backend: SDPBackend) -> None:
    if not exists(backend):
        pytest.skip("no kernel of this backend for this device")
    statistics = offloaded(training(lambda: Stack(lambda: Attending(with_backend(backend)))))
    if backend is SDPBackend.MATH:
        assert statistics.bytes_offloaded > STEPS * OFFLOADED * HEADS * ROWS * ROWS * 2


def offsets() -> Tensor:
    return torch.tensor([0, ROWS // 8, ROWS // 2, ROWS], dtype=torch.int32, device=DEVICE)


@needs_cuda
def test_attention_over_sequences_of_different_lengths() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))  # [rows, heads, head width]
        return varlen.varlen_attn(*packed, offsets(), offsets(), ROWS // 2, ROWS // 2).transpose(0, 1)[None]

    offloaded(training(lambda: Stack(lambda: Attending(attend))))
