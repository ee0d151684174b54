"""Pipelines of two GPUs: gradients with the bits of a run without offload, and the same peaks in every step."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_harness import DEVICE, lenient
from pipelines_harness import SCHEDULES, WORLD, check, run

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, *lenient]


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[dict[str, Any]]]:
    return run(DEVICE.type)


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_and_peaks(name: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert len(ranks[name]) == WORLD
    for seen in ranks[name]:
        check(seen)


def test_some_memory_is_saved(ranks: dict[str, list[dict[str, Any]]]) -> None:
    """Interleaved stages keep several microbatches, and copies of all of them have the time of a whole step."""
    first = ranks["ScheduleInterleaved1F1B"][0]
    assert max(first["peaks"]) < min(first["peaks_without"])
