"""All schedules in two and in four processes; ranks that disagree end with the same sentence."""

from typing import Any

import pytest
from pipeline_programs import NAMES, block_bytes
from pipeline_ranks import BAD, OTHER, RECOMPUTED, REFUSED, run_ranks
from processes import LIMIT
from test_one_rank import check

pytestmark = pytest.mark.timeout(LIMIT + 300)

FOUR = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")

Ranks = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two() -> Ranks:
    return run_ranks(2, [*NAMES, *REFUSED, *BAD, *OTHER])


@pytest.fixture(scope="module")
def four() -> Ranks:
    return run_ranks(4, list(FOUR))


def check_ranks(ranks: list[dict[str, Any]]) -> None:
    """Check every rank, that all know the same of all, and that something is offloaded."""
    for seen in ranks:
        check(seen)
        assert seen["ranks"] == len(ranks)
        assert seen["table"] == ranks[0]["table"]
    assert sum(seen["plan_bytes"] for seen in ranks) > 0


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(two, name):
    check_ranks(two[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four, name):
    check_ranks(four[name])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("different arguments", "fraction is None on rank 0 and 0.5 on rank 1. Pass the same on every rank."),
        (
            "different policies",
            "recompute is a policy of aten.mm.default on rank 0 and a policy of aten.addmm.default on rank 1. Pass",
        ),
        ("a stage without layers", "Rank 1 of the pipeline: the module of stage 1: This Nothing has no modules inside"),
    ],
)
def test_one_sentence_on_every_rank(two, name, part):
    first, second = two[name]
    for seen in (first, second):
        assert part in seen["message"]
        assert not seen["installed"]
    assert first["message"] == second["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_an_exception_on_one_rank(two, name):
    """The other one is not offloaded, and the next call of both works."""
    wrong = 0 if "first" in name else 1
    part = "offload got a _ScheduleForwardOnly, which is not" if "unknown" in name else "fraction is 1.5; expected"
    for rank, seen in enumerate(two[name]):
        assert seen["message"].startswith(
            part if rank == wrong else f"Offloading has ended on rank {wrong}. So nothing"
        )
        assert rank == wrong or "Call actoffload.offload(schedule) again on every rank" in seen["message"]
        assert seen["seconds"] < 20
        assert seen["again"]


@pytest.mark.parametrize(
    ("name", "rank", "part"),
    [
        ("the first rank alone", 0, "Rank 0 waited 0 s for rank 1 of the pipeline. So nothing is offloaded"),
        ("the second rank alone", 1, "Rank 1 waited 1 s for rank 0 of the pipeline. So nothing is offloaded"),
        ("removed on the first rank before a step", 1, "Offloading has ended on rank 0. So nothing is offloaded"),
        ("removed on the second rank before a step", 0, "Offloading has ended on rank 1. So nothing is offloaded"),
    ],
)
def test_offloaded_on_one_rank(two, name, rank, part):
    """It warns, at the latest after a while, and runs without offloading: the other does not wait for ever."""
    for number, seen in enumerate(two[name]):
        assert not seen["installed"]
        assert (part in seen["message"]) == (number == rank), seen["message"]


def test_removed_on_one_rank(two):
    """The other one need not wait: everything is offloaded further on."""
    first, second = two["removed on one rank"]
    for seen in (first, second):
        assert not seen["settling"]
        assert seen["held"] == [0, 0]
    assert not first["message"]
    assert "Offloading has ended on rank 0. So this rank offloads from here on" in second["message"]


@pytest.mark.parametrize("name", ["skipped blocks", "skipped blocks, a budget"])
def test_a_rank_that_skips_blocks_holds_up_no_other(two, name):
    for seen in two[name]:
        assert seen["same"]
        assert not seen["settling"]
        assert seen["plans"] == 2


def test_replicas_recompute_the_same(two):
    """Ranks that run the same blocks communicate in them, also where they are recomputed."""
    first, second = two["replicas"]
    for seen in (first, second):
        assert seen["same"]
    assert first["saves"] == second["saves"]


def test_fewer_bytes_on_later_ranks(two):
    for seen in two["delta bytes"]:
        assert seen["with"][0] == seen["without"][0]
        pairs = zip(seen["without"][1], seen["with"][1], strict=True)
        assert all(0 < now <= before - block_bytes() for before, now in pairs)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_on_two_ranks(two, name):
    for seen in two[name]:
        assert seen["same"]
        assert seen["saves"] == [True, True]
        assert seen["on_demand"] == 0
