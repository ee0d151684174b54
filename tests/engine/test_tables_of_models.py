"""What a pass has read of the tables of a model is used by the next one, as long as it is right."""

from __future__ import annotations

import weakref
from collections.abc import Callable

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


def another_parameter(net: nn.Module) -> Tensor:
    net[1][0].weight = nn.Parameter(torch.ones(4, 4))
    return net[1][0].weight


def another_memory(net: nn.Module) -> Tensor:
    net[1][0].weight.data = torch.ones(4, 4)
    return net[1][0].weight


def another_storage_of_the_same_memory(net: nn.Module) -> Tensor:
    """As where weights are moved away and back, and the allocator returns the memory that they had."""
    weight = net[1][0].weight
    weight.data = torch.from_numpy(weight.detach().numpy())
    return weight


def one_more_parameter(net: nn.Module) -> Tensor:
    net[1].scale = nn.Parameter(torch.ones(4))
    return net[1].scale


def one_that_was_none(net: nn.Module) -> Tensor:
    net[1][0].bias = nn.Parameter(torch.ones(4))
    return net[1][0].bias


def one_more_module(net: nn.Module) -> Tensor:
    net.append(nn.Linear(4, 4))
    return net[2].weight


def another_module(net: nn.Module) -> Tensor:
    net[1][0] = nn.Linear(4, 4)
    return net[1][0].weight


def another_part(net: nn.Module) -> Tensor:
    net[1][0].weight.b = torch.ones(4, 4)
    return net[1][0].weight.b


def another_buffer(net: nn.Module) -> Tensor:
    net[1][1].running_mean = torch.ones(4)
    return net[1][1].running_mean


CHANGES = (
    another_parameter,
    another_memory,
    another_storage_of_the_same_memory,
    one_more_parameter,
    one_that_was_none,
    one_more_module,
    another_module,
    another_part,
    another_buffer,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_changed_is_read_again(change: Callable[[nn.Module], Tensor]):
    net = model()
    net[1][0].bias = None
    if change is another_part:
        net[1][0].weight = nn.Parameter(Two(torch.ones(4, 4), torch.ones(4, 4)))
    first = ModelTensors(net)
    assert reason(first, net[0].weight) is Reason.PARAMETER
    new = change(net)
    assert reason(first, new) is None
    expected = Reason.BUFFER if change is another_buffer else Reason.PARAMETER
    assert reason(ModelTensors(net, first), new) is expected


def test_a_model_that_stays_the_same_is_looked_at_now_and_then():
    """A tensor that has become a buffer is known after `TRUSTED` passes at the latest, and the old one never again."""
    net = model()
    tensors = ModelTensors(net)
    assert reason(tensors, net[0].weight) is Reason.PARAMETER
    for _ in range(2 * ModelTensors.TRUSTED + 3):
        tensors = ModelTensors(net, tensors)
        assert reason(tensors, net[0].weight) is Reason.PARAMETER
    new = another_buffer(net)
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
