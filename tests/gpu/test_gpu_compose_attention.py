"""Compatibility of `actoffload.offload` with the kinds of attention: equal bits, and bytes are offloaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compose_harness import STEPS, Stack, offloaded, training
from composing import OFFLOADED, Offload, gradients
from gpu_harness import DEVICE, ROWS, WIDTH, Block, lenient, make_input, needs_cuda
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = [pytest.mark.gpu, *lenient]

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


@needs_cuda
def test_cudnn_attention() -> None:
    """Its backward is not deterministic and raises in deterministic mode: gradients are compared with a tolerance."""
    torch.use_deterministic_algorithms(False)
    if not exists(SDPBackend.CUDNN_ATTENTION):
        pytest.skip("no kernel of cuDNN for this device")
    seen: list[list[Tensor]] = []

    def program(offload: Offload) -> list[Tensor]:
        model = Stack(lambda: Attending(with_backend(SDPBackend.CUDNN_ATTENTION)))
        offload(model)
        y = model(make_input(model))
        y.float().square().mean().backward()
        seen.append(gradients(model))
        return [y.detach()]

    offloaded(program)
    for wanted, got in zip(*seen, strict=True):
        torch.testing.assert_close(got, wanted, rtol=5e-2, atol=1e-2 * float(wanted.abs().max()))


def offsets() -> Tensor:
    return torch.tensor([0, ROWS // 8, ROWS // 2, ROWS], dtype=torch.int32, device=DEVICE)


@needs_cuda
def test_attention_over_sequences_of_different_lengths() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))  # [rows, heads, head width]
        return varlen.varlen_attn(*packed, offsets(), offsets(), ROWS // 2, ROWS // 2).transpose(0, 1)[None]

    offloaded(training(lambda: Stack(lambda: Attending(attend))))


@needs_cuda
def test_flex_attention() -> None:
    """Without compilation it runs as plain operations."""
    from torch.nn.attention.flex_attention import flex_attention

    def near(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score - 0.1 * (row - column).abs()

    class Short(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:512])

    offloaded(training(lambda: Short(lambda: Attending(lambda q, k, v: flex_attention(q, k, v, score_mod=near)))))
