"""An interrupt at every bytecode of entering and leaving an offloading context."""

from __future__ import annotations

import pytest
import torch
from interrupts import SOURCES, interrupted
from torch import nn
from whole_model import WIDTH, data, equal, nothing_installed

import actoffload

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
