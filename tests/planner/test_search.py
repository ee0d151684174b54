"""The chosen plan: within its limit, never slower with more memory, about the best of all; and where it puts copies."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_calls import copied
from planning import MIB, choose_plain, convex, leanest, links, model_ranks, steps

from actoffload.planner import Variant, choose
from actoffload.planner.placement import Placement
from actoffload.planner.search import RanksAsRun
from actoffload.schedule import DefaultSchedule, Do, Event, LayerCost, Link, Plan, When, simulate


@settings(max_examples=100)
@given(st.data(), steps(), links, st.sampled_from([0.0, 0.125]))
def test_the_peak_is_within_every_limit_that_can_be_reached(data, costs, link, host_seconds):
    smallest = leanest(costs, link)
    limit = data.draw(st.integers(0, 2 * smallest))
    plan = choose_plain(costs, link, limit=limit, host_seconds=host_seconds)
    result = simulate(plan, costs, link, host_seconds=host_seconds)
    assert (plan.peak_bytes, plan.seconds) == (result.device_peak_bytes, result.step_time)
    assert plan.peak_bytes <= max(limit, smallest)
    assert ("No plan is within the limit" in plan.because) == (limit < smallest)


@settings(max_examples=100)
@given(st.data(), steps(), links)
def test_a_larger_limit_is_never_slower(data, costs, link):
    smallest = leanest(costs, link)
    small, large = sorted(
        (data.draw(st.integers(smallest, 3 * smallest)), data.draw(st.integers(smallest, 3 * smallest)))
    )
    plans = [choose_plain(costs, link, limit=limit) for limit in (small, large, None)]
    for before, after in pairwise(plans):
        assert after.seconds <= before.seconds * 1.002 + 1e-9


@settings(max_examples=50)
@given(steps(), links)
def test_what_fits_is_left_alone(costs, link):
    keep = simulate(Plan(len(costs)), costs, link)
    for limit in (None, keep.device_peak_bytes):
        plan = choose_plain(costs, link, limit=limit, host_seconds=0.125)
        assert plan.offloaded == ()
        assert (plan.seconds, plan.baseline_seconds, plan.because) == (keep.step_time, keep.step_time, "")


def plans_of_prefixes(costs: list[LayerCost]) -> Iterator[Plan]:
    """All plans that offload the first groups, release each after so many others and reload it so many ahead."""
    count = len(costs)
    for number in range(count):
        for behind in range(count):
            for ahead in range(count):
                groups = {k: (min(k + behind, count - 1), min(k + ahead, count - 1)) for k in range(number)}
                yield Plan.of(count, copied(groups))


@settings(max_examples=50)
@given(st.data(), steps(most=5), links)
def test_it_is_about_the_best_of_all_plans(data, costs, link):
    results = [simulate(plan, costs, link) for plan in plans_of_prefixes(costs)]
    limit = data.draw(st.sampled_from(sorted({result.device_peak_bytes for result in results})))
    best = min(result.step_time for result in results if result.device_peak_bytes <= limit)
    plan = choose_plain(costs, link, limit=limit)
    assert plan.peak_bytes <= limit
    assert plan.seconds <= best * 1.03 + 1e-9


@settings(max_examples=100)
@given(st.data(), steps(plain=True), links)
def test_it_is_never_slower_than_the_default_schedule_at_its_peak(data, costs, link):
    schedule = DefaultSchedule(data.draw(st.integers(0, len(costs) - 1)), len(costs))
    default = simulate(schedule.plan(), costs, link)
    plan = choose_plain(costs, link, limit=default.device_peak_bytes)
    assert plan.peak_bytes <= default.device_peak_bytes
    assert plan.seconds <= default.step_time * 1.002 + 1e-9


@pytest.mark.parametrize(
    ("rate", "limit", "because"),
    [
        (1e6, 2000, "Without offloading the peak would be 7.8 KiB, above the limit of 2.0 KiB."),  # copies cost nothing
        (500.0, 3072, "Without offloading the peak would be 7.8 KiB, above the limit of 3.0 KiB."),
        (1e6, 512, "No plan is within the limit of 512 bytes; this one has the smallest peak."),
    ],
)
def test_the_plan_says_why(rate, limit, because):
    plan = choose_plain([LayerCost.even(1000, 1.0, 2.0, pieces=4)] * 8, Link(rate, rate), limit=limit)
    assert plan.because == because
    assert plan.offloaded


# With recomputation: near the best of all choices of ways and offloaded groups


GROUPS = 4


def model() -> list[tuple[Variant, ...]]:
    return [convex(200 * (GROUPS - k)) for k in range(GROUPS)]


def best_of_all(of: list[tuple[Variant, ...]], link: Link, limit: float) -> float:
    seconds = inf
    for variants in product(*(range(len(group)) for group in of)):
        ranks = model_ranks([group[k].cost for group, k in zip(of, variants, strict=True)], link)
        profile = ranks.profiles[0]
        for offloaded in product((False, True), repeat=GROUPS - 1):
            placement = profile.place([k for k in range(GROUPS - 1) if offloaded[k]], limit)
            if placement.peak_bytes <= limit:
                seconds = min(seconds, profile.seconds(placement, seconds))
    return seconds


@pytest.mark.parametrize(("rate", "more"), [(5e10, 0), (5e10, 100), (5e10, 2000), (2e10, 600), (1e11, 600)])
def test_near_the_best_of_all_choices(rate, more):
    of, link = model(), Link(rate, rate)
    names = [f"h.{k}" for k in range(GROUPS)]
    limit = choose(names, of, link, limit=0).peak_bytes + more * MIB
    plan = choose(names, of, link, limit=limit)
    assert plan.peak_bytes <= limit
    assert plan.seconds <= 1.03 * best_of_all(of, link, limit)


# Releases and reloads of given groups


def placed(ranks: RanksAsRun, groups: Collection[int], limit: float = inf) -> tuple[Placement, float]:
    """Return the placement of some groups, and the time of a step."""
    profile = ranks.profiles[0]
    chosen = [k for k, spot in enumerate(profile.spots.all) if spot.layer in groups]
    found = profile.place(chosen, limit)
    return found, profile.seconds(found)


def plan_of(costs: Sequence[LayerCost], link: Link, groups: Collection[int], limit: float = inf) -> Plan:
    """Return the plan for some groups."""
    return Plan(len(costs), placed(model_ranks(costs, link), groups, limit)[0].steps())


@given(st.data(), steps(), links)
def test_no_placement_has_a_smaller_peak_than_the_leanest(data, costs, link):
    ranks = model_ranks(costs, link)
    profile = ranks.profiles[0]
    kinds = profile.kinds[: data.draw(st.integers(0, len(profile.kinds)))]
    groups = {profile.spots.all[k].layer for kind in kinds for k in kind}
    least = profile.leanest(kinds)
    limit = data.draw(st.integers(0, 2 * least))
    found, seconds = placed(ranks, groups, limit)
    assert found.peak_bytes >= least
    lean, lean_seconds = placed(ranks, groups, least)
    assert lean.peak_bytes == least
    if limit >= least:
        assert found.peak_bytes <= limit
        assert seconds <= lean_seconds * (1 + 1e-9)


def test_groups_are_released_when_they_are_copied_and_reloaded_just_in_time():
    """A copy of a group takes a half of its forward and a quarter of its backward."""
    costs, link = [LayerCost.even(1000, 1.0, 2.0, pieces=4)] * 8, Link(2000.0, 2000.0)
    plan = plan_of(costs, link, range(6))
    assert [plan.find(Do.RELEASE, k) for k in range(6)] == [Event(When.FORWARD_END, k + 1) for k in range(6)]
    assert [plan.find(Do.RELOAD, k) for k in range(6)] == [Event(When.BACKWARD_START, k + 1) for k in range(6)]
    # Within the smallest limit each waits for its copies.
    least = plan_of(costs, link, range(7), 1000)
    assert [least.find(Do.RELEASE, k) for k in range(7)] == [Event(When.FORWARD_START, k + 1) for k in range(7)]
    assert [least.find(Do.RELOAD, k) for k in range(7)] == [Event(When.BACKWARD_END, k + 1) for k in range(7)]
    assert simulate(least, costs, link).step_time > simulate(plan, costs, link).step_time


def test_a_group_that_cannot_be_copied_in_time_is_kept():
    """Nor is it released in a later backward that needs more than the limit."""
    costs = [LayerCost(1.0, 2.0, backward_temporary=5000), *[LayerCost.even(1000, 1.0, 2.0, pieces=4)] * 2]
    found, seconds = placed(model_ranks(costs, Link(1.0, 1.0)), [1], 4000)
    assert found.placed == {}
    assert (seconds, found.peak_bytes) == (9.0, 5000)


def test_the_last_group_is_recomputed_beside_a_loss_that_takes_much_memory():
    """What it saves lies there while the loss runs, as what the others save does."""
    link, groups = Link(d2h=5e10, h2d=5e10), model()
    loss = [replace(way, cost=replace(way.cost, gap_backward_temporary=4000 * MIB)) for way in groups[-1]]
    names, groups = [f"h.{k}" for k in range(GROUPS)], [*groups[:-1], tuple(loss)]
    least = choose(names, groups, link, limit=0).peak_bytes
    plan = choose(names, groups, link, limit=least + 400 * MIB)
    assert plan.saves[-1] is not None
    assert plan.seconds <= 1.03 * best_of_all(groups, link, least + 400 * MIB)
