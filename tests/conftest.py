"""What the tests share: one thread for torch, and hypothesis that draws the same examples every time."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the tests compute on tiny tensors

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)
pytest.register_assert_rewrite("adversary.harness")

# A machine under load must not turn a test red, and neither must luck.
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# For the mutation check, which only asks whether a test fails: no time for looking for a smaller example.
settings.register_profile("mutation", settings.get_profile("same"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("same")
