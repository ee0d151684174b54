"""A backward of an offloaded model in compiled autograd is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from composing import WIDTH, batch
from helpers import nothing_held
from torch import nn
from torch._dynamo import compiled_autograd

import actoffload

# Dynamo's own, about deprecated parts of torch and about code that it leaves alone.
pytestmark = pytest.mark.filterwarnings("ignore", "error::actoffload.HostMemoryWarning")


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_backward_is_refused(fullgraph):
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        handle = actoffload.offload(model, min_bytes=64)
        y = model(batch())
        with (
            compiled_autograd._enable(torch.compile(backend="eager", fullgraph=fullgraph)),
            pytest.raises(Exception, match="cannot run in compiled autograd: set"),
        ):
            y.sum().backward()
        assert handle.statistics().tensors_offloaded > 0
        del y
        model(batch()).sum().backward()
        if not fullgraph:  # otherwise Dynamo keeps its error, whose frames have the tensors
            nothing_held(handle)
    torch._dynamo.reset()
