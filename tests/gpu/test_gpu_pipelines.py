"""Pipelines of two GPUs: gradients with the bits of a run without offload, and the same peaks in every step."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_harness import DEVICE, lenient
from pipelines_harness import SCHEDULES, WAYS, WORLD, check, run

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, *lenient]


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[dict[str, Any]]]:
    return run(DEVICE.type)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_and_peaks(name: str, way: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    found = ranks[f"{name}, {way}"]
    assert len(found) == WORLD
    for seen in found:
        check(seen)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_rank_has_a_lower_peak_if_everything_is_offloaded(
    name: str, ranks: dict[str, list[dict[str, Any]]]
) -> None:
    seen = ranks[f"{name}, all"][0]
    assert seen["offloads"]
    assert max(seen["peaks"]) < min(seen["peaks_without"])
