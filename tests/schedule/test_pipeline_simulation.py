"""Simulated pipelines: small ones worked out by hand, what holds for all, and the time that it takes."""

import time
from dataclasses import replace
from typing import Any

import pipeline_cases
import pytest
from helpers import no_gc
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_calls import transfer

from actoffload.schedule import (
    Computation,
    Event,
    Kind,
    LayerCost,
    Link,
    PipelineSimulation,
    Plan,
    Saved,
    StageCost,
    Step,
    When,
    gpipe,
    one_f_one_b,
    read_order,
    simulate_pipeline,
)

FORWARD, BACKWARD = Computation.FORWARD, Computation.BACKWARD
FAST = Link(1e9, 1e9)
STAGE = StageCost((LayerCost(1.0, 2.0, (Saved(100),)),))


def test_bubbles_by_hand() -> None:
    found = simulate_pipeline(gpipe(2, 2), [STAGE] * 2, FAST)
    first, second = found.ranks
    # F0 0-1, F1 1-2; on rank 1 F0 1-2, F1 2-3, B0 3-5, B1 5-7; on rank 0 B0 5-7, B1 7-9.
    assert (first.starts, second.starts) == ((0.0, 1.0, 5.0, 7.0), (1.0, 2.0, 3.0, 5.0))
    assert (first.bubble_seconds, second.bubble_seconds) == (3.0, 1.0)
    assert (found.step_time, found.slowdown) == (9.0, 1.0)
    assert [rank.peak_bytes for rank in found.ranks] == [200, 200]


def test_1f1b_needs_less_memory_on_later_ranks() -> None:
    stages = [replace(STAGE, boundary_bytes=7, other_bytes=1000)] * 3
    found = simulate_pipeline(one_f_one_b(3, 6), stages, FAST)
    assert [rank.peak_bytes for rank in found.ranks] == [300, 200, 100]
    assert [rank.device_peak_bytes for rank in found.ranks] == [1321, 1214, 1107]


(TWO,) = gpipe(1, 2)
OFFLOADING = Plan.of(
    1,
    transfer(0, 0, Event(When.FORWARD_END, 0, 1), Event(When.BACKWARD_START, 0)),
    rank=0,
    order=TWO,
    stages=(0,),
)


def test_split_backward_by_hand() -> None:
    order = read_order(["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"])
    cost = LayerCost(1.0, 4.0, (Saved(60, 0.5, 0.5), Saved(40)), weight_backward=2.0)
    stage = StageCost((cost,), boundary_bytes=5, split=True)
    (rank,) = simulate_pipeline([order], [stage], Link(100, 100)).ranks
    assert [nbytes for _, nbytes in rank.timeline.resident] == [100, 200, 100, 0]
    assert (rank.step_time, rank.peak_bytes, rank.device_peak_bytes) == (10.0, 200, 210)

    # What the input backward leaves beside that stays until the weight backward ends, of both microbatches.
    more = replace(stage, between_bytes=30)
    (rank,) = simulate_pipeline([order], [more], Link(100, 100)).ranks
    assert (rank.peak_bytes, rank.device_peak_bytes) == (200, 210 + 60)
    # The last 40 bytes arrive 0.4 s after the input backward could start, the other 60 as it needs them at a half.
    calls = transfer(0, 0, Event(When.FORWARD_END, 0, 1), Event(When.INPUT_START, 0))
    plan = Plan.of(1, calls, rank=0, order=order, stages=(0,), splits=(0,))
    (rank,) = simulate_pipeline([order], [stage], Link(100, 100), [plan]).ranks
    assert [nbytes for _, nbytes in rank.timeline.resident][-4:] == [100, 200, 100, 0]
    assert (rank.stall_seconds, rank.bytes_reloaded) == (pytest.approx(0.4), 100)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_every_pipeline(data: st.DataObject) -> None:
    orders, count, split = data.draw(pipeline_cases.orders_of_schedules())
    stages = data.draw(pipeline_cases.stages(count, split))
    plans = data.draw(pipeline_cases.plans(orders, stages))
    link = Link(data.draw(st.sampled_from([16.0, 256.0])), 64.0, both=data.draw(st.sampled_from([None, 70.0])))
    found = simulate_pipeline(orders, stages, link, plans)
    assert found.slowdown >= 1 - 1e-9
    for rank, without, plan, order in zip(found.ranks, found.baseline, plans, orders, strict=True):
        assert rank.peak_bytes <= without.peak_bytes
        assert rank.device_peak_bytes <= without.device_peak_bytes
        assert rank.bytes_offloaded == plan.offloaded_bytes
        assert rank.timeline.resident[-1][1] == 0
        assert rank.timeline.seconds(Kind.STALL) == pytest.approx(rank.stall_seconds)
        busy = rank.timeline.seconds(Kind.FORWARD, Kind.BACKWARD)
        gaps = sum(
            of.gap_forward if step.computation is Computation.FORWARD else of.gap_backward
            for step in order
            for of in stages[step.stage].groups
            if step.computation is not Computation.BACKWARD_INPUT and not stages[step.stage].split
        )
        if not split:
            assert sum((busy, rank.stall_seconds, rank.bubble_seconds)) <= rank.step_time + 1e-9 + gaps
            assert sum((busy, gaps, rank.stall_seconds, rank.bubble_seconds)) >= rank.step_time - 1e-9
    # Bytes do not depend on times.
    faster = simulate_pipeline(orders, stages, Link(1e9, 1e9), plans)
    assert [r.device_peak_bytes for r in faster.ranks] == [r.device_peak_bytes for r in found.ranks]


