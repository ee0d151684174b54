"""What is dropped is freed, calls end with their graphs, and a forward that fails leaves nothing."""

import contextlib
import inspect
import weakref
from typing import Any

import pytest
import torch
from composing import gradients
from helpers import no_gc, nothing_held
from interrupts import SOURCES, interrupted
from recomputing import POLICIES, Mlp, Net, batch, check, clean, policies, train, ways
from torch import Tensor, nn
from whole_model import equal, offload

from actoffload._torch.tensors import storage_expired, storage_weakref
from actoffload.replay.tracer import Tracer


class Noting(Mlp):
    """Notes the storages that it makes."""

    made: dict[str, Any] = {}

    def note(self, name: str, x: Tensor) -> Tensor:
        Noting.made[name] = storage_weakref(x.untyped_storage())
        return x

    def forward(self, x):
        up = self.note("up", self.up(x))
        sin = self.note("sin", torch.sin(up))
        exp = self.note("exp", sin.exp())
        return x + self.note("down", self.down(exp))


def freed() -> set[str]:
    return {name for name, ref in Noting.made.items() if storage_expired(ref)}


@pytest.mark.parametrize(("policy", "gone"), [(True, {"up", "sin", "exp", "down"}), ("cheap", {"sin", "exp", "down"})])
@pytest.mark.parametrize("call", range(4))
def test_dropped_values_are_freed_at_the_end_of_the_forward(policy, gone, call):
    """From the first call on, in which all is compared."""
    model = Net(Noting)
    offload(model, layers="blocks.?", recompute=POLICIES.get(policy, policy), fraction=0.0)
    with no_gc():
        train(model, call)
        loss = model(batch()).sum()
        assert freed() == gone
        loss.backward()
        del loss
        assert freed() == {"up", "sin", "exp", "down"}


def test_a_larger_part_is_freed_when_it_has_ended():
    """In a settled call, and not at the end of the whole group only."""
    seen: list[set[str]] = []

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Noting(), Mlp()

        def forward(self, x):
            x = self.two(torch.sin(self.one(x)))
            seen.append(freed())
            return x

    model = Net(Two)
    offload(model, layers="blocks.?", recompute=True, fraction=0.0)
    with no_gc():
        train(model)
        seen.clear()
        model(batch()).sum().backward()
    assert seen == [{"up", "sin", "exp", "down"}] * len(seen)


@ways
def test_a_graph_that_is_dropped_frees_all(policy, fraction):
    """Without the garbage collector: nothing refers to itself."""
    model = Net(Noting)
    handle = offload(model, layers="blocks.?", recompute=policy, fraction=fraction)
    with no_gc():
        for k in range(6):
            x = batch(k)
            ref = weakref.ref(x)
            loss = model(x).sum()
            if k % 2:
                loss.backward()
            del loss, x
            nothing_held(handle)
            assert ref() is None
            assert freed() == {"up", "sin", "exp", "down"}


# Exceptions


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.block.explode("backward")
        return gradient, None


class Failing(nn.Module):
    """Raises an error in a part of its forward or backward, once."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.error, self.where = Mlp(), Mlp(), [], "forward"

    def explode(self, where):
        if self.error and self.where == where:
            raise self.error.pop()

    def forward(self, x):
        y = torch.sin(self.one(torch.sin(x))).exp()
        self.explode("forward")
        return Explode.apply(torch.sin(self.two(y)), self)


def step(model: nn.Module, k: int = 0) -> list[Tensor]:
    torch.manual_seed(k)
    loss = model(batch(k)).square().sum()
    loss.backward()
    return [loss.detach(), *gradients(model)]


@ways
@pytest.mark.parametrize(("where", "error"), [("forward", KeyError), ("backward", KeyboardInterrupt)])
@pytest.mark.parametrize("before", [0, 1, 3], ids=["traced", "proven", "settled"])
def test_an_error(where, error, fraction, policy, before):
    torch.manual_seed(0)
    model = Net(Failing)
    want = step(model)
    handle = offload(model, layers="blocks.?", recompute=policy, fraction=fraction)
    for _ in range(before):
        equal(step(model), want)
    with no_gc():
        for block in (model.blocks[2], model.blocks[0], model.blocks[3]):
            block.error, block.where = [error()], where
            with contextlib.suppress(error):
                step(model)
            assert not block.error
            model.zero_grad()
            clean()
            torch.ones(1, requires_grad=True).sum().backward()  # pops what autograd left in its queue
            nothing_held(handle)
        equal(step(model), want)
        clean()
        nothing_held(handle)


@policies
def test_an_error_that_the_model_handles(policy):
    class Handling(Net):
        def call(self, block, x):
            try:
                return block(x)
            except KeyError:
                return torch.sin(x).exp()

    def use(model):
        found = []
        for k in range(8):
            model.blocks[k % 3].error = [KeyError()] if k % 2 else []
            found += step(model, k)
        return found

    check(lambda: Handling(Failing), use, policy=policy)


STRIDE = 701
"""Bytecodes between two interrupts that are tried, but in first calls, which run more."""

FILES = tuple(str(SOURCES / name) for name in ("model", "replay", "_torch"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("part", "stride"), [("forward", STRIDE), ("first forward", 8 * STRIDE), ("backward", STRIDE // 2)]
)
def test_an_interrupt_at_many_bytecodes(part, stride):
    torch.manual_seed(0)
    model = Net(Failing, 3)
    want = step(model)
    n, came = 0, True
    handle = offload(model, layers="blocks.?", recompute=True, fraction=1.0)
    train(model, 3)
    with no_gc():
        while came:
            if part == "first forward":
                handle.remove()
                handle = offload(model, layers="blocks.?", recompute=True, fraction=1.0)
            run = model(batch()).square().sum().backward if part == "backward" else lambda: model(batch())
            came = interrupted(run, n, FILES)
            del run
            model.zero_grad()
            clean()
            if part == "backward" or n % (5 * stride) == 0:
                equal(step(model), want)
                nothing_held(handle)
            n += stride
    assert n > 500
    equal(step(model), want)


def test_a_tracer_whose_own_removal_is_interrupted(monkeypatch):
    torch.manual_seed(0)
    model = Net(Mlp, 3)
    want = step(model)
    offload(model, layers="blocks.?", recompute=True, fraction=1.0)
    end = Tracer.end
    interrupts = []

    def interrupt(self):
        if inspect.stack()[1].function != "remove_tracers":
            interrupts.append(self)
            raise KeyboardInterrupt
        end(self)

    with monkeypatch.context() as patch:
        patch.setattr(Tracer, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch())
    assert interrupts
    clean()
    equal(step(model), want)
