"""Fixtures of the GPU tests: deterministic kernels, and an idle device after each test."""

from __future__ import annotations

from collections.abc import Iterator

import helpers
import pytest
import torch

from actoffload import device as devices
from actoffload.device.accelerator import Accelerator


@pytest.fixture(scope="session", autouse=True)
def separator() -> None:
    """Make what the first large copy of a process makes: its bytes would count in tests of exact peaks."""
    device = devices.backend() if torch.accelerator.is_available() else None
    if isinstance(device, Accelerator) and device._nvidia:
        device._separator(device.current_device())


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with helpers.deterministic():
        yield
