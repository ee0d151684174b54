"""Exceptions and interrupts in forward, recomputation and backward: nothing is held, and the next step works."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from composing import WIDTH, Net, batch, gradients
from helpers import no_gc, nothing_held
from interrupts import SOURCES, interrupted
from recomputing import POLICIES, policies
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from whole_model import equal, nothing_installed, offload

from actoffload._torch.autograd import NO_BACKWARD, backward_id
from actoffload.recompute import modes


class Explode(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.owner.fail("backward")
        return grad + 0 * ctx.saved_tensors[0], None


class Failing(nn.Module):
    """Raises an error once, at a place."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Any = None
        self.where = ""
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def fail(self, where: str) -> None:
        if self.error is not None and self.where == where:
            error, self.error = self.error, None
            raise error

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        self.fail("forward" if backward_id() == NO_BACKWARD else "recomputation")
        return x + Explode.apply(torch.dropout(self.down(y), 0.1, True), self)


def step(model: Net, k: int = 0) -> list[Tensor]:
    torch.manual_seed(3)
    y = model(batch(k))
    y.square().sum().backward()
    return [y.detach(), *gradients(model)]


def clean() -> None:
    nothing_installed()
    assert _get_current_dispatch_mode() is None


@policies
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
def test_an_error(where, error, fraction, policy):
    torch.manual_seed(0)
    model = Net(Failing)
    want = step(model)
    handle = offload(model, recompute=policy, layers="blocks.?", fraction=fraction)
    with no_gc():
        for at in (0, 3, 5):  # the first one is in the call that is watched, if it is in the forward
            block = model.blocks[at]
            for _ in range(2):
                block.error, block.where = error, where
                with contextlib.suppress(error):
                    step(model)
                if block.error is not None:  # the call that is watched is not recomputed
                    assert (at, where) == (0, "recomputation")
                    block.error = None
                model.zero_grad()
                clean()
                torch.ones(1, requires_grad=True).sum().backward()  # pops what autograd left in its queue
                nothing_held(handle)
            equal(step(model), want)
            nothing_held(handle)


@pytest.mark.parametrize("where", ["recomputation", "backward"])
def test_a_retained_graph_can_be_used_after_an_error(where):
    torch.manual_seed(0)
    model = Net(Failing)
    want = step(model)
    handle = offload(model, recompute=True, layers="blocks.?", fraction=1.0)
    step(model)
    torch.manual_seed(3)
    model.blocks[2].error, model.blocks[2].where = KeyError, where
    y = model(batch())
    with contextlib.suppress(KeyError):
        y.square().sum().backward(retain_graph=True)
    assert model.blocks[2].error is None
    model.zero_grad()
    y.square().sum().backward()
    equal([y.detach(), *gradients(model)], want)
    del y
    nothing_held(handle)


STRIDE = 211
"""Bytecodes between two interrupts that are tried."""

FILES = tuple(str(SOURCES / name) for name in ("model", "recompute", "_torch"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", [False, True], ids=["recomputed", "watched"])
def test_an_interrupt_at_many_bytecodes_of_a_forward(policy, first):
    torch.manual_seed(0)
    model = Net(Failing)
    del model.blocks[3:]
    want = step(model)
    n, came = 0, True
    handle = offload(model, recompute=POLICIES[policy], layers="blocks.?", fraction=1.0)
    step(model)
    with no_gc():
        while came:
            if first:
                handle.remove()
                handle = offload(model, recompute=POLICIES[policy], layers="blocks.?", fraction=1.0)
            came = interrupted(lambda: model(batch()), n, FILES)
            clean()
            if n % (5 * STRIDE) == 0:
                equal(step(model), want)
                nothing_held(handle)
            n += STRIDE
    assert n > 1000
    equal(step(model), want)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_many_bytecodes_of_a_recomputation():
    torch.manual_seed(0)
    model = Net(Failing)
    del model.blocks[3:]
    want = step(model)
    handle = offload(model, recompute=POLICIES["everything"], layers="blocks.?", fraction=1.0)
    step(model)
    n, came = 0, True
    with no_gc():
        while came:
            loss = model(batch()).square().sum()
            came = interrupted(loss.backward, n, FILES)
            del loss
            model.zero_grad()
            with torch.no_grad():
                model(batch())
            equal(step(model), want)
            clean()
            n += STRIDE
        nothing_held(handle)
    assert n > 500


@pytest.mark.parametrize("where", ["_Saving", "_Returning"])
def test_a_mode_whose_removal_an_interrupt_prevented(where, monkeypatch):
    """The interrupt comes when the mode is installed and the block that removes it has not begun."""
    torch.manual_seed(0)
    model = Net(Failing)
    want = step(model, 1)  # of other data, for which the outputs that were saved are wrong
    handle = offload(model, recompute=POLICIES["everything"], layers="blocks.?", fraction=1.0)
    step(model)
    kind = getattr(modes, where)
    enter = kind.__enter__

    def interrupted_enter(self):
        enter(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__enter__", interrupted_enter)
        with contextlib.suppress(KeyboardInterrupt):
            step(model)
    model.zero_grad()
    if where == "_Saving":
        clean()
    equal(step(model, 1), want)
    clean()
    nothing_held(handle)
