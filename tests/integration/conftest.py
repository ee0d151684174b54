"""Programs that run on the reference device also run on the accelerator of a machine that has one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import composing
import pytest
import torch
from helpers import deterministic

ACCELERATOR = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("default")])


@pytest.fixture(params=["cpu", ACCELERATOR])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Return where `composing.both` runs programs: models move there when they are offloaded, and data when made."""
    monkeypatch.setattr(composing, "PLACE", torch.device(request.param))
    with deterministic() if request.param == "cuda" else contextlib.nullcontext():
        yield composing.PLACE
