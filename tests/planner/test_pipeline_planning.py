"""Plans of pipelines: what the planner says equals what the simulation gives, and keeps what it promises."""

import time
from dataclasses import replace

import pipeline_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload.planner import Variant, plan_pipeline
from actoffload.planner.placement import Knobs
from actoffload.planner.search import RanksAsRun
from actoffload.schedule import (
    Computation,
    Do,
    Kind,
    LayerCost,
    Link,
    PipelineSimulation,
    Plan,
    Saved,
    Simulation,
    StageCost,
    Step,
    one_f_one_b,
    simulate_pipeline,
)
from actoffload.schedule.simulate import rank_plans

MIB = 2**20
GROUP = LayerCost.even(256 * MIB, forward=0.010, backward=0.020)
STAGE = StageCost((GROUP,) * 4, boundary_bytes=16 * MIB)


def simulated(
    orders: pipeline_cases.Orders, stages: list[StageCost], link: Link, plans: tuple[Plan, ...]
) -> PipelineSimulation:
    found = simulate_pipeline(orders, stages, link, plans)
    for plan, rank in zip(plans, found.ranks, strict=True):
        assert plan.peak_bytes == rank.device_peak_bytes
        assert plan.seconds == found.step_time
    return found


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_a_fraction_costs_nothing(data: st.DataObject) -> None:
    orders, count, split = data.draw(pipeline_cases.orders_of_schedules())
    stages = data.draw(pipeline_cases.stages(count, split))
    link = Link(data.draw(st.sampled_from([32.0, 512.0])), 256.0, both=data.draw(st.sampled_from([None, 260.0])))
    plans = plan_pipeline(rank_plans(orders, stages), stages, link, fraction=1.0)
    found = simulated(orders, stages, link, plans)
    assert found.slowdown <= 1.002 or link.both is not None
    for rank, without in zip(found.ranks, found.baseline, strict=True):
        assert rank.device_peak_bytes <= without.device_peak_bytes
    assert plan_pipeline(rank_plans(orders, stages), stages, link, fraction=1.0) == plans
    assert not any(plan.offloaded for plan in plan_pipeline(rank_plans(orders, stages), stages, link))


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_a_budget_is_kept_or_the_plan_says_so(data: st.DataObject) -> None:
    orders, count, split = data.draw(pipeline_cases.orders_of_schedules())
    stages = data.draw(pipeline_cases.stages(count, split))
    budget = data.draw(st.integers(100, 1500))
    plans = plan_pipeline(rank_plans(orders, stages), stages, Link(64.0, 64.0), budgets=[budget] * len(orders))
    found = simulated(orders, stages, Link(64.0, 64.0), plans)
    for plan, rank, without in zip(plans, found.ranks, found.baseline, strict=True):
        if rank.device_peak_bytes > budget:
            assert plan.because.startswith("No plan of this rank is within the limit of")
        elif without.device_peak_bytes <= budget:
            assert not plan.offloaded


@pytest.mark.parametrize("ranks", [2, 4])
def test_dense_interleaved_drops_by_60_percent(ranks: int) -> None:
    """16 microbatches, 2 stages a rank, and copies that take two thirds of the compute of their groups."""
    began = time.process_time()
    orders, stages = pipeline_cases.interleaved_1f1b(ranks, 16), [StageCost((GROUP,) * 4)] * (2 * ranks)
    rate = 256 * MIB / 0.020
    for link in (Link(rate, rate), Link(rate, rate, both=1.6 * rate)):
        without = simulate_pipeline(orders, stages, link).baseline
        limit = round(0.4 * max(rank.device_peak_bytes for rank in without))
        plans = plan_pipeline(rank_plans(orders, stages), stages, link, budgets=[limit] * len(orders))
        found = simulated(orders, stages, link, plans)
        assert max(rank.device_peak_bytes for rank in found.ranks) <= limit
        assert found.slowdown <= 1.05
    assert time.process_time() - began < 5.0


def test_zero_bubble_within_a_fraction() -> None:
    group = LayerCost(1.0, 2.0, (Saved(60, 0.5, 0.5), Saved(40)), weight_backward=1.0)
    stages = [StageCost((group,) * 2)] + [StageCost((group,) * 2, split=True)] * 3
    orders = tuple(pipeline_cases.split_backwards(order, 3) for order in one_f_one_b(4, 8))
    link = Link(1000, 1000)
    plans = plan_pipeline(rank_plans(orders, stages), stages, link, fraction=1.0)
    found = simulated(orders, stages, link, plans)
    assert found.slowdown <= 1.002
    assert max(r.device_peak_bytes for r in found.ranks) < 0.65 * max(r.device_peak_bytes for r in found.baseline)


def test_knobs() -> None:
    orders, stages, link = one_f_one_b(4, 16), [STAGE] * 4, Link(40e9, 40e9)
    half = plan_pipeline(rank_plans(orders, stages), stages, link, fraction=0.5)
    assert set(half[0].offloaded) == {0, 1}
    less = plan_pipeline(rank_plans(orders, stages), stages, link, delta_bytes_per_rank=256 * MIB)
    for rank, plan in enumerate(less):
        assert len(set(plan.offloaded)) <= 4 - rank
    assert set(less[2].offloaded) == {0, 1}
    assert plan_pipeline(rank_plans(orders, stages), stages, link, fraction=0.0)[0].offloaded == ()


