"""The ways to run a group from one measurement of it as a whole: convex, from all bytes to none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actoffload.planner import OperatorCost, replay_ways
from actoffload.planner.variants import within
from actoffload.schedule import LayerCost, Saved

WHOLE = LayerCost(1.0, 3.0, (Saved(64),), host_forward=0.5, host_backward=1.0, kept_bytes=8)


def operator(number: int, seconds: float, nbytes: int, kept: int = 0) -> OperatorCost:
    reads = (number - 1,) if number else ()
    return OperatorCost(f"mm#{number}", seconds, (nbytes,) * (nbytes > 0), reads=reads, needed=nbytes > 0, kept=kept)


@st.composite
def chains(draw: st.DrawFn) -> tuple[OperatorCost, ...]:
    pairs = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=12))
    found = [operator(k, float(seconds), 256 * nbytes) for k, (seconds, nbytes) in enumerate(pairs)]
    return tuple(within(found, WHOLE.forward))


@given(chains())
def test_from_all_bytes_to_none(operators):
    first, *others = replay_ways(WHOLE, operators)
    every = sum(nbytes for each in operators for nbytes in each.sizes)
    assert first.saves is None
    assert first.cost.nbytes == WHOLE.nbytes + (every if others else 0)
    nbytes = [first.cost.nbytes, *(way.cost.nbytes for way in others)]
    assert nbytes == sorted(nbytes, reverse=True)
    assert not others or (others[-1].saves == () and others[-1].cost.nbytes == WHOLE.nbytes)
    assert all(way.cost.forward == WHOLE.forward for way in (first, *others))


@given(chains())
def test_less_is_saved_for_more_time(operators):
    ways = replay_ways(WHOLE, operators)
    for one, other in itertools.pairwise(ways):
        assert one.cost.backward <= other.cost.backward + 1e-9
        assert one.cost.host_backward <= other.cost.host_backward + 1e-9
    assert ways[-1].cost.backward <= WHOLE.backward + 1e-9
    assert ways[0].cost.backward >= WHOLE.forward


def test_convex():
    """Each further byte saves less time than the one before it."""
    operators = tuple(within([operator(k, float(2**k), 256) for k in range(6)], WHOLE.forward))
    ways = sorted(replay_ways(WHOLE, operators), key=lambda way: way.cost.nbytes)
    points = [(way.cost.nbytes, way.cost.backward) for way in ways]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points) if b[0] > a[0]]
    assert len(slopes) >= 3
    assert slopes == sorted(slopes)


def test_the_time_of_the_host_falls_with_the_operators_that_are_not_run_again():
    operators = tuple(within([operator(k, 1.0, 256) for k in range(4)], WHOLE.forward))
    ways = replay_ways(WHOLE, operators)
    assert ways[0].cost.host_backward == pytest.approx(WHOLE.host_backward - WHOLE.host_forward)
    assert ways[-1].cost.host_backward == WHOLE.host_backward
    assert all(way.cost.host_forward == WHOLE.host_forward for way in ways)


def test_casts_of_weights_are_kept_without_replay_alone():
    operators = [operator(k, 1.0, 256) for k in range(3)]
    operators[0] = replace(operators[0], kept=100, sizes=(), needed=False)
    ways = replay_ways(WHOLE, tuple(within(operators, WHOLE.forward)))
    assert ways[0].cost.kept_bytes == WHOLE.kept_bytes + 100
    assert {way.cost.kept_bytes for way in ways[1:]} == {WHOLE.kept_bytes}


def test_an_output_that_the_group_returns_counts_in_the_next_group_alone():
    operators = list(within([operator(k, 1.0, 256) for k in range(3)], WHOLE.forward))
    every = replay_ways(WHOLE, tuple(operators))[0].cost.nbytes
    operators[-1] = replace(operators[-1], returned=256)
    assert replay_ways(WHOLE, tuple(operators))[0].cost.nbytes == every - 256


def test_nothing_to_save():
    (way,) = replay_ways(WHOLE, (operator(0, 1.0, 0),))
    assert way.cost == WHOLE
    assert way.saves is None


def test_what_is_held_is_made_once():
    """The second operator runs once more for its own segment, unless its output stays on the device."""
    operators = [operator(k, 0.25, 256) for k in range(4)]
    operators[1] = replace(operators[1], twice=256)
    plain, *others = replay_ways(WHOLE, tuple(operators))
    last = others[-1]
    assert plain.held is None
    assert plain.cost.backward == pytest.approx(WHOLE.backward - 5 * 0.25)
    assert (last.cost.backward, last.held.backward) == pytest.approx((WHOLE.backward, WHOLE.backward - 0.25))
    assert last.held.backward_temporary == last.cost.backward_temporary + 256
    assert last.held.host_backward == pytest.approx(WHOLE.host_backward - WHOLE.host_forward / 4)
    assert all(way.held is None for way in others if "mm#1" in way.saves)
