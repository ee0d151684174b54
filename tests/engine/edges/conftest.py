from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from adversary.device import AdversarialDevice
from adversary.harness import scaled_down
from adversary.models import ROWS, WIDTH
from torch import Tensor

from actoffload.device import use


@pytest.fixture(autouse=True)
def _scaled_down() -> Iterator[None]:
    with scaled_down():
        yield


@pytest.fixture(params=["late", "early", "random"])
def device(request: pytest.FixtureRequest) -> Iterator[AdversarialDevice]:
    gc.disable()  # nothing may need it
    try:
        with use(AdversarialDevice(0, request.param)) as device:
            yield device
    finally:
        gc.enable()


@pytest.fixture
def w() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
