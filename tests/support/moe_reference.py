"""The grouped MLP in operations that autograd knows, and operands for both."""

import helpers
import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "swiglu": (lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], 2),
    "geglu": (lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], 2),
    "silu": (F.silu, 1),
    "gelu": (F.gelu, 1),
    "srelu": (lambda h: F.relu(h).square(), 1),
}
HIDDEN, FFN, OUT = 16, 24, 8
COUNTS = [5, 0, 3, 1, 0]


def reference(x: Tensor, counts: list[int], fc1: Tensor, fc2: Tensor, activation: str = "swiglu") -> Tensor:
    """Compute the same with operations that autograd knows, expert by expert."""
    parts = x[: sum(counts)].split(counts)
    done = [ACTIVATIONS[activation][0](part @ a.t()) @ b.t() for part, a, b in zip(parts, fc1, fc2, strict=True)]
    return torch.cat([*done, x.new_zeros(len(x) - sum(counts), fc2.shape[1])])


def operands(
    activation: str = "swiglu", dtype: torch.dtype = torch.float64, counts: list[int] = COUNTS, behind: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    wide = ACTIVATIONS[activation][1] * FFN
    shapes = [(sum(counts) + behind, HIDDEN), (len(counts), wide, HIDDEN), (len(counts), OUT, FFN)]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.to(helpers.PLACE, dtype).requires_grad_() for tensor in drawn]


def output_gradient(y: Tensor) -> Tensor:
    """Return a gradient of an output, which differs in every element."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y)


def gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y, leaves, output_gradient(y)))


def poison() -> None:
    """Fill the memory that the allocator of an accelerator returns next with NaN."""
    sizes = [1 << power for power in (8, 12, 16, 20, 23)] * 4 if helpers.PLACE.type == "cuda" else []
    blocks = [torch.full((size,), float("nan"), device=helpers.PLACE, dtype=torch.bfloat16) for size in sizes]
    del blocks
