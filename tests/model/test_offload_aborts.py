"""A device that fails, and a thousand steps with random aborts."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings

import pytest
import torch
from helpers import Failing, no_gc, nothing_held
from torch import nn
from whole_model import UNIT, Wave, Waves, call, data, equal, nothing_installed, offload, train

import actoffload


def start() -> torch.Tensor:
    return data().requires_grad_() * 1.0


def loop(model, x):
    for block in model.blocks:
        x = block(x)
    return x


def right(model: nn.Module, handle: actoffload.OffloadHandle, run=call) -> None:
    """Check that the next steps are as if nothing had happened."""
    model.zero_grad(set_to_none=True)
    with handle.paused():
        want = train(model, run, steps=2)
    handle.reset_statistics()
    equal(train(model, run, steps=2), want)
    statistics = handle.statistics()
    assert statistics.passes == 2
    assert statistics.bytes_offloaded == 2 * 8 * UNIT
    assert statistics.reloaded_on_demand == 0
    nothing_held(handle)
    nothing_installed()


# A device that fails


@pytest.mark.parametrize("calls_before", [0, 1, 3, 7, 9])
@pytest.mark.parametrize("what", ["empty_host", "to_host", "empty_device", "to_device", "wait"])
def test_a_device_that_fails(what, calls_before):
    device = Failing()
    model = Waves(6)
    handle = offload(model, device=device)
    with no_gc(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # host memory that runs out stays a warning
        for _ in range(2):
            device.fail(what, after=calls_before)
            with contextlib.suppress(RuntimeError):
                model(start()).sum().backward()
            device.failing.clear()
            device.after.clear()
            nothing_installed()
            torch.ones(1, requires_grad=True).sum().backward()
            nothing_held(handle)
        if what == "empty_host":  # a host that once had no memory is not asked again
            handle.remove()
            handle = offload(model, device=device)
        right(model, handle)


# A thousand steps


class ChaosError(Exception):
    """What a random abort raises."""


class Chaos(Wave):
    """A block that fails on demand: before, in or after its work, or in its backward."""

    fails = ""

    def forward(self, x):
        how, self.fails = self.fails, ""
        if how == "before":
            raise ChaosError
        y = super().forward(x)
        if how == "after":
            raise ChaosError
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "backward":
            y.register_hook(lambda grad: (_ for _ in ()).throw(ChaosError()))
        return y


def test_a_thousand_steps_with_random_aborts():
    rng = random.Random(7)
    model = Waves(6, Chaos)
    handle = offload(model)
    kinds = [
        "fine",
        "before",
        "after",
        "backward",
        "interrupt",
        "thrown away",
        "retained",
        "held back",
        "no grad",
        "loop",
    ]
    held_back, seen = [], []

    def run(kind):
        if kind in ("before", "after", "backward", "interrupt"):
            model.blocks[rng.randrange(6)].fails = kind
        if kind == "no grad":
            with torch.no_grad():
                model(data())
            return
        if kind == "loop":
            y = start()
            for block in model.blocks[: rng.randrange(1, 7)]:
                y = block(y)
        else:
            y = model(start())
        if kind == "held back":
            held_back.append(y)
            return
        if kind == "thrown away":
            return
        y.sum().backward(retain_graph=kind == "retained")
        if kind == "retained":
            y.sum().backward()

    with no_gc():
        for k in range(1000):
            kind = rng.choice(kinds)
            try:
                run(kind)
            except (ChaosError, KeyboardInterrupt):
                seen.append(kind)
            for block in model.blocks:
                block.fails = ""
            if len(held_back) > 3:
                held_back.pop(rng.randrange(4)).sum().backward()
            if kind != "interrupt":
                nothing_installed()
            if not held_back:
                nothing_held(handle)
            if k == 500:
                held_back.clear()
                # On the CPU autograd keeps the nodes that were due when it stopped, until another backward pops them.
                torch.ones(1, requires_grad=True).sum().backward()
                nothing_held(handle)
                host = handle.statistics().host_bytes
        held_back.clear()
        torch.ones(1, requires_grad=True).sum().backward()
        nothing_held(handle)
    assert {kind: seen.count(kind) > 20 for kind in ("before", "after", "backward", "interrupt")} == dict.fromkeys(
        ("before", "after", "backward", "interrupt"), True
    )
    assert handle.statistics().host_bytes <= 2 * host
    model.zero_grad(set_to_none=True)
    equal(train(model), train(copy.deepcopy(model)))
    handle.remove()
    nothing_installed(model)
