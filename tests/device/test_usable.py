"""How much of a device's memory plans use: the rest is for gaps between tensors."""

from __future__ import annotations

import pytest

from actoffload.device.base import usable

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("limit", "largest", "left"),
    [
        (80 * GIB, 128 * MIB, 0.03),  # small tensors in a large memory
        (80 * GIB, GIB, 4 / 80),
        (80 * GIB, 4 * GIB, 0.18),  # as logits with a large vocabulary
        (4.51 * GIB, 128 * MIB, 0.5 / 4.51),  # here gaps took 6 %
        (GIB, 0, 0.03),
    ],
)
def test_more_is_left_where_tensors_are_large_for_the_memory(limit: int, largest: int, left: float) -> None:
    assert usable(limit, largest) == pytest.approx((1 - left) * limit)
