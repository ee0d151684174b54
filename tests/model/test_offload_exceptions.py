"""Exceptions, interrupts and devices that fail: nothing stays installed or held, and the next step works."""

import contextlib
import warnings

import pytest
import torch
from helpers import Failing, no_gc, nothing_held
from torch import nn
from whole_model import UNIT, Wave, Waves, call, equal, loop, nothing_installed, offload, start, train

import actoffload

ERRORS: dict[str, type[BaseException]] = {"before": KeyError, "in": KeyboardInterrupt, "after": SystemExit}
"""What a block raises before, in and after its work.  An instance would be held by its own traceback."""


class Fails(Wave):
    """A block that fails once: before, in or after its work."""

    fails = ""

    def forward(self, x):
        fails, self.fails = self.fails, ""
        for where, work in (("before", lambda x: x * self.scale), ("in", torch.sin), ("after", None)):
            if fails == where:
                raise ERRORS[where]
            x = x if work is None else work(x)
        return x


# In forward


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


@pytest.mark.parametrize("where", ["before", "in", "after"])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("run", [call, loop], ids=["the model", "a loop"])
def test_an_exception_in_forward(run, at, where):
    model = Waves(6, Fails)
    handle = offload(model)
    with no_gc():
        for then in (run, loop if run is call else call):
            for _ in range(2):
                model.blocks[at].fails = where
                with contextlib.suppress(ERRORS[where]):
                    run(model, start())
                nothing_installed()
                nothing_held(handle)
            right(model, handle, then)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("hook", ["forward_pre", "forward", "backward", "full backward"])
@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize("of", ["model", "block"])
def test_an_exception_in_a_hook(hook, first, of):
    model = Waves(6)
    handle = None if first else offload(model)
    owner = model if of == "model" else model.blocks[2]

    def boom(*_):
        if fuse:
            fuse.clear()
            raise KeyError("boom")

    register = {
        "forward_pre": owner.register_forward_pre_hook,
        "forward": owner.register_forward_hook,
        "backward": owner.register_full_backward_pre_hook,
        "full backward": owner.register_full_backward_hook,
    }[hook]
    register(boom)
    handle = offload(model) if handle is None else handle
    with no_gc():
        for _ in range(2):
            fuse = [True]
            with contextlib.suppress(KeyError):
                model(start()).sum().backward()
            assert not fuse
            nothing_installed()
            torch.ones(1, requires_grad=True).sum().backward()  # pops what autograd left in its queue
            nothing_held(handle)
        right(model, handle)


# A device that fails


@pytest.mark.parametrize("what", ["empty_host", "to_host", "empty_device", "to_device", "wait"])
def test_a_device_that_fails(what):
    """Whichever call of a step fails, for lack of memory say: the next step works."""
    device = Failing()
    model = Waves(6)
    handle = offload(model, device=device)
    model(start()).sum().backward()
    calls = device.calls[what]
    assert calls >= 1 if what == "empty_host" else calls >= 8  # two tensors of each of four groups
    with no_gc(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # host memory that runs out stays a warning
        for after in range(2 * calls):
            device.fail(what, after=after // 2)
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
