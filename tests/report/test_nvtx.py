"""NVTX ranges: each that begins is ended, and nothing at all without NVTX."""

import pytest
import torch

import actoffload
from actoffload.engine import statistics


@pytest.fixture
def calls(monkeypatch):
    """Let NVTX exist, and return what is called of it."""
    made = []
    monkeypatch.setattr(statistics, "has_nvtx", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: made.append(name) or len(made))
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda shown: made.append(shown))
    return made


def step(*, nvtx: bool = True) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    handle = actoffload.offload(model, min_bytes=1)
    with handle.recording(nvtx=nvtx):
        model(torch.randn(64, 64, requires_grad=True) * 1.0).sum().backward()
    handle.remove()


def test_each_range_ends(calls):
    step()
    names = [call for call in calls if isinstance(call, str)]
    begun = [number + 1 for number, call in enumerate(calls) if isinstance(call, str)]
    assert sorted(call for call in calls if isinstance(call, int)) == begun
    assert {"forward of 0", "backward of 3", "offload (D2H) of 0", "reload (H2D) of 1"} <= set(names)


@pytest.mark.parametrize("nvtx", [True, False])
def test_no_range_unless_asked_for_or_without_nvtx(calls, monkeypatch, nvtx):
    monkeypatch.setattr(statistics, "has_nvtx", not nvtx)
    step(nvtx=nvtx)
    assert calls == []


def test_this_build_of_torch():
    step()  # must not raise, whatever the build
    if not torch._C.__dict__.get("_nvtx"):
        with pytest.raises(RuntimeError, match="NVTX"):
            torch.cuda.nvtx.range_push("a")
