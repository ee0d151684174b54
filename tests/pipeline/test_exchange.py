"""What the ranks of a pipeline exchange, and what they plan with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from actoffload.pipeline.planning import Measured, agreed
from actoffload.schedule import Link
from actoffload.tune.exchange import Exchange, LostRankError, RefusedError


def measured(rank: int, limit: int | None, *, bare: bool = True) -> Measured:
    return Measured(rank, (), {}, {}, Link(1e9 + rank, 1e9), limit, bare=bare)


def test_of_copies_of_a_stage_the_least_memory_counts_and_the_costs_of_the_first():
    first = [measured(0, 5), measured(1, None), measured(2, 7)]
    second = [measured(3, 4, bare=False), measured(4, 9), measured(5, 8)]
    found = agreed([first, second])
    assert found is not None
    assert [each.limit for each in found] == [4, 9, 7]
    assert [each.rank for each in found] == [0, 1, 2]
    assert [each.link.d2h - 1e9 for each in found] == [0, 1, 2]
    assert [each.bare for each in found] == [False, True, True]
    assert agreed([first, [*second[:2], None]]) is None


def test_plans_are_made_for_the_slowest_link_of_all_ranks():
    links = [Link(1e9, 3e9, 1e-5, both=2e9), Link(2e9, 2e9, 2e-5), Link(3e9, 4e9, 0.0, both=4e9)]
    assert Link.slowest(links) == Link(1e9, 2e9, 2e-5, both=2e9)


def outcomes(exchanges: list[Exchange], values: list[Any]) -> list[Any]:
    """Return what each rank gathers, or its error."""

    def gather(exchange: Exchange, value: Any) -> Any:
        try:
            return exchange.gather("value", value, "here")
        except (LostRankError, RefusedError) as error:
            return error

    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(gather, exchanges, values))


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def three(store: dist.Store) -> list[Exchange]:
    return [Exchange("three", rank, (4, 5, 6), lambda: store) for rank in (4, 5, 6)]


def test_values_of_all_ranks(three, store):
    assert outcomes(three, ["a", "b", "c"]) == [["a", "b", "c"]] * 3
    assert store.num_keys() == 0


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_rank_that_has_left_is_waited_for_by_none(three, left):
    three.pop(left).leave()
    found = outcomes(three, ["a", "b"])
    assert [type(each) for each in found] == [LostRankError] * 2
    assert {str(each) for each in found} == {f"Offloading has ended on rank {4 + left}."}


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come(three, missing, monkeypatch):
    monkeypatch.setattr("actoffload.tune.exchange.LIMIT", 0.2)
    three.pop(missing)
    found = outcomes(three, ["a", "b"])
    assert [type(each) for each in found] == [LostRankError] * 2
    assert all(f"waited 0 s for rank {4 + missing} here." in str(each) for each in found)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_rank_that_refuses(three, wrong):
    three.pop(wrong).refuse("fraction is 1.5")
    found = outcomes(three, ["a", "b"])
    assert [type(each) for each in found] == [RefusedError] * 2
    assert {each.args for each in found} == {("fraction is 1.5",)}


def test_each_meeting_has_keys_of_its_own(monkeypatch, store):
    monkeypatch.setattr("actoffload.tune.exchange._store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 7)
    earlier, later, others = Exchange.of("pipeline", (7, 8)), Exchange.of("pipeline", (7, 8)), Exchange.of("a", (7, 9))
    earlier.refuse("fraction is 1.5")
    assert earlier.has("refused")
    assert not later.has("refused")
    assert not others.has("refused")
