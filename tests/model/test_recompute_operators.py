"""Which outputs of operators are saved is chosen from their measured times, in virtual time."""

from dataclasses import replace

import pytest
import torch
from timed_device import Timed, offload, peaks, seconds, stages, step
from torch import nn

import actoffload
from actoffload.device import use
from actoffload.model import replays

MIB = 2**20
DEVICES: list[Timed] = []  # the one that runs the operators comes last


@torch.library.custom_op("actoffload_tests::work", mutates_args=())
def work(x: torch.Tensor, forward: float, backward: float, nbytes: int) -> torch.Tensor:
    """Take virtual seconds and return so many bytes; the backward needs the output."""
    DEVICES[-1].compute(forward)
    return DEVICES[-1].count(torch.full((nbytes // 4,), float(x.detach().flatten()[0])))


@work.register_fake
def _(x, forward, backward, nbytes):
    return x.new_empty((nbytes // 4,))


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.shape, ctx.seconds = inputs[0].shape, inputs[2]


def _backward(ctx, grad):
    (output,) = ctx.saved_tensors
    DEVICES[-1].compute(ctx.seconds)
    return grad.new_full(ctx.shape, float(output[0]) * 1e-3), None, None, None


work.register_autograd(_backward, setup_context=_save)


class Block(nn.Module):
    """Two operators whose outputs are worth saving, and two that only fill memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        attended = work(x * self.scale, 0.4, 0.8, MIB)
        wide = work(attended, 0.02, 0.04, 4 * MIB)
        product = work(wide, 0.4, 0.8, 2 * MIB)
        wide = work(product, 0.02, 0.04, 4 * MIB)
        return x + wide[: x.numel()].view(x.shape)


def make(link, budget, blocks=None):
    """Return a device, a model of these blocks or of ten, and its handle."""
    device = Timed(link, link, memory=2**40)
    DEVICES.append(device)
    model = nn.Sequential(*([Block() for _ in range(10)] if blocks is None else blocks))
    return device, model, offload(model, device, layers=list(model), memory_budget=budget, min_bytes=2**16)


@pytest.mark.parametrize(("link", "budget"), [(1e6, 24 * MIB), (3e6, 32 * MIB)])
def test_costly_operators_are_saved_and_the_others_run_again(link, budget):
    device, model, handle = make(link, budget)
    assert max(peaks(model, device, 8)) <= budget, "in the first passes, too"
    plan = handle.plan
    assert plan.recomputed
    for k in plan.recomputed:
        saves, costly = set(plan.saves[k]), {f"actoffload_tests.work.default#{number}" for number in (0, 2)}
        assert {name.partition("#")[0] for name in saves} <= {"actoffload_tests.work.default"}
        assert saves <= costly or saves > costly, "a cheap one is saved only beside the costly ones"
    assert plan.peak_bytes <= budget
    assert seconds(model, device) == pytest.approx(plan.seconds, rel=0.01)
    (peak,) = set(peaks(model, device, 3))
    assert peak <= plan.peak_bytes
    assert peak >= 0.9 * plan.peak_bytes


class Long(Block):
    """A block with more operators that only fill memory, of several sizes."""

    def forward(self, x):
        out = x * self.scale
        for product, wide in (1, 4), (2, 6), (3, 4):
            out = work(work(out, 0.4, 0.8, product * MIB), 0.02, 0.04, wide * MIB)
        return x + work(out, 0.4, 0.8, MIB)[: x.numel()].view(x.shape)


@pytest.mark.parametrize("part", range(0, 11, 3))
def test_budgets_are_never_exceeded_whatever_outputs_are_saved(part):
    """Memory of a way to run a group follows from its operators."""
    device = Timed(3e6, 3e6, memory=2**40)
    DEVICES.append(device)
    model = nn.Sequential(*(Long() for _ in range(4)))
    (without,) = peaks(model, device, 1)
    budget = 25 * MIB + (without - 25 * MIB) * part // 10
    handle = offload(model, device, layers=list(model), memory_budget=budget, min_bytes=2**16)
    assert max(peaks(model, device, 12)) <= budget, "in the first passes, too"
    assert not handle.settling


class Sized(Block):
    """A block that is larger than others of its type; the first of a size has another structure, as in a ResNet."""

    def __init__(self, size: int, first: bool) -> None:
        super().__init__()
        self.size, self.first = size, first

    def forward(self, x):
        for _ in range(self.size):
            x = super().forward(x)
        return x


def test_blocks_of_one_type_and_several_sizes_have_their_own_times_and_operators():
    blocks = [Sized(2, True), Sized(1, True), *(Sized(1, False) for _ in range(5))]
    device, model, handle = make(1e6, 36 * MIB, blocks)
    stages(handle, lambda: step(model), 8)
    assert not handle.settling
    assert handle.plan.baseline_seconds == pytest.approx((2 + 6) * 2.52, rel=0.01)
    assert seconds(model, device) == pytest.approx(handle.plan.seconds, rel=0.01)


class Returning(Block):
    """A block that saves its input, and returns an output that is worth saving: the input of the next one."""

    def forward(self, x):
        attended = work(x * self.scale, 0.4, 0.8, MIB)
        wide = work(attended, 0.02, 0.04, 4 * MIB)
        return work(work(wide, 0.8, 1.6, 2 * MIB), 0.2, 0.4, MIB)


def test_what_is_expected_of_each_way_is_what_it_saves():
    """An output that is returned is an input of the next group, which saves it whether this one does or not."""
    device, model, handle = make(1e5, 18 * MIB, [Returning() for _ in range(6)])
    stages(handle, lambda: step(model), 8)
    ways = handle._tracker.steering.costs().ways[2]
    handle.remove()
    ways = [way for way in ways if way.saves is not None]
    returned = "actoffload_tests.work.default#3"
    assert {returned in way.saves for way in ways} == {True, False}
    for way in ways:
        handle = offload(model, device, layers=list(model), num_layers=5, min_bytes=2**16)
        step(model)
        plan = replace(handle.plan, saves=(way.saves,) * 6, recomputed_nbytes=(MIB,) * 6)
        handle.remove()
        with use(device):
            handle = actoffload.offload(model, plan=plan, min_bytes=2**16)
        stages(handle, lambda: step(model), 3)
        assert handle.report().groups[2].bytes_saved == way.cost.nbytes, way.saves
        handle.remove()


@pytest.mark.parametrize("lag", [100, 2000])
def test_nothing_is_read_that_the_device_has_not_reached(lag):
    device, model, handle = make(1e6, 18 * MIB)
    device.lag = lag  # about 450 events in a pass
    assert max(peaks(model, device, 8)) <= 18 * MIB
    assert handle.plan.recomputed


def test_operators_are_timed_in_three_groups_that_do_the_same(monkeypatch):
    """The others take as long; timing takes a second run of all operators."""
    found = []
    measure = replays.measure
    monkeypatch.setattr(replays, "measure", lambda *args: (found.append(args[0]), measure(*args))[1])
    _, model, handle = make(2e6, 28 * MIB)
    step(model, times=6)
    assert len(found) == replays.TIMED == 3
    assert len(handle.plan.recomputed) > 3, "the others have costs, too"
