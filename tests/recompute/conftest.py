"""Counts of each test begin at zero."""

from __future__ import annotations

import pytest
from recomputing import Counted


@pytest.fixture(autouse=True)
def _counts():
    Counted.forward_calls = Counted.backward_calls = 0
