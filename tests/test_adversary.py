from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from adversary.harness import execute, scaled_down, trial
from adversary.models import DEVICE_KINDS, KINDS, STREAM_KINDS
from adversary.programs import Backward, Forward, Program, programs
from hypothesis import given, settings

ORDERS_IN_ALL = 2000
"""Different orders of the pending copies, at least, in one run of this file."""

SEEDS = 10

# Sorts of programs: number of examples, and how they are drawn.
SORTS: dict[str, tuple[int, dict[str, bool]]] = {
    "default schedule": (90, {}),
    "manual calls": (90, {"manual": True}),
    "side streams and two devices": (60, {"streams": True}),
    "manual calls and side streams": (60, {"streams": True, "manual": True}),
    "host limit": (40, {"limited": True}),
    "manual calls and host limit": (40, {"limited": True, "manual": True}),
}


@pytest.fixture(scope="module", autouse=True)
def _scaled_down() -> Iterator[None]:
    with scaled_down():
        yield


@pytest.fixture(scope="module")
def orders() -> set[Any]:
    return set()


@pytest.mark.parametrize("kind", sorted({**KINDS, **STREAM_KINDS, **DEVICE_KINDS}))
@pytest.mark.parametrize("manual", [False, True], ids=["default", "manual"])
def test_each_kind_of_layer(kind: str, manual: bool) -> None:
    steps = [Forward(0), Forward(1), Backward(0, retain=True), Backward(1), Backward(0)]
    program = Program([[kind], ["linear", kind], [kind], ["chunk", kind]], None if manual else 2, steps)
    expected, _ = execute(program, None)
    for mode in ("late", "early", "random"):
        _, statistics = trial(program, expected, 1, mode)
        assert statistics.tensors_offloaded > 0
        assert statistics.bytes_reloaded > 0


@pytest.mark.parametrize("sort", SORTS)
def test_random_orders(sort: str, orders: set[Any]) -> None:
    examples, options = SORTS[sort]
    seen: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(programs(**options))
    def orders_of(program: Program) -> None:
        expected, _ = execute(program, None)
        for seed in range(SEEDS):
            order, statistics = trial(program, expected, seed, "random")
            seen["offloaded"] += statistics.tensors_offloaded
            seen["refused"] += sum(n for reason, n in statistics.tensors_kept.items() if reason.name == "HOST_FULL")
            if order:
                orders.add((repr(program), order))
        for mode in ("late", "early"):
            trial(program, expected, 0, mode)

    orders_of()
    assert seen["offloaded"] > 0
    assert (seen["refused"] > 0) == ("host limit" in sort)


def test_number_of_orders(orders: set[Any], request: pytest.FixtureRequest) -> None:
    ran = [item for item in request.session.items if getattr(item, "originalname", "") == "test_random_orders"]
    if len(ran) < len(SORTS):
        pytest.skip("counts the orders of all sorts of programs, and some were not selected")
    assert len(orders) >= ORDERS_IN_ALL