def most_at_a_time(plan: Plan, rank: Simulation) -> int:
    """Return how many groups of a simulated rank are copied to the host at a time, from the start of their forward."""
    ends = [span.end for span in rank.timeline.spans if span.kind is Kind.D2H]  # one for each, in order of saving
    starts = [
        rank.starts[plan.order.index(Step(plan.stages[layer], Computation.FORWARD, microbatch))] + layer * 0.010
        for actions in plan.steps.values()
        for do, layer, microbatch in actions
        if do is Do.OFFLOAD
    ]
    copies = list(zip(starts, ends, strict=True))
    return max(sum(begun <= start < end for begun, end in copies) for start in starts)


def test_copies_in_flight() -> None:
    """A copy takes more than twice as long as the forward of its group."""
    orders, stages, slow = one_f_one_b(4, 16), [STAGE] * 4, Link(12e9, 12e9)
    counts = []
    for cap in (1, 2, 3, None):
        plans = plan_pipeline(rank_plans(orders, stages), stages, slow, fraction=1.0, max_inflight=cap)
        assert cap is None or plan_pipeline(rank_plans(orders, stages), stages, slow, max_inflight=cap) == plans
        found = simulated(orders, stages, slow, plans)
        assert found.slowdown <= 1.002
        most = most_at_a_time(plans[0], found.ranks[0])
        assert most == cap if cap is not None else most > 3
        counts.append(len(plans[0].offloaded))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_budget_costs_time_only_if_it_must() -> None:
    orders, stages, link = one_f_one_b(4, 16), [STAGE] * 4, Link(20e9, 20e9)
    free = plan_pipeline(rank_plans(orders, stages), stages, link, fraction=1.0)
    enough = plan_pipeline(rank_plans(orders, stages), stages, link, budgets=[3000 * MIB] * len(orders))
    assert enough[0].seconds == pytest.approx(free[0].baseline_seconds, rel=0.002)
    assert enough[0].offloaded_bytes < free[0].offloaded_bytes
    assert enough[2].offloaded == ()
    budgets = [free[0].peak_bytes * 3 // 5, 4096 * MIB, 4096 * MIB, 4096 * MIB]
    tight = plan_pipeline(rank_plans(orders, stages), stages, link, budgets=budgets)
    assert tight[0].peak_bytes <= budgets[0]
    assert tight[0].because.startswith("No plan of this rank without a cost in time is within the limit of")
    assert tight[1].offloaded == ()
    least = plan_pipeline(rank_plans(orders, stages), stages, link, budgets=[100 * MIB] * len(orders))
    assert all(plan.because.startswith("No plan of this rank is within the limit of 100.0 MiB") for plan in least)
    assert least[0].peak_bytes < tight[0].peak_bytes


def recomputable() -> tuple[Variant, ...]:
    """Return the ways to run a group of which a matrix product saves half and a cheap operator the other half."""
    plain = replace(GROUP, saved=(Saved(128 * MIB, 0.5, 0.5), Saved(128 * MIB)))
    half = replace(plain, saved=plain.saved[:1], backward=0.0205)
    least = replace(plain, saved=(), backward=0.0285, backward_temporary=128 * MIB)
    return Variant(plain), Variant(half, ("aten.mm.default#0",)), Variant(least, ())


def test_recomputation_only_where_a_budget_needs_it() -> None:
    ways = {stage: (recomputable(),) * 4 for stage in range(4)}
    stages = [StageCost(tuple(of[0].cost for of in ways[stage])) for stage in range(4)]
    orders, link = one_f_one_b(4, 16), Link(4e9, 4e9)
    without = plan_pipeline(rank_plans(orders, stages), stages, link, budgets=[2048 * MIB] * len(orders))
    plans = plan_pipeline(rank_plans(orders, stages), stages, link, budgets=[2048 * MIB] * len(orders), variants=ways)
    assert all(plan.peak_bytes <= 2048 * MIB for plan in plans)
    assert plans[0].seconds < without[0].seconds
    assert any(saves is not None for saves in plans[0].saves)
    assert not plans[2].saves  # within the budget as it is
    assert not plans[3].saves
    all_that_fits = plan_pipeline(rank_plans(orders, stages), stages, link, fraction=1.0)
    assert plan_pipeline(rank_plans(orders, stages), stages, link, fraction=1.0, variants=ways) == all_that_fits


def test_a_rank_without_steps() -> None:
    orders: list[tuple[Step, ...]] = [*one_f_one_b(1, 2), ()]
    plans = plan_pipeline(rank_plans(orders, [STAGE]), [STAGE], Link(40e9, 40e9))
    assert plans[1].offloaded == ()
    assert RanksAsRun(rank_plans([()], []), [], Link(1.0, 1.0), {}, Knobs()).profiles[0].free.peak_bytes == 0
