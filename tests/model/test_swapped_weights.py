"""`torch.utils.swap_tensors` replaces what a tensor is, and refuses tensors to which there are weak references."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import forward, make
from torch import Tensor, nn
from torch.nn import functional
from wrappers import Two

import actoffload

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class Frozen(nn.Module):
    """A linear layer whose frozen weight is a wrapper subclass, as quantized weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Two(torch.randn(16, 16), torch.randn(16, 16)), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x * self.scale, self.weight.a))


class Returned(nn.Module):
    """A block that returns a parameter beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.inner(x)), self.inner.weight


class Tied(nn.Module):
    """A model whose blocks return parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returned() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


def plain() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)])


def frozen() -> nn.Module:
    return nn.Sequential(*[Frozen() for _ in range(3)])


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def step(model: nn.Module) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    model(torch.ones(32, 16, dtype=dtype).requires_grad_()).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("make_model", [plain, frozen, Tied])
def test_a_model_is_converted_by_swapping_its_weights(
    make_model: Callable[[], nn.Module], removed: bool, swapping: None
):
    torch.manual_seed(0)
    model = make_model()
    handle = actoffload.offload(model, num_layers=2, min_bytes=0)
    step(model)
    step(model)
    if removed:
        handle.remove()
    model.double()
    expected = [parameter.dtype for parameter in model.parameters()]
    assert set(expected) == {torch.float64}
    with_ = step(model)
    if not removed:
        assert handle.statistics().bytes_offloaded
    handle.remove()
    assert all(map(torch.equal, with_, step(model)))


def test_frozen_wrappers_are_swapped_without_the_setting():
    torch.manual_seed(0)
    model = frozen()
    handle = actoffload.offload(model, num_layers=2, min_bytes=0)
    step(model)
    model.cpu()
    model.to(torch.float64)
    assert handle.statistics().bytes_offloaded
    step(model)


def test_swapped_weights_are_kept():
    """The weights that the next pass saves are those of now."""
    torch.manual_seed(0)
    model = plain()
    with actoffload.offload(model, num_layers=2, min_bytes=0) as handle:
        step(model)
        offloaded = handle.statistics().bytes_offloaded
        for parameter in list(model.parameters()):
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))
        step(model)
        assert handle.statistics().bytes_offloaded == 2 * offloaded


def test_weights_of_layers_in_a_context():
    layers = list(plain())
    context, sync = make(1, 3)
    for _ in range(2):
        forward(layers, torch.ones(32, 16), context, sync).sum().backward()
    for parameter in nn.ModuleList(layers).parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))
    forward(layers, torch.ones(32, 16), context, sync).sum().backward()
