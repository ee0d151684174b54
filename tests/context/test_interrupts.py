"""An interrupt at every bytecode of entering and leaving an offloading context."""

from __future__ import annotations

import pytest
import torch
from interrupts import SOURCES, interrupted
from torch import nn
from whole_model import WIDTH, data, equal, nothing_installed

import actoffload
from actoffload.engine import eligibility

FILES = (str(SOURCES / "context"), str(SOURCES / "engine" / "eligibility.py"), str(SOURCES / "_torch"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_every_bytecode():
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        context, sync = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]

    def forward() -> torch.Tensor:
        context.new_pass()
        x = data()
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)
        return x

    def step() -> list[torch.Tensor]:
        parameters = [p for layer in layers for p in layer.parameters()]
        return list(torch.autograd.grad(forward().sum(), parameters))

    want, n, left = step(), 0, 0
    while interrupted(forward, n, FILES):
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            left += 1  # at the very beginning of __exit__
            context.__exit__(None, None, None)
        nothing_installed()
        assert not torch.nn.modules.module._global_forward_pre_hooks
        if n % 23 == 0:
            equal(step(), want)
        n += 1
    assert n > 300
    assert left <= 2 * len(layers)
    equal(step(), want)


@pytest.mark.parametrize("name", ["forward_pre", "parameter_registration", "buffer_registration"])
def test_an_interrupt_between_the_registrations_of_global_hooks_loses_none(monkeypatch, name):
    calls = eligibility.ModuleCalls()
    with monkeypatch.context() as patch:
        patch.setattr(eligibility.global_hooks, f"register_module_{name}_hook", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calls.add_user(1)
    calls.add_user(2)
    assert hooks() == [1, 1, 1]
    calls.remove_user(1)
    assert hooks() == [1, 1, 1]
    calls.remove_user(2)
    assert hooks() == [0, 0, 0]
    calls.add_user(3)
    assert hooks() == [1, 1, 1]
    calls.remove_user(3)
    assert hooks() == [0, 0, 0]


def interrupt(hook: object) -> None:
    raise KeyboardInterrupt


def hooks() -> list[int]:
    tables = torch.nn.modules.module
    return [
        len(tables._global_forward_pre_hooks),
        len(tables._global_parameter_registration_hooks),
        len(tables._global_buffer_registration_hooks),
    ]
