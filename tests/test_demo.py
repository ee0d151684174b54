"""``python -m actoffload demo``, as it runs on a CPU."""

from __future__ import annotations

import re

import pytest
import torch

from actoffload.__main__ import PART, demo
from actoffload.device import ReferenceDevice


def test_demo():
    lines: list[str] = []
    demo(lines.append)
    text = "".join(lines)
    peak = float(re.search(r"Plain training: ([\d.]+) MiB", text)[1])
    limit = float(re.search(r"limited to ([\d.]+) MiB", text)[1])
    assert limit == pytest.approx(PART * peak, abs=0.1)
    assert f"and it has {limit} MiB." in text, "plain training runs out of memory"
    assert "the same bits in all gradients" in text
    expected = float(re.search(r"Expected: peak ([\d.]+) MiB", text)[1])
    assert expected <= limit
    assert "above the limit of" in text
    assert len(lines) <= 28


def test_a_reference_device_with_memory():
    device = ReferenceDevice(memory=2**20)
    with device.counting():
        first = torch.empty(2**18, dtype=torch.uint8)
        assert (device.in_use(), device.memory_limit()) == (2**18, 2**20)
        with pytest.raises(torch.OutOfMemoryError, match=r"1\.2 MiB are needed, and it has 1\.0 MiB"):
            torch.empty(2**20, dtype=torch.uint8)
        assert device.out_of_memory_errors() == 1
        assert device.allocated() == (2**18, 2**20)
        host = device.empty_host(2**22)
        assert device.in_use() == 2**18, "host memory is no device memory"
        del first
    assert host.numel() == 2**22
    assert device.in_use() == 0
    assert ReferenceDevice().memory_limit() is None
