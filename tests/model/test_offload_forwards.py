"""Forwards inside of forwards, without a graph, with shapes that change, and of an encoder beside a decoder."""

import pytest
import torch
from torch import Tensor, nn
from whole_model import UNIT, Wave, Waves, agrees, backward, bytes_of_a_step, data, measured, offload

from actoffload.report import Reason

# The model inside of itself


class Recursive(Waves):
    """Runs its blocks, then itself once more on the result."""

    depth = 2

    def forward(self, x, left=None):
        left = self.depth if left is None else left
        x = super().forward(x)
        return torch.sin(self(x, left - 1)) if left else x


def test_the_model_called_inside_itself_is_one_pass():
    handle, statistics = agrees(Recursive(3))
    assert statistics.passes == 3
    assert len(handle.groups) == 9
    assert statistics.reloaded_on_demand == 0
    nbytes, _ = bytes_of_a_step(Recursive(3))
    assert nbytes == 7 * Wave.SAVES * UNIT


def test_the_model_called_inside_one_of_its_groups():
    class Calling(Wave):
        model: nn.Module | None = None
        left = 0

        def forward(self, x):
            x = super().forward(x)
            if Calling.left:
                Calling.left -= 1
                x = torch.sin(Calling.model(x))
            return x

    class Starting(Waves):
        def forward(self, x, *, first=False):
            if first:
                Calling.model, Calling.left = self, 2
            return super().forward(x)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, first=True)

    handle, statistics = agrees(Starting(4, Calling), run)
    assert statistics.passes == 3
    assert handle.groups == tuple(f"blocks.{k}" for k in range(4))
    assert statistics.bytes_offloaded == 3 * (20 + Wave.SAVES) * UNIT
    Calling.model = None


# Without a graph


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_done(mode):
    model = Waves(6)
    handle = offload(model)
    before = handle.statistics()
    with mode():
        model(data())
    assert handle.statistics() == before
    y = model(data())
    with mode():
        model(data(1))
        for block in model.blocks:
            block(data(1))
    y.sum().backward()
    statistics = handle.statistics()
    assert (statistics.passes, statistics.reloaded_ahead, statistics.reloaded_on_demand) == (1, 8, 0)


def test_a_gradient_is_taken_inside_of_the_forward():
    """As for a gradient penalty, or forces from an energy."""

    class Forces(Waves):
        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy + force

    with pytest.warns(UserWarning, match="by the code of the model's own forward"):
        _, statistics = agrees(Forces(6))
    assert statistics.bytes_offloaded > 0


# Encoder and decoder


def test_a_decoder_that_looks_at_the_encoders_output_in_every_block():
    class Cross(Wave):
        def forward(self, x, memory):
            return super().forward(x) * memory

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = nn.ModuleList([Cross() for _ in range(4)])  # registered first, and runs last
            self.encoder = nn.ModuleList([Wave() for _ in range(4)])

        def forward(self, x):
            memory = x
            for block in self.encoder:
                memory = block(memory)
            for block in self.decoder:
                x = block(x, memory=memory)
            return x

    model = Model()
    handle, statistics = agrees(model)
    assert handle.groups == (*(f"encoder.{k}" for k in range(4)), *(f"decoder.{k}" for k in range(4)))
    assert statistics.reloaded_on_demand == 0
    statistics = measured(handle, backward(model))
    # Two kinds or one: the last two groups are kept. The input and the encoder's output are saved in them as well.
    assert handle.plan.offloaded == tuple(range(6))
    assert statistics.bytes_kept[Reason.SHARED] >= UNIT
    both = measured(handle, lambda: (model(data(1)) + model(data(2))).sum().backward())
    assert both.passes == 2
    assert both.reloaded_on_demand == 0
