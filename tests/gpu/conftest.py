"""Fixtures of the GPU tests: deterministic kernels, and an idle device after each test."""

from collections.abc import Iterator

import helpers
import pytest
import torch

from actoffload import device as devices


@pytest.fixture(scope="session", autouse=True)
def first_copy() -> None:
    """Make what the first copy of a process makes: its bytes would count in tests of exact peaks."""
    if torch.accelerator.is_available():
        device = devices.backend()
        here = device.current_device()
        host = torch.zeros(1, dtype=torch.uint8, pin_memory=True)
        device.to_host([(host, torch.zeros(1, dtype=torch.uint8, device=here))], device.current_stream(here))
        torch.accelerator.synchronize()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with helpers.deterministic():
        yield
