"""NVTX ranges: pushed and popped in pairs where NVTX exists, and nothing at all elsewhere."""

from __future__ import annotations

import pytest
import torch

from actoffload.engine import recorder as nvtx


@pytest.fixture
def calls(monkeypatch):
    """Let NVTX exist, and return what is called of it."""
    made = []
    monkeypatch.setattr(nvtx, "AVAILABLE", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: made.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: made.append("pop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: made.append(name) or len(made))
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda shown: made.append(("end", shown)))
    return made


def test_without_nvtx_nothing_is_called(calls, monkeypatch):
    monkeypatch.setattr(nvtx, "AVAILABLE", False)
    with nvtx.nvtx_range("a"):
        nvtx.push("b")
        nvtx.pop()
        nvtx.stop(nvtx.start("c"))
    assert calls == []
    assert not nvtx.available()


def test_ranges_nest(calls):
    with nvtx.nvtx_range("forward of a"):
        nvtx.push("offload of a")
        nvtx.pop()
    assert calls == ["forward of a", "offload of a", "pop", "pop"]
    assert nvtx.available()


def test_ranges_that_another_thread_ends(calls):
    first, second = nvtx.start("a"), nvtx.start("b")
    nvtx.stop(first)
    nvtx.stop(second)
    assert calls == ["a", "b", ("end", 1), ("end", 2)]


def test_an_exception_ends_the_range_and_goes_on(calls):
    with pytest.raises(KeyError), nvtx.nvtx_range("a"):
        raise KeyError
    assert calls == ["a", "pop"]


def test_available_says_what_this_build_of_torch_can_do():
    with nvtx.nvtx_range("a"):  # must not raise, whatever the build
        pass
    if nvtx.available():
        return
    with pytest.raises(RuntimeError, match="NVTX"):
        torch.cuda.nvtx.range_push("a")
