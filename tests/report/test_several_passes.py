"""Several forwards before one backward: times in virtual seconds, and what the report says about their peak."""

from __future__ import annotations

import pytest
import torch
from helpers import min_elements
from torch import nn
from virtual_time import Work, layer_of
from whole_model import offload

from actoffload.context.context import OffloadContext
from actoffload.device import ReferenceDevice
from actoffload.engine.engine import Engine
from actoffload.report import StepTimeline
from actoffload.schedule import DefaultSchedule, Kind, LayerCost

PIECE = 1024


class Timed(nn.Module):
    """Computes for some virtual seconds forward and backward, and saves 1024 bytes."""

    def __init__(self, device: ReferenceDevice, forward: float, backward: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.device, self.seconds = device, (forward, backward)

    def forward(self, x):
        payload = torch.ones(PIECE, dtype=torch.uint8)
        return Work.apply(x * self.scale, self.device, *self.seconds, payload)


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
            outputs = []
            for _ in range(3):
                x = torch.zeros(1, requires_grad=True) * 1.0
                for _ in range(4):
                    with context:
                        x = layer_of(cost, device)(x)
                    x = context.synchronize(x)
                outputs.append(x)
            sum(outputs).backward()
    timeline = recorder.timeline()
    assert [times.backward for times in StepTimeline(timeline, ()).by_layer()] == [6.0] * 4
    assert timeline.seconds(Kind.BACKWARD) == 24.0


def test_the_peak_of_several_passes_is_explained(device):
    model = Model(device)
    handle = offload(model, layers="blocks", device=device)
    losses = [model(torch.ones(1)) for _ in range(3)]
    report = handle.report()
    # Each keeps its last two blocks, its stem and its head; those of the blocks are followed.
    assert (report.waiting_passes, report.waiting_bytes) == (2, 2 * 2 * PIECE)
    assert report.peak_resident_bytes >= report.waiting_bytes + 2 * PIECE
    sum(losses).backward()
    report = handle.report()  # of the latest forward, whatever ran since
    assert "2 earlier passes had 4.0 KiB on the device when this forward ended" in str(report)
    del losses
    model(torch.ones(1)).backward()
    assert handle.report().waiting_passes == 0
    assert "in flight" not in str(handle.report())


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
    spans = handle.timeline().timeline.of(Kind.BACKWARD)
    inside = 8.0 + 5 * 2.0 + 16.0
    assert sorted(span.seconds for span in spans if span.layer == 2) == [2.0, 2.0 + inside]
    assert sum(span.seconds for span in spans if span.layer == 1) == 4.0


@pytest.mark.parametrize("begun", [False, True])
def test_a_pass_whose_backward_has_begun_does_not_wait(device, begun):
    """Its graph is retained, so that it still has memory."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)])
    handle = offload(model, device=device, min_bytes=0)
    x = torch.ones(32, 16, requires_grad=True)
    model(x).sum().backward()  # finds the groups
    first = model(x).sum()
    if begun:
        first.backward(retain_graph=True)
    second = model(x).sum()
    assert handle.report().waiting_passes == (not begun)
    (first + second).backward()
