"""Shapes that change, and an encoder whose output every block of a decoder looks at."""

from __future__ import annotations

import copy

from helpers import nothing_held
from torch import nn
from whole_model import UNIT, Transformer, Wave, Waves, agrees, backward, data, equal, measured, offload

from actoffload.report import Reason

SAVES = Wave.SAVES * UNIT


# Shapes


def test_shapes_that_change_from_step_to_step():
    model = Transformer(5)
    reference = copy.deepcopy(model)
    handle = offload(model)
    for k, rows in enumerate([16, 3, 40, 16, 1, 33]):
        for each in (model, reference):
            each.zero_grad()
            each(data(k, rows)).square().sum().backward()
        equal([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
        nothing_held(handle)
    statistics = handle.statistics()
    assert statistics.passes == 6
    assert statistics.reloaded_on_demand == 0


def test_shapes_that_change_inside_of_the_model():
    class Pooling(Wave):
        def forward(self, x):
            return super().forward(x)[::2].contiguous() if x.size(0) > 1 else super().forward(x)

    _, statistics = agrees(Waves(6, Pooling), num_layers=3)
    assert statistics.bytes_offloaded == 3 * 2 * (UNIT + UNIT // 2 + UNIT // 4)
    assert statistics.reloaded_on_demand == 0


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
