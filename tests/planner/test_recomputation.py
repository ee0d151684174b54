"""Plans in which groups are recomputed, and the ways to run a group: within the limit, near the best, fast to find."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import choose_plain

from actoffload.planner import OperatorCost, Variant, choose, frontier, replay_ways
from actoffload.planner.variants import correct_times
from actoffload.schedule import LayerCost, Link, Plan, Saved, simulate
from actoffload.schedule.schedules import remap

GIB = 2**30


def groups(count: int, part: float = 0.25, again: float = 0.5) -> list[tuple[Variant, ...]]:
    """Return groups that may be recomputed: they save a part and run a part of their forward again, or all of it."""
    plain = LayerCost.even(GIB, forward=0.010, backward=0.020)
    less = LayerCost.even(int(GIB * part), forward=0.010, backward=0.020 + 0.010 * again)
    least = LayerCost.even(GIB // 32, forward=0.010, backward=0.020 + 0.010)
    return [(Variant(plain), Variant(less, ("mm#0",)), Variant(least, ()))] * count


def names(count: int) -> list[str]:
    return [f"h.{k}" for k in range(count)]


def test_bytes_that_predictions_lack_lower_the_limit():
    """Whether groups are recomputed or not."""
    found, link = groups(6), Link(d2h=2e10, h2d=2e10)
    for ways in (found, [group[:1] for group in found]):
        least, most = (choose(names(6), ways, link, limit=limit).peak_bytes for limit in (0, 9 * GIB))
        limit, lower = most - 1, (least + most) // 2
        plan = choose(names(6), ways, link, limit=limit, excess=limit - lower)
        assert plan.steps == choose(names(6), ways, link, limit=lower).steps
        assert plan.peak_bytes <= lower < choose(names(6), ways, link, limit=limit).peak_bytes


@pytest.mark.parametrize("host_limit", [0, 1, 2 * GIB, 5 * GIB, None])
def test_what_is_offloaded_fits_into_host_memory(host_limit):
    found, link = groups(6), Link(d2h=2e10, h2d=2e10)
    plans = [choose(names(6), found, link, limit=0, host_limit=host_limit)]
    plans += frontier(names(6), found, link, host_limit=host_limit)
    most = max(sum(plan.nbytes[k] for k in plan.offloaded) for plan in plans)
    assert most <= (6 * GIB if host_limit is None else host_limit)
    assert bool(most) == (host_limit != 0 and host_limit != 1)


@given(
    sizes=st.lists(st.integers(1, 8), min_size=3, max_size=8),
    part=st.floats(0.0, 0.9),
    again=st.floats(0.0, 1.0),
    rate=st.floats(1.0, 100.0),
    more=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_never_above_the_limit_and_never_slower_than_without_recomputation(sizes, part, again, rate, more):
    layers = [LayerCost.even(size, forward=1.0, backward=2.0, pieces=2) for size in sizes]
    less = [LayerCost(1.0, 2.0 + again, (Saved(round(size * part)),) if round(size * part) else ()) for size in sizes]
    of = [(Variant(one), Variant(two, ("mm#0",))) for one, two in zip(layers, less, strict=True)]
    link = Link(d2h=rate, h2d=rate)
    smallest = choose(names(len(sizes)), of, link, limit=0)
    limit = smallest.peak_bytes + more
    plan = choose(names(len(sizes)), of, link, limit=limit)
    without = choose_plain(layers, link, limit=limit)
    assert plan.peak_bytes <= limit
    if without.peak_bytes <= limit:
        assert plan.seconds <= without.seconds * (1 + 1e-9)
    mixed = [less[k] if k in plan.recomputed else layers[k] for k in range(len(sizes))]
    result = simulate(plan, mixed, link)
    assert (result.step_time, result.device_peak_bytes) == (plan.seconds, plan.peak_bytes)


def test_what_is_recomputed_is_printed_saved_and_moved(tmp_path):
    of = groups(8)
    plan = choose(names(8), of, Link(d2h=2e10, h2d=2e10), limit=3 * GIB)
    less = [GIB - next(one.cost for one in of[0] if one.saves == saves).nbytes for saves in plan.saves]
    assert plan.recomputed_nbytes == tuple(less)
    assert plan.recompute_seconds == pytest.approx(
        sum({None: 0.0, ("mm#0",): 0.005, (): 0.010}[saves] for saves in plan.saves)
    )
    assert "recomputed" in str(plan)
    assert f"{plan.recompute_seconds * 1e3:.2f} ms of it to recompute" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    moved = remap(plan, names(9)[1:])
    assert moved.recomputed == tuple(k - 1 for k in plan.recomputed if k)
    assert moved.saves == (*plan.saves[1:], None)


SECONDS, SIMULATIONS = 0.13, 40
"""So many simulations of 128 groups take as long on a core for which that limit is meant, and longer on slower ones."""


def processor_seconds(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


@pytest.mark.parametrize(("rate", "limit"), [(1e10, 6), (2e10, 12), (5e10, 24)])
def test_planning_128_groups_takes_at_most_130_ms(rate, limit):
    """On a slower core, as long as simulations take beside it: other processes slow both down."""
    ways, link = groups(128), Link(d2h=rate, h2d=rate)
    costs, rounds, plans = [group[0].cost for group in ways], [], []
    while len(rounds) < 3 and not any(taken <= max(SECONDS, allowed) for taken, allowed in rounds):
        taken = processor_seconds(lambda: plans.append(choose(names(128), ways, link, limit=limit * GIB)))
        simulated = processor_seconds(lambda: [simulate(Plan(128), costs, link) for _ in range(SIMULATIONS // 5)])
        rounds.append((taken, 5 * simulated))
        assert plans[-1].peak_bytes <= limit * GIB
        assert plans[-1].recomputed
    assert rounds[-1][0] <= max(SECONDS, rounds[-1][1]), rounds


# Variants

OPERATORS = (
    OperatorCost("attention#0", 12.0, (8,)),
    OperatorCost("mm#0", 6.0, (8,)),
    OperatorCost("mul#0", 0.5, (8,)),
    OperatorCost("view#0", 0.0, ()),
    OperatorCost("mm#1", 6.0, (8,)),
    OperatorCost("gelu#0", 0.5, (16,)),
    OperatorCost("mm#2", 12.0, (16,)),
)


def test_of_the_plans_with_about_the_smallest_peak_it_is_the_fastest():
    """Offloading everything has a peak that is 0.1 % smaller, and takes twice as long."""
    plain = LayerCost.even(GIB, forward=0.010, backward=0.020)
    again = LayerCost.even(GIB // 100, forward=0.010, backward=0.030)
    again = replace(again, backward_temporary=GIB - GIB // 100 + GIB // 1000)
    group = Variant(plain), Variant(again, ())
    plan = choose(names(8), [group] * 8, Link(1e10, 1e10), limit=GIB // 2)
    assert len(plan.recomputed) == 7
    assert GIB < plan.peak_bytes <= 1.005 * GIB
    assert "smallest peak" in plan.because


def test_operators_timed_one_by_one_take_no_longer_than_all_of_them():
    slow = [OperatorCost(of.name, 4 * of.seconds, of.sizes) for of in OPERATORS]
    total = sum(of.seconds for of in OPERATORS)
    assert sum(of.seconds for of in correct_times(slow, total)) == pytest.approx(total)
    assert correct_times(OPERATORS, total) == OPERATORS


def test_values_are_held_where_that_fits():
    plain = LayerCost.even(GIB, forward=0.010, backward=0.020)
    again = LayerCost.even(GIB // 64, forward=0.010, backward=0.033)
    held = replace(again, backward=0.030, backward_temporary=GIB // 2)
    group = Variant(plain), Variant(again, (), held)
    known = names(8), [group] * 8, Link(1e9, 1e9)
    least = choose(*known, limit=0)
    assert not least.holds
    assert least.peak_bytes < GIB // 2
    plan = choose(*known, limit=2 * GIB)
    assert plan.holds
    assert plan.peak_bytes <= 2 * GIB
    lean = choose(names(8), [(Variant(plain), Variant(again, ()))] * 8, Link(1e9, 1e9), limit=2 * GIB)
    assert not lean.holds
    assert plan.seconds < lean.seconds
    assert {each.holds for each in frontier(*known)} == {False, True}
    whole = names(8), [(Variant(again, None, held),)] * 8, Link(1e9, 1e9)
    assert choose(*whole, limit=2 * GIB).holds, "whole replay of everything, which is tried beside the plan"
    assert not choose(*whole, limit=GIB // 4).holds


@pytest.mark.parametrize("eighths", range(8, 65, 4))
def test_values_are_held_where_the_memory_is_not_worth_more(eighths):
    """What is held takes memory in which a group could stay without being made again."""
    plain = LayerCost.even(GIB, forward=0.010, backward=0.020)
    again = LayerCost.even(GIB // 64, forward=0.010, backward=0.0305)
    held = replace(again, backward=0.030, backward_temporary=GIB)
    limit, link = eighths * GIB // 8, Link(1e9, 1e9)
    ways = [
        (Variant(plain), Variant(again, (), held)),
        (Variant(plain), Variant(again)),
        (Variant(plain), Variant(held)),
    ]
    plan, lean, all_held = (choose(names(8), [group] * 8, link, limit=limit) for group in ways)
    assert plan.peak_bytes <= limit
    fits = [each.seconds for each in (lean, all_held) if each.peak_bytes <= limit]
    assert plan.seconds <= 1.021 * min(fits)


# The ways to run a group


WHOLE = LayerCost(1.0, 3.0, (Saved(64),), host_forward=0.5, host_backward=1.0, kept_bytes=8)


def operator(number: int, seconds: float, nbytes: int, kept: int = 0) -> OperatorCost:
    reads = (number - 1,) if number else ()
    return OperatorCost(f"mm#{number}", seconds, (nbytes,) * (nbytes > 0), reads=reads, needed=nbytes > 0, kept=kept)


@st.composite
def chains(draw: st.DrawFn) -> tuple[OperatorCost, ...]:
    pairs = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=12))
    found = [operator(k, float(seconds), 256 * nbytes) for k, (seconds, nbytes) in enumerate(pairs)]
    return tuple(correct_times(found, WHOLE.forward))


@given(chains())
def test_from_all_bytes_to_none_for_more_and_more_time(operators):
    first, *others = ways = replay_ways(WHOLE, operators)
    every = sum(nbytes for each in operators for nbytes in each.sizes)
    assert first.saves is None
    assert first.cost.nbytes == WHOLE.nbytes + (every if others else 0)
    nbytes = [first.cost.nbytes, *(way.cost.nbytes for way in others)]
    assert nbytes == sorted(nbytes, reverse=True)
    assert not others or (others[-1].saves == () and others[-1].cost.nbytes == WHOLE.nbytes)
    assert all(way.cost.forward == WHOLE.forward for way in ways)
    for one, other in itertools.pairwise(ways):
        assert one.cost.backward <= other.cost.backward + 1e-9
        assert one.cost.host_backward <= other.cost.host_backward + 1e-9
    assert ways[-1].cost.backward <= WHOLE.backward + 1e-9
    assert first.cost.backward >= WHOLE.forward


def test_convex():
    """Each further byte saves less time than the one before it."""
    operators = tuple(correct_times([operator(k, float(2**k), 256) for k in range(6)], WHOLE.forward))
    ways = sorted(replay_ways(WHOLE, operators), key=lambda way: way.cost.nbytes)
    points = [(way.cost.nbytes, way.cost.backward) for way in ways]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points) if b[0] > a[0]]
    assert len(slopes) >= 3
    assert slopes == sorted(slopes)


def test_casts_of_weights_are_kept_without_replay_alone():
    operators = [operator(k, 1.0, 256) for k in range(3)]
    operators[0] = replace(operators[0], kept=100, sizes=(), needed=False)
    ways = replay_ways(WHOLE, tuple(correct_times(operators, WHOLE.forward)))
    assert ways[0].cost.kept_bytes == WHOLE.kept_bytes + 100
    assert {way.cost.kept_bytes for way in ways[1:]} == {WHOLE.kept_bytes}


def test_an_output_that_the_group_returns_counts_in_the_next_group_alone():
    operators = list(correct_times([operator(k, 1.0, 256) for k in range(3)], WHOLE.forward))
    every = replay_ways(WHOLE, tuple(operators))[0].cost.nbytes
    operators[-1] = replace(operators[-1], returned=256)
    assert replay_ways(WHOLE, tuple(operators))[0].cost.nbytes == every - 256


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
