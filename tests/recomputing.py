"""What the tests of recomputation share: programs that run without it and with, and counts of what runs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from composing import BLOCKS, Net, Offload, both, dropping, train
from helpers import nothing_held
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from whole_model import equal, offload

from actoffload._torch.autograd import NO_BACKWARD, backward_id


def everything(ctx: object, operator: object, *args: object, **kwargs: object) -> bool:
    """Save the outputs of all operators."""
    return True


POLICIES = {"nothing": [], "products": True, "everything": everything}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
fractions = pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["kept", "offloaded"])


class Counted(nn.Module):
    """Counts how often a block is called in forward and in backward."""

    forward_calls = backward_calls = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if backward_id() == NO_BACKWARD:
            Counted.forward_calls += 1
        else:
            Counted.backward_calls += 1
        return self.inner(*args, **kwargs)


def check(program: Any, policy: Any = True, *, recomputed: int, fraction: float = 1.0, **more: Any) -> Any:
    """Compare a program with and without; `recomputed` calls of blocks have to run again in backward."""

    def with_policy(offload: Offload) -> list[Tensor]:
        return program(lambda model, **options: offload(model, recompute=policy, fraction=fraction, **options))

    Counted.forward_calls = Counted.backward_calls = 0
    handle = both(with_policy, **{"offloads": fraction > 0, **more})
    assert Counted.backward_calls == recomputed
    return handle


def simple(make: Any, use: Any = train) -> Any:
    """Return a program that makes a model, offloads it and uses it; the first pass is watched."""

    def program(offload: Offload) -> list[Tensor]:
        model = make()
        offload(model)
        return [*train(model, 1), *use(model)]

    return program


def counted(make: Any = dropping) -> Any:
    return lambda: Net(lambda: Counted(make()))


FIRST = BLOCKS - 1
"""Calls that are recomputed in the first pass: all but the one that is watched."""


class _Any:
    def __eq__(self, other: object) -> bool:
        return bool(other)


ANY = _Any()
"""Equal to any number of calls but none."""


def total(outputs: Any) -> Tensor:
    """Return a loss that depends on each tensor among the outputs of a model."""
    leaves = tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
    return sum(
        (leaf.double() * torch.linspace(0.1, 1, leaf.numel()).view(leaf.shape)).sum()
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )


def whole_model(model: nn.Module, run: Any, policy: Any = True) -> str:
    """Compare two steps of a model in training with those that recompute; return why groups are not recomputed."""
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
    handle = offload(model, recompute=policy, fraction=1.0)
    equal([*step(), *step()], want)
    nothing_held(handle)
    because = handle.plan.because
    again = any(group.recomputed for group in handle.report().groups)
    handle.remove()
    assert again or "Not recomputed" in because
    return because
