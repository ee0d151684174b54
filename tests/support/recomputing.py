"""What the tests of replay share: programs that run without offload and with, and the memory that forwards leave."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import composing
import helpers
import numpy as np
import pytest
import torch
from composing import WIDTH, Mlp
from helpers import no_gc, nothing_held
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from whole_model import equal, nothing_installed, offload

from actoffload.device.reference import CreatedStorages
from actoffload.report import Report

ROWS, BLOCKS, STEPS = 16, 4, 5

_aten = torch.ops.aten
COSTLY = [_aten.mm.default, _aten.addmm.default, _aten._scaled_dot_product_flash_attention_for_cpu.default]
POLICIES = {"everything": True, "cheap": COSTLY}

HELD = "held"  # everything, of which all that is made again stays until its last use, as a plan may say

policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
all_policies = pytest.mark.parametrize("policy", [*POLICIES.values(), HELD], ids=[*POLICIES, HELD])
fractions = pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["kept", "offloaded"])
# Each policy, with and without copies of what stays; `test_steps` has all pairs.
WAYS = {"kept-everything": (True, 0.0), "offloaded-cheap": (COSTLY, 1.0), "offloaded-held": (HELD, 1.0)}
ways = pytest.mark.parametrize(("policy", "fraction"), [*WAYS.values()][:2], ids=[*WAYS][:2])
all_ways = pytest.mark.parametrize(("policy", "fraction"), WAYS.values(), ids=WAYS)

Use = Callable[[nn.Module], Sequence[Tensor]]


class Linear(nn.Linear):
    """A linear of one width."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Applies(Linear):
    """A linear, an activation, and a function of the block, its input and the result of both."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor], activation: Any = torch.sin) -> None:
        super().__init__()
        self.function, self.activation = function, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x, self.activation(super().forward(x)))


class Net(composing.Net):
    """Blocks between two linears."""

    def __init__(self, block: Callable[[], nn.Module] = Mlp, count: int = BLOCKS) -> None:
        super().__init__(block, count)


def batch(k: int = 0, rows: int = ROWS) -> Tensor:
    """Return the data of a step."""
    return composing.batch(k, rows)


def train(model: nn.Module, steps: int = STEPS, start: int = 0) -> list[Tensor]:
    """Run some steps; return outputs, gradients, and buffers in the end."""
    return composing.train(model, steps, data=batch, start=start)


def check(
    make: Callable[[], nn.Module],
    use: Use = train,
    *,
    policy: Any = True,
    fraction: float = 0.0,
    freed: float | None = None,
    **options: Any,
) -> Any:
    """Compare the bits that a program gives with replay with those that it gives without offload.

    Parameters
    ----------
    make : callable
        Returns a model whose blocks are the groups.
    use : callable
        Runs the model and returns tensors, several times: in the first calls programs are found and proven.
    policy, fraction
        Arguments of `offload`; or `HELD`.
    freed : float, optional
        The part of the bytes of a forward that replay frees, at least; where it is 0, at most.  By default more
        than nothing; looked at where nothing is offloaded.
    """
    torch.manual_seed(0)
    model = make().to(helpers.PLACE)
    torch.manual_seed(1)
    want = [tensor.detach().clone() for tensor in use(model)]
    without = bytes_after_forward(model)
    torch.manual_seed(0)
    model = make().to(helpers.PLACE)
    recompute = True if policy == HELD else policy
    handle = offload(model, layers="blocks.?", recompute=recompute, fraction=fraction, **options)
    if policy == HELD:
        plan = replace(handle.plan, holds=True)
        handle.remove()
        handle = offload(model, plan=plan, fraction=None, **options)
    with no_gc():
        torch.manual_seed(1)
        got = use(model)
        equal(list(got), want)
        nothing_held(handle)
        clean()
        if fraction == 0.0:
            for _ in range(4):  # a program that changed the model in the meantime is traced and proven again
                left = bytes_after_forward(model)
            if freed == 0.0:
                assert left >= without, f"something is replayed: {left} of {without} bytes"
            else:
                assert left < without * (1.0 - (freed or 0.0)), f"nothing is replayed: {left} of {without} bytes"
    return handle


def clean(model: nn.Module | None = None) -> None:
    """Check that a call has left nothing: no saved-tensor hooks, no dispatch mode, no hooks on all modules."""
    nothing_installed(model)
    assert _get_current_dispatch_mode() is None
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


def bytes_after_forward(model: nn.Module, k: int = 0) -> int:
    """Return how many bytes that a forward has made exist while its graph does."""
    x = batch(k)
    torch.manual_seed(k)
    with CreatedStorages() as created:
        y = model(x)
    left = created.now
    del y
    return left


# Models of other libraries


def total(outputs: Any) -> Tensor:
    """Return a loss that depends on each tensor among the outputs of a model."""
    leaves = tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
    return sum(
        (leaf.double() * torch.linspace(0.1, 1, leaf.numel()).view(leaf.shape)).sum()
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )


def whole_model(model: nn.Module, run: Any) -> Report:
    """Compare two steps of a model in training with those that recompute; return the report."""
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(7)
        np.random.seed(7)  # which models of Hugging Face use
        loss = total(run())
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    want = [*step(), *step()]
    model.load_state_dict(before)
    handle = offload(model, recompute=True, fraction=1.0)
    equal([*step(), *step()], want)
    nothing_held(handle)
    report = handle.report()
    handle.remove()
    assert any(group.recomputed for group in report.groups)
    return report
