"""Measurements in a capture of a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from actoffload.measure import MemoryMeter

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_no_time_is_sampled_in_a_capture() -> None:
    meter, x = MemoryMeter(), torch.ones(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1  # an empty capture warns
        with pytest.raises(RuntimeError, match="trace_memory"):
            meter.sample()
