"""Pipelines of two and four GPUs: gradients with the bits of a run without offload, and equal peaks in all steps."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_harness import DEVICE, WORLDS, lenient
from pipelines_harness import SCHEDULES, WAYS, check, run

pytestmark = [pytest.mark.gpu, *lenient]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    found = run(DEVICE.type, request.param)
    assert {len(of) for of in found.values()} == {request.param}
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_and_peaks(name: str, way: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    for seen in ranks[f"{name}, {way}"]:
        check(seen)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_rank_has_a_lower_peak_if_everything_is_offloaded(
    name: str, ranks: dict[str, list[dict[str, Any]]]
) -> None:
    seen = ranks[f"{name}, all"][0]
    assert seen["offloads"]
    assert max(seen["peaks"]) < min(seen["peaks_without"])
