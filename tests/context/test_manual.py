"""Manual synchronization that does what it is asked, and no more."""

import pytest
import torch
from helpers import forward, make_manual, nothing_held
from torch import nn

from actoffload.device import ReferenceDevice

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class Sine(nn.Module):
    """Saves one tensor that no other layer saves."""

    def forward(self, x):
        return torch.sin(x * 1.0) * 2.0


@pytest.fixture
def layers():
    return [Sine() for _ in range(4)]


def start() -> torch.Tensor:
    return torch.randn(64, 64, requires_grad=True)


def test_calls_in_a_forward_without_gradients(layers):
    """A program that makes its calls in validation too: there is nothing to move, and nothing to complain of."""
    context, sync, controller = make_manual(4)
    with torch.no_grad():
        for _ in range(2):
            forward(layers, start(), context, sync)
            for k in range(3):
                controller.start_offload_layer(k)
                controller.release_activation_forward_gpu_memory(k)
            for k in reversed(range(3)):
                controller.start_reload_layer(k)
    assert context.statistics().tensors_saved == 0


def test_calls_after_backward_do_nothing(layers):
    context, sync, controller = make_manual(4)
    y = forward(layers, start(), context, sync)
    y.sum().backward()
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    controller.start_reload_layer(0)
    assert context.statistics().bytes_offloaded == 0
    del y
    nothing_held(context)


class Watching(ReferenceDevice):
    """Notes on which streams copies are queued."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[object] = []
        self.made: list[object] = []

    def new_stream(self, device):
        self.made.append(super().new_stream(device))
        return self.made[-1]

    def to_host(self, pairs, stream):
        self.used.append(stream)
        super().to_host(pairs, stream)

    def to_device(self, pairs, stream):
        self.used.append(stream)
        super().to_device(pairs, stream)


@pytest.mark.parametrize("own", [True, False])
def test_the_programs_own_stream_carries_every_copy(layers, own):
    device = Watching()
    stream = ReferenceDevice().new_stream(torch.device("cpu")) if own else None
    context, sync, controller = make_manual(4, device=device, offload_stream=stream)
    y = forward(layers, start(), context, sync)
    for k in range(2):
        controller.start_offload_layer(k)
        controller.release_activation_forward_gpu_memory(k)
    controller.start_reload_layer(1)
    y.sum().backward()
    assert len(device.used) == 4
    if own:
        assert all(used is stream for used in device.used)
        assert device.made == []
    else:
        assert len({id(used) for used in device.used}) == 2
        assert all(any(used is made for made in device.made) for used in device.used)
