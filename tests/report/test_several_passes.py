"""Reports of several passes: before one backward, in virtual seconds; after a smaller batch; with microbatches."""

import time

import pytest
import torch
from helpers import forward, make, min_elements
from torch import nn
from virtual_time import Work, layer_of
from whole_model import WIDTH, Caching, Waves, offload

import actoffload
from actoffload.context import OffloadContext
from actoffload.device import ReferenceDevice
from actoffload.engine.engine import Engine
from actoffload.report import build
from actoffload.schedule import DefaultSchedule, Kind, LayerCost

MIB = 2**20
ROWS = MIB // WIDTH // 4  # of one MiB


PIECE = 1024
"""Bytes that a `Timed` saves."""


class Timed(nn.Module):
    """Computes for some virtual seconds forward and backward, and saves one tensor."""

    def __init__(self, device: ReferenceDevice, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.device, self.seconds = device, (forward, backward)

    def forward(self, x):
        return Work.apply(x * self.scale, self.device, self.seconds, PIECE)


class Model(nn.Module):
    """Five blocks behind a stem that takes long, and before a head."""

    def __init__(self, device: ReferenceDevice) -> None:
        super().__init__()
        self.stem = Timed(device, 0.0, 16.0)
        self.blocks = nn.ModuleList([Timed(device, 1.0, 2.0) for _ in range(5)])
        self.head = Timed(device, 0.0, 8.0)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def device() -> ReferenceDevice:
    return ReferenceDevice()


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_each_group_is_timed_from_its_first_node_to_its_last(device, passes, nested):
    model = Model(device)
    handle = offload(model, layers="blocks", device=device)
    x = torch.ones(1, requires_grad=True) * 1.0
    with handle.recording():
        if nested:  # each forward has the result of the one before
            for _ in range(passes):
                x = model(x)
            x.backward()
        else:
            sum(model(x) for _ in range(passes)).backward()
    report = handle.report()
    assert [group.backward_seconds for group in report.groups] == [2.0 * passes] * 5
    assert [group.forward_seconds for group in report.groups] == [1.0 * passes] * 5
    assert report.step_seconds == passes * (5 * 3.0 + 16.0 + 8.0)  # all that is in it
    assert report.step_passes == passes


def test_layers_in_contexts_are_timed_until_another_pass_is_reached(device):
    cost = LayerCost.even(PIECE, forward=1.0, backward=2.0)
    with min_elements(1):
        context = OffloadContext(Engine(DefaultSchedule(2, 4).plan(), device))
        with context.record_timeline() as recorder:
            starts = [torch.zeros(1, requires_grad=True) * 1.0 for _ in range(3)]
            sum(forward([layer_of(cost, device)] * 4, x, context, context.synchronize) for x in starts).backward()
    timeline = recorder.timeline()
    assert [times["backward_seconds"] for times in build.seconds_by_layer(timeline, 4)] == [6.0] * 4
    assert timeline.seconds(Kind.BACKWARD) == 24.0


def test_a_backward_in_a_hook_of_another_pass_ends_nothing(device):
    """The gradient that a hook takes through one pass lies within the backward of another."""
    model = Model(device)
    handle = offload(model, layers="blocks", device=device)
    inner = model(torch.ones(1))

    def hook(module, args, output):
        output.register_hook(lambda gradient: inner.backward())

    registered = model.blocks[1].register_forward_hook(hook)
    with handle.recording():
        x = model(torch.ones(1, requires_grad=True) * 1.0)
        registered.remove()
        x.backward()
    spans = handle.timeline().of(Kind.BACKWARD)
    inside = 8.0 + 5 * 2.0 + 16.0
    assert sorted(span.seconds for span in spans if span.layer == 2) == [2.0, 2.0 + inside]
    assert sum(span.seconds for span in spans if span.layer == 1) == 4.0


# Smaller batches


def run(model: nn.Module, *rows: int) -> None:
    for number in rows:
        model(torch.randn(number, WIDTH)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"layers": "blocks"}])
def test_the_latest_full_pass_is_reported(options):
    model = Waves(6)
    handle = actoffload.offload(model, **options)
    run(model, 2 * ROWS)
    before = handle.report()
    run(model, ROWS // 8)
    report = handle.report()
    assert (report.groups, report.advice) == (before.groups, before.advice)
    assert sum(handle.plan.nbytes) == 24 * MIB
    run(model, ROWS)  # half as much counts as full
    assert handle.report().totals.bytes_saved == 12 * MIB
    handle.reset_statistics()
    run(model, ROWS // 2)
    assert handle.report().totals.bytes_saved < 12 * MIB


def test_passes_that_are_recomputed_differently_are_not_compared():
    model = Waves(6)
    handle = actoffload.offload(model, num_layers=0, recompute=True, min_bytes=0)
    run(model, ROWS, ROWS)
    assert handle.report().totals.recomputed


def test_a_context_compares_its_passes_too():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    with min_elements(64):
        context, sync = make(2, 4)
        for rows, saved in ((512, 512), (64, 512), (256, 256)):
            forward(layers, torch.randn(rows, WIDTH) * 1.0, context, sync).sum().backward()
            assert context.report().totals.bytes_saved == 5 * saved * WIDTH * 4
        context.reset_statistics()
        forward(layers, torch.randn(64, WIDTH) * 1.0, context, sync).sum().backward()
        assert context.report().totals.bytes_saved == 5 * 64 * WIDTH * 4


# Gradient accumulation


def test_the_searches_of_several_micro_batches_are_no_part_of_the_step(monkeypatch):
    search = build.find_all_holders
    monkeypatch.setattr(build, "find_all_holders", lambda *a: time.sleep(1.0) or search(*a))
    model = Waves(6, Caching)
    handle = offload(model, device=ReferenceDevice(wall_clock=True))
    run(model, 16)
    with handle.recording():
        run(model, 16, 16)
    report = handle.report()
    assert 0 < report.step_seconds < 1.0
    assert report.step_passes == 2
    assert "Times are sums over the 2 forward passes" in str(report)
