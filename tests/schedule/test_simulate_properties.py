"""What holds for every model, plan and link.

Times are multiples of 1/64 s and bandwidths powers of two, so that no sum is rounded and all comparisons are
exact.
"""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload.schedule.costs import LayerCost, Link, Saved
from actoffload.schedule.plan import Do, Plan
from actoffload.schedule.schedules import DefaultSchedule, ManualSchedule
from actoffload.schedule.simulate import Simulation, simulate
from actoffload.schedule.timeline import Kind

NO_LINK_LIMIT = Link(math.inf, math.inf)

eighths = st.integers(0, 8).map(lambda k: k / 8)
seconds = st.integers(0, 40).map(lambda k: k / 8)
bandwidths = st.integers(-3, 6).map(lambda k: 2.0**k)
links = st.builds(Link, d2h=bandwidths, h2d=bandwidths, latency=st.integers(0, 4).map(lambda k: k / 8))


@st.composite
def costs(draw: st.DrawFn) -> LayerCost:
    saved_at = sorted(draw(st.lists(eighths, max_size=4)))
    saved = tuple(Saved(draw(st.integers(1, 100)), at, draw(eighths)) for at in saved_at)
    return LayerCost(draw(seconds), draw(seconds), saved)


@st.composite
def models(draw: st.DrawFn) -> tuple[DefaultSchedule, list[LayerCost]]:
    model_layers = draw(st.integers(1, 8))
    num_layers = draw(st.integers(0, model_layers - 1))
    layers = [draw(costs()) for _ in range(model_layers)]
    return DefaultSchedule(num_layers, model_layers), layers


@st.composite
def manual_plans(draw: st.DrawFn, model_layers: int) -> Plan:
    """Some layers, offloaded, perhaps released, perhaps reloaded."""
    schedule = ManualSchedule(model_layers)
    for layer in range(model_layers):
        calls = draw(st.integers(0, 3))
        after = draw(st.integers(layer, model_layers - 1))
        if calls > 0:
            schedule = schedule.start_offload_layer(layer, after_forward_of=after)
        if calls > 1:
            after = draw(st.integers(after, model_layers - 1))
            schedule = schedule.release_activation_forward_gpu_memory(layer, after_forward_of=after)
        if calls > 2:
            before = draw(st.integers(layer, model_layers - 1))
            schedule = schedule.start_reload_layer(layer, before_backward_of=before)
    return schedule.plan()


@st.composite
def runs(draw: st.DrawFn) -> tuple[Plan, list[LayerCost], Simulation]:
    schedule, layers = draw(models())
    plan = draw(st.one_of(st.just(schedule.plan()), manual_plans(len(layers))))
    return plan, layers, simulate(plan, layers, draw(links))


@given(runs())
def test_no_byte_is_lost(run: tuple[Plan, list[LayerCost], Simulation]) -> None:
    plan, layers, result = run
    released = [i for i in range(len(layers)) if plan.find(Do.RELEASE, i)]
    assert result.bytes_offloaded == sum(layers[i].nbytes for i in plan.offloaded)
    assert result.bytes_reloaded == sum(layers[i].nbytes for i in released)
    on_demand = [i for i in released if not plan.find(Do.RELOAD, i)]
    assert result.reloaded_on_demand == sum(len(layers[i].saved) for i in on_demand)
    curve = [nbytes for _, nbytes in result.timeline.resident]
    assert all(nbytes >= 0 for nbytes in curve)
    assert not curve or curve[-1] == 0
    assert result.peak_bytes <= sum(cost.nbytes for cost in layers)
    times = [time for time, _ in result.timeline.resident]
    assert times == sorted(times)


@given(model=models(), link=links)
def test_the_peak_of_a_default_plan_is_its_largest_window_whatever_the_link(
    model: tuple[DefaultSchedule, list[LayerCost]], link: Link
) -> None:
    schedule, layers = model
    window = schedule.window
    windows = [layers[start : start + window] for start in range(len(layers) - window + 1)]
    largest = max(sum(cost.nbytes for cost in some) for some in windows)
    assert simulate(schedule.plan(), layers, link).peak_bytes == largest
    assert simulate(schedule.plan(), layers, NO_LINK_LIMIT).peak_bytes == largest


@given(models())
def test_nothing_stalls_on_an_infinitely_fast_link(model: tuple[DefaultSchedule, list[LayerCost]]) -> None:
    schedule, layers = model
    result = simulate(schedule.plan(), layers, NO_LINK_LIMIT)
    assert result.timeline.of(Kind.STALL) == ()
    assert result.step_time == result.baseline
    assert result.slowdown == 1.0
    assert result.reloaded_on_demand == 0


@given(model=models(), link=links)
def test_no_step_is_faster_than_its_compute_and_its_copies_allow(
    model: tuple[DefaultSchedule, list[LayerCost]], link: Link
) -> None:
    schedule, layers = model
    result = simulate(schedule.plan(), layers, link)
    away = layers[: schedule.num_layers]
    copies = sum(len(cost.saved) for cost in away) * link.latency
    out, back = (copies + sum(cost.nbytes for cost in away) / bandwidth for bandwidth in (link.d2h, link.h2d))
    forward, backward = sum(cost.forward for cost in layers), sum(cost.backward for cost in layers)
    assert result.forward_time >= max(forward, out)
    assert result.backward_time >= max(backward, back)
    assert result.step_time <= forward + backward + out + back


@settings(max_examples=200)
@given(data=st.data(), model=models(), link=links, d2h=st.integers(0, 4), h2d=st.integers(0, 4))
def test_a_faster_link_never_makes_a_step_slower(
    data: st.DataObject, model: tuple[DefaultSchedule, list[LayerCost]], link: Link, d2h: int, h2d: int
) -> None:
    schedule, layers = model
    plan = data.draw(st.one_of(st.just(schedule.plan()), manual_plans(len(layers))))
    faster = Link(link.d2h * 2**d2h, link.h2d * 2**h2d, link.latency / 2)
    slow, fast = simulate(plan, layers, link), simulate(plan, layers, faster)
    assert fast.step_time <= slow.step_time
    assert fast.forward_time <= slow.forward_time


@given(model=models(), link=links)
def test_the_same_calls_made_by_hand_cost_the_same(model: tuple[DefaultSchedule, list[LayerCost]], link: Link) -> None:
    # The controller's calls come between layers: the end of one is the start of the next, and copies queued
    # at the end of a layer run from the moment each tensor was ready.  So both plans must cost the same.
    schedule, layers = model
    manual = ManualSchedule(schedule.model_layers)
    for i in range(schedule.num_layers):
        behind = i + schedule.window - 1
        manual = (
            manual.start_offload_layer(i, after_forward_of=i)
            .release_activation_forward_gpu_memory(i, after_forward_of=behind)
            .start_reload_layer(i, before_backward_of=behind)
        )
    assert simulate(manual.plan(), layers, link) == simulate(schedule.plan(), layers, link)
