"""Inside of a trace an offloaded model is the plain one: nothing is followed, and nothing is warned about."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import actoffload

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])


def step(net: nn.Module, x: Tensor) -> None:
    net(x.clone().requires_grad_()).square().mean().backward()


def gradient(net: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(net(x).sum(), x)[0]


TRACES: dict[str, Callable[[Any, Tensor], Callable[..., Any]]] = {
    "jit.trace": lambda net, x: torch.jit.trace(net, x),
    "make_fx": lambda net, x: make_fx(lambda x: net(x))(x),
    "make_fx of a gradient": lambda net, x: make_fx(lambda x: gradient(net, x))(x.clone().requires_grad_()),
    "symbolic_trace": lambda net, x: torch.fx.symbolic_trace(net),
    "export": lambda net, x: torch.export.export(net, (x,)).module(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(
    ("found", "recompute", "training"), [(False, "auto", True), (True, "auto", True), (True, True, False)]
)
@pytest.mark.parametrize("name", TRACES)
def test_a_trace(name: str, found: bool, recompute: Any, training: bool):
    plain, x = model(), torch.randn(32, 16)
    plain.train(training)
    want = TRACES[name](plain, x)(x)
    net = model().train(training)
    with actoffload.offload(net, num_layers=2 if found else None, min_bytes=0, recompute=recompute) as handle:
        for _ in range(2 if found else 0):
            step(net, x)
            net.zero_grad()
        before = handle.statistics()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = TRACES[name](net, x)
        assert handle.statistics() == before
        assert torch.equal(traced(x), want)
        step(net, x)
        assert handle.statistics().bytes_offloaded > before.bytes_offloaded


def test_the_error_of_strict_export_says_what_works():
    net, x = model(), torch.randn(32, 16)
    with actoffload.offload(net, num_layers=2, min_bytes=0) as handle:
        with pytest.raises(Exception, match=r"torch\.export\.export works with strict=False, or after remove\(\)"):
            torch.export.export(net, (x,), strict=True)
        handle.remove()
        torch.export.export(net, (x,), strict=True)


@pytest.mark.parametrize("num_layers", [None, 2])
def test_a_compiled_function_with_a_backward_in_it_does_not_warn(num_layers: int | None):
    net, x = model(), torch.randn(32, 16)
    with (
        actoffload.offload(net, num_layers=num_layers, min_bytes=0) as handle,
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        compiled = torch.compile(lambda: step(net, x), backend="eager")
        for _ in range(3):
            compiled()
    assert handle.statistics().bytes_offloaded
    assert not [each for each in found if "queue_callback" in str(each.message)]
