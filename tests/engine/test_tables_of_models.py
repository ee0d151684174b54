"""What a pass has read of the tables of a model is used by the next one, as long as it is right."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import no_gc
from torch import Tensor, nn
from wrappers import Two

from actoffload._torch.tensors import address
from actoffload.engine.eligibility import ModelTensors
from actoffload.report import Reason


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def reason(tensors: ModelTensors, tensor: Tensor) -> Reason | None:
    return tensors.reason(address(tensor.untyped_storage()))


def ones(*size: int) -> Tensor:
    return torch.ones(*(size or (4, 4)))


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], Tensor]]] = {  # how, and the tensor that is new
    "another parameter": (lambda net: setattr(net[1][0], "weight", nn.Parameter(ones())), lambda net: net[1][0].weight),
    "another memory": (lambda net: setattr(net[1][0].weight, "data", ones()), lambda net: net[1][0].weight),
    # As where weights are moved away and back, and the allocator returns the memory that they had.
    "another storage of the same memory": (
        lambda net: setattr(net[1][0].weight, "data", torch.from_numpy(net[1][0].weight.detach().numpy())),
        lambda net: net[1][0].weight,
    ),
    "one more parameter": (lambda net: setattr(net[1], "scale", nn.Parameter(ones(4))), lambda net: net[1].scale),
    "one that was none": (lambda net: setattr(net[1][0], "bias", nn.Parameter(ones(4))), lambda net: net[1][0].bias),
    "one more module": (lambda net: net.append(nn.Linear(4, 4)), lambda net: net[2].weight),
    "another module": (lambda net: setattr(net[1], "0", nn.Linear(4, 4)), lambda net: net[1][0].weight),
    "another part": (lambda net: setattr(net[1][0].weight, "b", ones()), lambda net: net[1][0].weight.b),
    "another buffer": (lambda net: setattr(net[1][1], "running_mean", ones(4)), lambda net: net[1][1].running_mean),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changed_is_read_again(name: str):
    net = model()
    net[1][0].bias = None
    if name == "another part":
        net[1][0].weight = nn.Parameter(Two(ones(), ones()))
    first = ModelTensors(net)
    assert reason(first, net[0].weight) is Reason.PARAMETER
    change, found = CHANGES[name]
    change(net)
    assert reason(first, found(net)) is None
    expected = Reason.BUFFER if name == "another buffer" else Reason.PARAMETER
    assert reason(ModelTensors(net, first), found(net)) is expected


def test_a_model_that_stays_the_same_is_looked_at_now_and_then():
    """A tensor that has become a buffer is known after `TRUSTED` passes at the latest, and the old one never again."""
    net = model()
    tensors = ModelTensors(net)
    assert reason(tensors, net[0].weight) is Reason.PARAMETER
    for _ in range(2 * ModelTensors.TRUSTED + 3):
        tensors = ModelTensors(net, tensors)
        assert reason(tensors, net[0].weight) is Reason.PARAMETER
    net[1][1].running_mean = new = ones(4)
    passes = 0
    while reason(tensors := ModelTensors(net, tensors), new) is None:
        passes += 1
    assert 0 < passes < ModelTensors.TRUSTED
    assert reason(tensors, new) is Reason.BUFFER


def test_what_was_read_keeps_no_module_and_no_parameter():
    net = model()
    tensors = ModelTensors(net)
    assert reason(tensors, net[0].weight) is Reason.PARAMETER
    refs = [weakref.ref(each) for each in (*net.modules(), *net.parameters(), *net.buffers())]
    with no_gc():
        del net
        assert [ref() for ref in refs] == [None] * len(refs)
    assert reason(ModelTensors(model(), tensors), torch.ones(4)) is None
