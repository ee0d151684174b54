"""Random models under `actoffload.offload` on a device that runs its copies late, early or in random order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from adversary.harness import execute, scaled_down, trial
from adversary.trees import ModelRun, TreeProgram, tree_programs
from hypothesis import given, settings

SEEDS = 4  # with the last one, steps are recorded


@pytest.fixture(scope="module", autouse=True)
def _scaled_down() -> Iterator[None]:
    with scaled_down():
        yield


@pytest.mark.parametrize(
    ("streams", "recompute", "examples"),
    [(False, False, 16), (True, False, 12), (False, True, 12), (True, True, 12)],
    ids=["one stream", "side streams", "recomputed", "recomputed with side streams"],
)
def test_random_models_in_random_orders(streams, recompute, examples):
    seen: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(tree_programs(streams=streams, recompute=recompute))
    def orders_of(program: TreeProgram) -> None:
        expected, _ = execute(program, None, kind=ModelRun)
        for seed in range(SEEDS):
            _, statistics = trial(program, expected, seed, kind=ModelRun)
            seen["offloaded"] += statistics.tensors_offloaded
            seen["ahead"] += statistics.reloaded_ahead
            for reason, count in statistics.tensors_kept.items():
                seen[reason.name] += count
        for mode in ("late", "early"):
            trial(program, expected, 0, mode, ModelRun)

    orders_of()
    # The drawn programs cover every reason.
    for what in ("offloaded", "ahead", "KEPT", "OUTSIDE", "SHARED", "HOST_FULL", "MARKED", "SMALL"):
        assert seen[what] > 0, what
