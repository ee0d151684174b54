"""On CUDA, the lines that synchronize are named, in forward and backward, and the lines that the guide gives do not."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_harness import gpu

import actoffload.moe
from actoffload import find_synchronizations

pytestmark = gpu


@pytest.fixture(autouse=True)
def deterministic() -> None:
    """Leave the kernels as programs have them: deterministic ones may wait where the others do not."""


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    (at,) = [at for at, line in enumerate(lines) if text in line]
    return first + at


def item(x: torch.Tensor) -> float:
    y = x.sum()
    return y.item()


def test_the_line_is_named_and_nothing_is_left_behind(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(16, device="cuda")
    item(x)
    capfd.readouterr()
    with find_synchronizations() as found:
        item(x)
        item(x)
    (one,) = found
    assert (one.file, one.line, one.function) == (__file__, line_of(item, "y.item()"), "item")
    assert one.count == 2
    assert torch.cuda.get_sync_debug_mode() == 0
    assert capfd.readouterr() == ("", "")


# Backward


class ReadsItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        scale = grad.sum().item()
        return grad * scale


def hook(grad: torch.Tensor) -> None:
    float(grad.sum())


def test_lines_of_the_program_in_backward() -> None:
    x = torch.ones(16, device="cuda", requires_grad=True)
    y = ReadsItsGradient.apply(x)
    y.register_hook(hook)
    with find_synchronizations() as found:
        y.sum().backward()
    assert [(one.file, one.line) for one in found] == [
        (__file__, line_of(hook, "float(")),
        (__file__, line_of(ReadsItsGradient.backward, "scale = ")),
    ]


# The table of the guide


ROWS = {
    "loss.item()": "loss.detach()",
    "loss.cpu()": "pinned.copy_(loss, non_blocking=True)",
    "x[mask]": "torch.where(mask[:, None], x, 0.0)",
    "x[mask] = x[::2]": "torch.where(mask[:, None], full, x)",
    "mask.nonzero()": "torch.nonzero_static(mask, size=8)",
    "[(indices == e).nonzero() for e in range(4)]": "actoffload.moe.indices_to_multihot(indices, probs, 4)",
    "torch.unique(labels)": "torch.zeros(8, device='cuda').index_fill_(0, labels, 1.0)",
    "torch.bincount(labels, minlength=8)": "torch.zeros_like(labels).scatter_add_(0, labels, torch.ones_like(labels))",
    "x.repeat_interleave(repeats, 0)": "x.repeat_interleave(repeats, 0, output_size=16)",
    "torch.equal(x, full)": "(x == full).all()",
    "F.one_hot(labels)": "F.one_hot(labels, 8)",
    "torch.linalg.cholesky(matrix)": "torch.linalg.cholesky_ex(matrix)",
    "host.to('cuda')": "host.pin_memory().to('cuda', non_blocking=True)",
}


@pytest.mark.parametrize("waits", ROWS)
def test_the_table_of_the_guide(waits: str) -> None:
    def names() -> dict[str, Any]:
        x = torch.randn(8, 4, device="cuda")
        space: dict[str, Any] = {"torch": torch, "F": F, "actoffload": actoffload, "x": x, "host": torch.ones(8, 4)}
        space |= {"full": torch.zeros_like(x), "loss": x.sum(), "pinned": torch.empty((), pin_memory=True)}
        space |= {"mask": torch.arange(8, device="cuda") % 2 == 0, "labels": torch.arange(8, device="cuda")}
        space |= {"repeats": torch.full((8,), 2, device="cuda"), "matrix": torch.eye(4, device="cuda")}
        space |= {"indices": torch.tensor([[0, 1], [2, -1]], device="cuda"), "probs": torch.rand(2, 2, device="cuda")}
        return space

    for line, expected in ((waits, 1), (ROWS[waits], 0)):
        code = compile(line, "<row>", "exec")
        exec(code, names())  # libraries set themselves up in the first call
        space = names()
        with find_synchronizations() as found:
            exec(code, space)
        assert len({one.line for one in found}) == expected, f"{line}\n{found}"
