"""What an offloaded model holds and for how long, also while it is measured: graphs, hooks, threads, captures."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers import in_threads, no_gc, nothing_held
from interrupts import SOURCES
from timed_device import BLOCK, PASSES, small, step
from whole_model import UNIT, Transformer, Waves, data, nothing_installed, offload, start

# By reference counts alone


def test_the_model_and_the_handle_are_freed_by_reference_counts():
    with no_gc():
        model = Transformer(6)
        handle = offload(model, layers=["blocks.*", "*.mlp"], keep="*.norm1")
        for _ in range(3):
            model(start()).sum().backward()
        with handle.recording():
            model(start()).sum().backward()
        print(handle, handle.report(), handle.timeline())
        refs = [weakref.ref(p) for p in model.parameters()]
        refs += [weakref.ref(thing) for thing in (model, handle, handle._engine, handle._tracker)]
        del model, handle
        assert [ref() for ref in refs if ref() is not None] == []
        assert gc.collect() == 0


def test_a_forward_that_outlives_its_model_names_the_misuse():
    model = Transformer(3)
    offload(model, layers="blocks.*")
    forward, other = model.forward, model.blocks[0].forward
    assert torch.equal(forward(data()), model(data()))
    del model
    for call in (forward, other):
        with pytest.raises(
            RuntimeError, match=r"an offloaded module that was deleted: keep a reference to the module\."
        ):
            call(data())


@pytest.mark.parametrize("blocks_run", [1, 3, 6])
def test_a_graph_thrown_away_gives_everything_back_at_once(blocks_run):
    model = Waves(6)
    handle = offload(model)
    with no_gc():
        for _ in range(3):
            y = start()
            for block in model.blocks[:blocks_run]:
                y = block(y)
            assert handle.statistics().resident_bytes > 0
            del y
            nothing_held(handle)
            y = model(start())
            assert handle.statistics().resident_bytes == 4 * UNIT
            assert handle.statistics().host_bytes_used == 8 * UNIT
            del y
            nothing_held(handle)


# Threads


def left(handle, model) -> None:
    nothing_held(handle)
    nothing_installed(model)


def test_a_forward_in_another_thread_during_each_measured_forward():
    """Its outputs do not end the pass that is measured, and what it saves is not taken for that pass."""
    _, model, handle = small()
    inside = [False]

    def other(module, args):
        if not inside[0]:
            inside[0] = True
            in_threads(lambda: step(model))
            inside[0] = False

    hook = model.blocks[3].register_forward_pre_hook(other)
    step(model, times=9)
    hook.remove()
    step(model)
    assert not handle.settling
    assert handle.plan.nbytes == (BLOCK,) * 6


# Graphs


@pytest.mark.parametrize("memory", [4 * BLOCK, 100 * BLOCK], ids=["a plan", "everything fits"])
@pytest.mark.parametrize("before", PASSES[1:])
def test_a_capture_in_the_first_passes(before, memory):
    """It takes no host memory, which would warn, makes no timed event, and ends no pass that is measured."""
    device, model, handle = small(memory=memory, recompute=False)
    step(model, times=before)
    record, events = device.record_timed, list[bool]()
    device.record_timed = lambda stream: (events.append(device.capturing()), record(stream))[1]
    device.capturing = lambda: True
    step(model)
    device.capturing = lambda: False
    step(model, times=8)
    assert not any(events)
    assert not handle.settling
    left(handle, model)


# Lifetime


@pytest.mark.parametrize("at", PASSES)
@pytest.mark.parametrize("pending", [False, True], ids=["after backward", "before backward"])
def test_no_cycles(at, pending):
    with no_gc():
        _device, model, handle = small()
        step(model, times=at)
        y = model(torch.zeros(4, requires_grad=True)).sum()
        if not pending:
            y.backward()
        tracker = handle._tracker
        refs = [weakref.ref(thing) for thing in (model, handle, handle._engine, tracker, tracker.steering)]
        del model, handle, tracker, y
        assert [ref() for ref in refs if ref() is not None] == []
        assert gc.collect() == 0


FIRST_IN_A_PROCESS = """
import gc, warnings, weakref
import torch, actoffload

gc.disable()
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    handle, ref = actoffload.offload(model, recompute=True, min_bytes=1), weakref.ref(model)
    actoffload.get_cpu_offload_context(True, 1, 3)
said = [warning.filename for warning in caught if warning.category is actoffload.ReferenceDeviceWarning]
assert said == ["<string>"] * (not torch.accelerator.is_available()), said
model(torch.randn(4, 8)).sum().backward()
handle.remove()
del model, handle
assert ref() is None
"""


def test_the_first_call_in_a_process_keeps_no_model_and_warns_once_without_an_accelerator():
    """What it imports of PyTorch keeps the frames of its callers."""
    path = {**os.environ, "PYTHONPATH": str(SOURCES.parent)}  # another process does not inherit pytest's
    subprocess.run([sys.executable, "-c", FIRST_IN_A_PROCESS], check=True, timeout=1200, env=path)


# Host time


def calls(run: Callable[[], None]) -> int:
    """Return how many calls of Python functions of the package, and of built-in ones there, something makes."""
    count = [0]

    def profile(frame, event, arg):
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(str(SOURCES)):
            count[0] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count[0]


@pytest.mark.parametrize(("memory", "most"), [(2**30, 60), (4 * BLOCK, 600)], ids=["fits", "offloaded"])
def test_calls_of_a_forward_in_the_steady_state(memory, most):
    """A few for each group; for those that are offloaded a few for each tensor."""
    found = []
    for count in (10, 20, 40):
        _device, model, handle = small(count=count, memory=memory)
        step(model, times=8)
        assert bool(handle.plan.offloaded) == (memory < 2**30)
        x = torch.zeros(4, requires_grad=True)
        found.append(min(calls(lambda model=model, x=x: model(x)) for _ in range(3)))
    first, second = found[1] - found[0], found[2] - found[1]
    assert second == pytest.approx(2 * first, rel=0.02), "linear in the number of groups"
    assert first / 10 <= most
