"""The measured default in each stage: other orders of forwards and backwards, failures, calls of the handle."""

from collections.abc import Callable

import pytest
import torch
from helpers import nothing_held
from interrupts import SOURCES, interrupted
from timed_device import BLOCK, PASSES, Timed, TimedModel, done, offload, small, stages, step
from torch import nn
from whole_model import nothing_installed

NAMES = "model/tuner.py", "tune/script.py", "tune/meter.py", "tune/costs.py"
TUNING = tuple(str(SOURCES / name) for name in NAMES)


# Other orders of forwards and backwards


def several(count: int) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        outputs = [model(torch.zeros(4, requires_grad=True)) for _ in range(count)]
        sum(outputs).sum().backward()

    return run


def no_backward(model: nn.Module) -> None:
    model(torch.zeros(4, requires_grad=True))
    step(model)


def no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(4))
    step(model)


def two_backwards(model: nn.Module) -> None:
    y = model(torch.zeros(4, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()


def loop_over_groups(model: nn.Module) -> None:
    x = torch.zeros(4, requires_grad=True)
    for block in model.blocks:
        x = block(x)
    x.sum().backward()


def in_a_loop(model: nn.Module) -> None:
    loop_over_groups(model)
    step(model)


PROGRAMS = [(several(2), 14), (several(3), 20), (no_backward, 4), (no_grad, 4), (in_a_loop, 4), (two_backwards, 8)]
"""Steps, and the blocks that the device has memory for."""


@pytest.mark.parametrize(("run", "memory"), PROGRAMS)
def test_a_plan_is_found(run, memory):
    # Where several passes are in progress, each of those before may need all of its memory.
    device, model, handle = small(memory=memory * BLOCK, min_bytes=1)
    for _ in range(13):
        run(model)
        nothing_held(handle)
    assert not handle.settling
    assert device.peak() <= device.memory
    if run is two_backwards:  # the first keeps what it made again, so replay and copies save nothing
        assert not handle.plan.offloaded
        return
    done(handle, model, device, 1)


def evaluation(model: nn.Module) -> None:
    model(torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize("run", [no_backward, several(9), evaluation, loop_over_groups])
def test_steps_until_the_plan_is_final(run):
    """Whether passes can be timed or not; where they can be timed later, they are."""
    device, model, handle = small()
    steps = 0
    while handle.settling:
        run(model)
        steps += 1
        assert steps <= 10
    if run in (evaluation, loop_over_groups):
        step(model)
        step(model)
        assert handle.settling
    done(handle, model, device)
    assert not handle.settling


def test_a_loop_over_the_groups_is_not_measured():
    _device, model, handle = small()
    for _ in range(12):
        loop_over_groups(model)
    assert handle.plan.offloaded == tuple(range(4))
    why = "No step can be timed, because parts of the model are called and not the module that was passed to offload"
    assert why in handle.plan.because
    assert why in str(handle.report())
    nothing_held(handle)


def test_groups_without_a_backward():
    """The first blocks need no gradients, nor does the input; the next saves nothing before its weight."""
    device = Timed(2.5e6, 2.5e6, memory=4 * BLOCK)
    model = TimedModel(device, 8, nbytes=BLOCK)
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    handle = offload(model, device)

    def run() -> None:
        model(torch.zeros(4)).sum().backward()

    assert stages(handle, run, 13)[:2] == ["FIRST", "LEAN"]
    assert handle.plan.offloaded_bytes == 2 * BLOCK
    begun = device.main.now
    run()
    assert device.main.now - begun == pytest.approx(8 * 1.0 + 4 * 2.0)


class Taught(nn.Module):
    """Half of its blocks are a teacher, which runs without gradients."""

    def __init__(self, device: Timed) -> None:
        super().__init__()
        self.teacher, self.student = TimedModel(device, 4, nbytes=BLOCK), TimedModel(device, 8, nbytes=BLOCK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) - wanted


def test_a_teacher_without_gradients():
    device = Timed(2.5e6, 2.5e6, memory=4 * BLOCK)
    model = Taught(device)
    handle = offload(model, device, layers=None)
    assert stages(handle, lambda: step(model), 3) == ["FIRST", "LEAN", "PLAN"]
    step(model, times=4)
    assert not handle.settling
    assert {handle.groups[k].partition(".")[0] for k in handle.plan.offloaded} == {"student"}


@pytest.mark.parametrize("seed", [0, 1, 3, 16])
def test_blocks_that_are_skipped_at_random(seed):
    device, model, handle = small(count=8)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(30):
        model.skipped = set(torch.randperm(8, generator=generator)[:2].tolist())
        step(model)
        nothing_held(handle)
        assert device.peak() <= device.memory
    assert not handle.settling
    print(handle, handle.plan, handle.report())


# Failures in each stage


@pytest.fixture(params=PASSES)
def begun(request: pytest.FixtureRequest) -> tuple:
    """Return a device, a model that has run some of its first steps, and its handle."""
    device, model, handle = small()
    step(model, times=request.param)
    return device, model, handle


class BrokenError(Exception):
    pass


def test_an_exception_in_forward_and_in_backward(begun):
    device, model, handle = begun

    def broken(*args):
        raise BrokenError

    hook = model.blocks[3].register_forward_pre_hook(broken)
    with pytest.raises(BrokenError):
        step(model)
    hook.remove()
    nothing_installed(model)
    y = model(torch.zeros(4, requires_grad=True) * 1.0)
    hook = model.blocks[2].scale.register_hook(broken)
    with pytest.raises(BrokenError):
        y.sum().backward()
    del y
    hook.remove()
    done(handle, model, device)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("at", PASSES)
def test_an_interrupt_anywhere_in_a_stage(at):
    n, more = at, True
    while more:
        _device, model, handle = small(count=4)
        step(model, times=at)
        more = interrupted(lambda model=model: step(model), n, TUNING)
        nothing_installed(model)
        step(model, times=12)
        assert handle.plan.offloaded == (0, 1)
        assert not handle.settling
        n += 797
    assert n > 797 + at


# The handle in each stage


@pytest.mark.parametrize("at", PASSES)
def test_recording_in_each_stage(at):
    device, model, handle = small(recompute=False)
    step(model, times=at)
    with handle.recording():
        step(model)
    report = handle.report()
    assert [group.bytes_saved for group in report.groups] == [BLOCK] * 6
    assert sum(group.bytes_offloaded for group in report.groups) >= 4 * BLOCK
    assert [group.forward_seconds for group in report.groups] == [pytest.approx(1.0)] * 6
    assert [group.backward_seconds for group in report.groups] == [pytest.approx(2.0)] * 6
    done(handle, model, device)


def test_paused_in_each_stage(begun):
    device, model, handle = begun
    y = model(torch.zeros(4, requires_grad=True)).sum()
    with handle.paused():
        step(model, times=3)
    y.backward()
    del y
    done(handle, model, device)


@pytest.mark.parametrize("pending", [False, True], ids=["after backward", "before backward"])
def test_remove_in_each_stage(begun, pending):
    _, model, handle = begun
    y = model(torch.zeros(4, requires_grad=True)).sum()
    if not pending:
        y.backward()
    engine = handle._engine
    handle.remove()
    if pending:
        y.backward()
    del y
    assert engine.statistics().host_bytes == 0
    nothing_installed(model)
