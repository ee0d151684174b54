"""Fixtures of the GPU tests: deterministic kernels, and an idle device after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from actoffload import device as devices
from actoffload.device.accelerator import Accelerator

# cuBLAS chooses algorithms by workspace size; with a fixed size, eager, side-stream and captured runs are comparable.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session", autouse=True)
def separator() -> None:
    """Make what the first large copy of a process makes: its bytes would count in tests of exact peaks."""
    device = devices.backend() if torch.accelerator.is_available() else None
    if isinstance(device, Accelerator) and device._nvidia:
        device._separator(device.current_device())


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    if torch.cuda.is_available():
        torch.cuda.synchronize()