def in_a_second(*arguments: Any) -> PipelineSimulation:
    """Simulate a pipeline in a second of processor time; it takes 0.2 to 0.9 s, and other processes slow it down.

    The collector would look through all that the tests before have left, which takes half as long again.
    """
    for _ in range(3):
        with no_gc():
            began = time.process_time()
            found = simulate_pipeline(*arguments)
            seconds = time.process_time() - began
        if seconds < 1.0:
            return found
    raise AssertionError("It took longer three times.")


def test_64_stages_and_256_microbatches_take_less_than_a_second() -> None:
    orders = one_f_one_b(64, 256)
    stages = [StageCost((LayerCost.even(2**30, 0.010, 0.020),), boundary_bytes=2**20)] * 64
    found = in_a_second(orders, stages, Link(50e9, 50e9))
    assert [rank.peak_bytes >> 30 for rank in found.ranks] == list(range(64, 0, -1))
    plans = []
    for rank, order in enumerate(orders[:-3]):
        plan, calls = Plan(1, rank=rank, order=order, stages=(rank,)), []
        for microbatch in range(256):
            saved, use = (order.index(Step(rank, kind, microbatch)) for kind in (FORWARD, BACKWARD))
            if use - saved > 3:
                release, reload = plan.events_of(order[saved + 1])[-1], plan.events_of(order[use - 1])[0]
                calls += transfer(0, microbatch, release, reload)
        plans.append(Plan.of(1, calls, rank=rank, order=order, stages=(rank,)))
    offloading = in_a_second(orders, stages, Link(99e9, 99e9), [*plans, None, None, None])
    assert offloading.slowdown < 1.01
    assert max(rank.peak_bytes >> 30 for rank in offloading.ranks) <= 4


def test_a_stage_in_no_order_does_not_make_others_wait() -> None:
    first, second = one_f_one_b(2, 4)
    stages = [STAGE] * 2
    alone = simulate_pipeline([(), second], stages, FAST).ranks[1]
    assert alone.bubble_seconds == 0
    assert alone.peak_bytes == simulate_pipeline([first, second], stages, FAST).ranks[1].peak_bytes


def test_what_cannot_run_is_named() -> None:
    stages = [STAGE] * 2
    with pytest.raises(ValueError, match=r"^The order has a backward of microbatch 0 before its forward\.$"):
        simulate_pipeline([read_order(["0F0", "0B0"]), read_order(["1B0", "1F0"])], stages, FAST)
    with pytest.raises(ValueError, match=r"Rank 0 waits forever at its step 0B0: no rank sends what that needs"):
        simulate_pipeline([read_order(["0F0", "0B0"]), read_order(["1F0", "1F1", "1B1"])], stages, FAST)
    with pytest.raises(ValueError, match="Rank 1 has stage 1, but there are costs of 1 stages"):
        simulate_pipeline(gpipe(2, 2), stages[:1], FAST)
    with pytest.raises(ValueError, match="There are 1 plans for 2 ranks"):
        simulate_pipeline(gpipe(2, 2), stages, FAST, [None])
    with pytest.raises(ValueError, match="The plan of rank 0 is for another order"):
        simulate_pipeline(gpipe(1, 3), stages[:1], FAST, [OFFLOADING])
    with pytest.raises(ValueError, match="Stage 1 has an input backward, but its cost has no split"):
        simulate_pipeline([read_order(["0F0", "0B0"]), read_order(["1F0", "1I0", "1W0"])], stages, FAST)
    two = StageCost(STAGE.groups * 2)
    with pytest.raises(ValueError, match="The plan of rank 0 is for another order, or for other groups or splits"):
        simulate_pipeline(gpipe(1, 2), [two], FAST, [OFFLOADING])


def test_a_table_by_rank() -> None:
    text = str(simulate_pipeline(pipeline_cases.looped_bfs(2, 2), [STAGE] * 4, FAST))
    assert text.splitlines()[0] == "step 15000.00 ms, 1.000 x no offload"
    assert text.splitlines()[2].split() == ["rank", "peak", "without", "peak", "offloaded", "stalled", "bubbles"]


def test_outputs_that_are_returned_and_gradients_stay_until_the_step_ends() -> None:
    """Two forwards and two backwards; a forward saves 100 bytes and returns 10, the first backward makes 1000."""
    (group,) = STAGE.groups
    stage = StageCost((replace(group, gradient_bytes=1000),), output_bytes=10, other_bytes=7)
    (rank,) = simulate_pipeline(gpipe(1, 2), [stage], Link(1.0, 1.0)).ranks
    assert rank.device_peak_bytes == 7 + 100 + 20 + 1000  # behind the first backward
    less = replace(stage, groups=(replace(group, gradient_bytes=50),))
    (rank,) = simulate_pipeline(gpipe(1, 2), [less], Link(1.0, 1.0)).ranks
    assert rank.device_peak_bytes == 7 + 200 + 20  # before it
    (rank,) = simulate_pipeline(one_f_one_b(1, 2), [less], Link(1.0, 1.0)).ranks
    assert rank.device_peak_bytes == 7 + 100 + 20 + 50
