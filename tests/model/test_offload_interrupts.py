"""An interrupt at every bytecode: when the program has control again, nothing is installed, and the next step works."""

import contextlib
import threading
from typing import Any

import pytest
import torch
from helpers import no_gc, nothing_held
from interrupts import SOURCES, interrupted
from torch import nn
from whole_model import Run, Waves, call, data, equal, loop, measured, nothing_installed, offload, train

import actoffload

FOLLOWING = (str(SOURCES / "model"), str(SOURCES / "_torch"))
CONTEXT = (str(SOURCES / "context"), str(SOURCES / "engine" / "eligibility.py"), str(SOURCES / "_torch"))
ANY = (str(SOURCES),)


def as_before(handle: Any, model: nn.Module, want: list[torch.Tensor], nbytes: int, run: Run) -> None:
    """Check that a step has the same bits, and offloads as many bytes as before."""
    statistics = measured(handle, lambda: equal(train(model, run, steps=1), want))
    assert statistics.bytes_offloaded == nbytes


def fails(module: nn.Module, args: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("run", [call, loop], ids=["the model", "a loop"])
@pytest.mark.parametrize("files", [FOLLOWING, ANY], ids=["following", "anywhere"])
def test_an_interrupt_at_every_bytecode_of_a_forward(run, files):
    model = Waves(3)
    want = train(model, run, steps=1)
    handle = offload(model, num_layers=2)
    train(model, run, steps=2)
    nbytes = measured(handle, lambda: train(model, run, steps=1)).bytes_offloaded
    assert nbytes > 0
    x = data()
    n, step = 0, 41 if files is ANY else 5
    with no_gc():
        while interrupted(lambda: run(model, x), n, files):
            nothing_installed()
            if n % (41 * step) == 0:
                with torch.autograd.graph.save_on_cpu():
                    model.blocks[0].scale.mul(2.0).square().sum().backward()
                model.zero_grad(set_to_none=True)
                as_before(handle, model, want, nbytes, run)
                if files is FOLLOWING:  # elsewhere it may come between a change and its count
                    nothing_held(handle)
            n += step
    assert n > 1000
    nothing_installed()
    as_before(handle, model, want, nbytes, run)


def test_an_interrupt_at_every_bytecode_of_the_end_of_a_failed_forward():
    """The exception of the forward is one event, the interrupt of its cleanup is another."""
    model = Waves(3)
    handle = offload(model, num_layers=2)
    want = train(model, steps=1)
    hook = model.blocks[1].register_forward_pre_hook(fails)

    def run() -> None:
        with contextlib.suppress(ZeroDivisionError):
            model(data())

    counts: list[int] = []

    def every() -> None:
        n = 0
        while interrupted(run, n, FOLLOWING):
            nothing_installed()
            n += 1
        counts.append(n)

    # A tracer that raises inside an exception handler can leave its exception as the one being handled in this thread.
    thread = threading.Thread(target=every)
    thread.start()
    thread.join()
    assert counts[0] > 500
    hook.remove()
    assert measured(handle, lambda: equal(train(model, steps=1), want)).bytes_offloaded > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("saved", [False, True], ids=["idle", "before backward"])
def test_an_interrupted_removal_is_finished_by_a_second_call(saved):
    """All host memory is given back, wherever the interrupt comes."""
    n, done, step = 0, False, 23
    while not done:
        model = Waves(3)
        handle = offload(model, num_layers=2)
        train(model, steps=1)
        loss = model(data()).sum() if saved else None
        done = not interrupted(handle.remove, n, ANY)
        handle.remove()
        assert not handle.installed
        if loss is not None:
            loss.backward()
        del loss
        statistics = handle.statistics()
        assert statistics.host_bytes_used == 0
        assert statistics.host_bytes == 0
        nothing_installed()
        assert actoffload.OffloadHandle.of(model) is None
        n += step
    assert n > 1000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_host_pool_after_an_interrupted_trim():
    model = Waves(3)
    want = train(model, steps=1)
    handle = offload(model, num_layers=2)
    n, done, step = 0, False, 5
    while not done:
        train(model, steps=1)
        if n % 2:  # what was dropped is sorted in here, and in the others by trim
            assert handle.statistics().host_bytes > 0
        done = not interrupted(handle.trim, n, ANY)
        if n % (3 * step) == 0:
            equal(train(model, steps=1), want)
        handle.trim()
        assert handle.statistics().host_bytes == 0
        n += step
    assert n > 300
    equal(train(model, steps=1), want)


def test_an_interrupted_pause_ends_with_its_block():
    model = Waves(3)
    handle = offload(model, num_layers=2)

    def pause() -> None:
        with handle.paused():
            assert not handle.active

    n = 0
    while interrupted(pause, n, (*ANY, contextlib.__file__)):
        assert handle.active
        n += 1
    assert n > 20
    assert handle.active
    with handle.paused(), handle.paused() as inner:
        assert inner is handle
        assert not handle.active
    assert handle.active


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_every_bytecode_of_a_context():
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        context, sync = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]

    def forward() -> torch.Tensor:
        context.new_pass()
        x = data()
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)
        return x

    def step() -> list[torch.Tensor]:
        parameters = [p for layer in layers for p in layer.parameters()]
        return list(torch.autograd.grad(forward().sum(), parameters))

    want, n, left = step(), 0, 0
    while interrupted(forward, n, CONTEXT):
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            left += 1  # at the very beginning of __exit__
            context.__exit__(None, None, None)
        nothing_installed()
        assert not torch.nn.modules.module._global_forward_pre_hooks
        if n % 23 == 0:
            equal(step(), want)
        n += 1
    assert n > 300
    assert left <= 2 * len(layers)
    equal(step(), want)
