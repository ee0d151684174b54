"""The engine on the reference device and `simulate` agree: every copy, every stall, the peak, to the last bit.

All times are multiples of a power of two, so that sums and quotients are exact and `==` is meant.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from adversary.plans import plans
from helpers import any_size, make_manual
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from actoffload import (
    DefaultSchedule,
    Do,
    Kind,
    LayerCost,
    Link,
    ManualSchedule,
    Plan,
    ReferenceDevice,
    Saved,
    Simulation,
    Statistics,
    Timeline,
    When,
    simulate,
)
from actoffload.engine.engine import Engine
from actoffload.offload_context import OffloadContext
from actoffload.schedule.groups import GroupSchedule


@pytest.fixture(autouse=True)
def _every_tensor_leaves():
    with any_size(1):
        yield


class Work(torch.autograd.Function):
    """Computes for a while in forward and in backward, and may save one tensor in between."""

    @staticmethod
    def forward(ctx, x, device, before, behind, payload):
        device.compute(before)
        if payload is not None:
            ctx.save_for_backward(payload)
        ctx.device, ctx.behind = device, behind
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        for tensor in ctx.saved_tensors:  # waits for it
            assert tensor.dtype is torch.uint8
        ctx.device.compute(ctx.behind)
        return grad, None, None, None, None


def layer_of(cost: LayerCost, device: ReferenceDevice):
    """Return a layer that takes as long and saves as much as a cost says."""
    saved_at = [saved.saved_at * cost.forward for saved in cost.saved]
    needed_at = [saved.needed_at * cost.backward for saved in cost.saved]

    def layer(x):
        forward_done, needed_next = 0.0, [cost.backward, *needed_at]
        for k, saved in enumerate(cost.saved):
            payload = torch.full((saved.nbytes,), k % 251, dtype=torch.uint8)
            behind = needed_next[k] - needed_at[k]  # until the tensor that was saved before is needed
            x = Work.apply(x, device, saved_at[k] - forward_done, behind, payload)
            forward_done = saved_at[k]
        head = needed_at[-1] if cost.saved else cost.backward
        return Work.apply(x, device, cost.forward - forward_done, head, None)

    return layer


def run(context, sync, device, costs, *, after=lambda k, x: None) -> tuple[Timeline, Statistics, float]:
    with context.record_timeline() as recorder:
        x = torch.zeros(1, requires_grad=True) * 1.0
        for k, cost in enumerate(costs):
            with context:
                x = layer_of(cost, device)(x)
            x = sync(x)
            after(k, x)
        x.backward()
        del x
    return recorder.timeline(), context.statistics(), device.main.now


def agree(got: tuple[Timeline, Statistics, float], want: Simulation) -> None:
    timeline, statistics, end = got

    def copies(t: Timeline) -> list[tuple]:
        return sorted((s.kind.value, s.start, s.end, s.layer, s.nbytes) for s in t.of(Kind.D2H, Kind.H2D))

    assert copies(timeline) == copies(want.timeline)
    assert end == want.step_time
    assert timeline.end == want.timeline.end
    layers = range(max((s.layer for s in want.timeline.spans), default=0) + 1)

    def stalled(t: Timeline) -> list[float]:
        return [sum(s.seconds for s in t.of(Kind.STALL) if s.layer == k) for k in layers]

    assert stalled(timeline) == stalled(want.timeline)
    assert timeline.seconds(Kind.STALL) == want.stall_seconds

    def work(t: Timeline, kind: Kind) -> list[float]:
        """Seconds of compute of each layer: its spans less the stalls that lie in them."""
        spans, stalls = t.of(kind), t.of(Kind.STALL)
        return [
            sum(b.seconds - sum(s.seconds for s in stalls if b.start <= s.start and s.end <= b.end) for b in mine)
            for mine in ([span for span in spans if span.layer == k] for k in layers)
        ]

    def starts(t: Timeline) -> list[float]:
        """When each layer that computes at all first does: behind the stalls with which its span may begin."""
        stalls = {s.start: s.end for s in t.of(Kind.STALL) if s.seconds}
        found = []
        for k, seconds in zip(layers, work(t, Kind.FORWARD), strict=True):
            if seconds:
                start = min(s.start for s in t.of(Kind.FORWARD) if s.layer == k and s.seconds)
                while start in stalls:
                    start = stalls[start]
                found.append(start)
        return found

    assert starts(timeline) == starts(want.timeline)
    assert work(timeline, Kind.FORWARD) == work(want.timeline, Kind.FORWARD)
    assert work(timeline, Kind.BACKWARD) == work(want.timeline, Kind.BACKWARD)
    assert statistics.peak_resident_bytes == want.peak_bytes
    assert timeline.peak_bytes == want.peak_bytes
    assert statistics.reloaded_on_demand == want.reloaded_on_demand
    assert statistics.bytes_offloaded == want.bytes_offloaded
    assert statistics.bytes_reloaded == want.bytes_reloaded
    assert statistics.resident_bytes == 0


eighths = st.integers(0, 8).map(lambda k: k / 8)
seconds = st.integers(0, 12).map(lambda k: k / 4)


@st.composite
def costs(draw, most: int = 4) -> LayerCost:
    count = draw(st.integers(0, most))
    saved_at = sorted(draw(eighths) for _ in range(count))
    needed_at = sorted((draw(eighths) for _ in range(count)), reverse=True)
    sizes = [draw(st.integers(1, 24)) * 256 for _ in range(count)]
    return LayerCost(
        draw(seconds), draw(seconds), tuple(Saved(*each) for each in zip(sizes, saved_at, needed_at, strict=True))
    )


bandwidths = st.sampled_from([256.0, 1024.0, 4096.0, 65536.0, float("inf")])
links = st.builds(Link, bandwidths, bandwidths, st.sampled_from([0.0, 0.125]))


def execute(plan: Plan, each: list[LayerCost], link: Link) -> tuple[Timeline, Statistics, float]:
    device = ReferenceDevice(link.d2h, link.h2d, link.latency)
    context = OffloadContext(Engine(plan, device))
    return run(context, context.synchronize, device, each)


@pytest.mark.parametrize(("num", "of"), [(n, m) for m in range(1, 8) for n in range(m)])
@pytest.mark.parametrize("speed", [512.0, 2048.0, 1e9])
def test_even_layers(num, of, speed):
    each = [LayerCost.even(4096, forward=1.0, backward=2.0, pieces=4)] * of
    link = Link(speed if speed != 1e9 else 2.0**30, speed if speed != 1e9 else 2.0**30)
    plan = DefaultSchedule(num, of).plan()
    agree(execute(plan, each, link), simulate(plan, each, link))


@settings(max_examples=150)
@given(st.data(), links)
def test_any_layers_under_the_default_schedule(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=7))
    plan = DefaultSchedule(data.draw(st.integers(0, len(each) - 1)), len(each)).plan()
    agree(execute(plan, each, link), simulate(plan, each, link))


@pytest.mark.parametrize(("num", "of"), [(n, m) for m in range(2, 7) for n in range(m)])
@pytest.mark.parametrize("inflight", [None, 1, 2])
@pytest.mark.parametrize("speed", [512.0, 2048.0, 2.0**30])
def test_even_groups_that_give_way(num, of, inflight, speed):
    each = [LayerCost.even(4096, forward=1.0, backward=2.0, pieces=4)] * of
    plan = GroupSchedule(num, max_inflight=inflight).plan(["layer"] * of)
    want = simulate(plan, each, Link(speed, speed))
    agree(execute(plan, each, Link(speed, speed)), want)
    # As many groups as stay, and for a moment the tensor for which room is made.
    assert want.peak_bytes <= (of - num) * 4096 + 1024 * (num > 0)


@pytest.mark.parametrize("inflight", [1, 2, 3])
def test_a_cap_alone_makes_nobody_wait(inflight):
    """A copy of a group takes 0.75 of the time of its compute, so that one on its way at a time is enough."""
    each = [LayerCost.even(4096, forward=1.0, backward=1.0, pieces=4)] * 8
    link = Link(4096 / 0.75, 4096 / 0.75)
    plan = GroupSchedule(4, max_inflight=inflight).plan(["layer"] * 8)
    want = simulate(plan, each, link)
    assert (want.forward_stall, want.backward_stall) == (0.0, 0.0)
    agree(execute(plan, each, link), want)


@settings(max_examples=150)
@given(st.data(), links)
def test_any_groups(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=7))
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=len(each), max_size=len(each)))
    most = st.one_of(st.none(), st.integers(0, len(each)))
    schedule = GroupSchedule(data.draw(most), data.draw(eighths), data.draw(st.sampled_from([None, 1, 2])))
    plan = schedule.plan(kinds)
    agree(execute(plan, each, link), simulate(plan, each, link))


@settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), links)
def test_any_plan(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=6))
    plan = data.draw(plans(len(each)))
    # A copy out in backward may wait for host memory that a copy in still reads; `simulate` has host memory for all.
    assume(all(plan.find(Do.OFFLOAD, k).when in (When.FORWARD_START, When.FORWARD_END) for k in plan.offloaded))
    agree(execute(plan, each, link), simulate(plan, each, link))


def test_giving_way_needs_no_wait_where_leaving_at_once_does():
    """Layer 1 has until 3.5 s and 4 s for its two tensors, when layer 3 saves its own, and not only until 3 s."""
    each = [LayerCost.even(4096, forward=1.0, backward=2.0, pieces=2)] * 4
    link = Link(2048.0 / 0.75, 1e9)
    assert simulate(DefaultSchedule(2, 4).plan(), each, link).forward_stall > 0
    assert simulate(GroupSchedule(2).plan(["layer"] * 4), each, link).forward_stall == 0


@st.composite
def manual_schedules(draw, of: int) -> ManualSchedule:
    """Any valid order of calls."""
    schedule = ManualSchedule(of)
    calls = []
    for layer in range(of):
        stage = draw(st.integers(0, 3))
        offload = draw(st.integers(layer, of - 1))
        release = draw(st.integers(offload, of - 1))
        reload = draw(st.integers(layer, of - 1))
        if stage >= 1:
            calls.append((offload, 0, "start_offload_layer", layer))
        if stage >= 2:
            calls.append((release, 1, "release_activation_forward_gpu_memory", layer))
        if stage >= 3:
            calls.append((2 * of - reload, 2, "start_reload_layer", layer))
    for when, _, name, layer in sorted(calls):
        if name == "start_reload_layer":
            schedule = schedule.start_reload_layer(layer, before_backward_of=2 * of - when)
        else:
            schedule = getattr(schedule, name)(layer, after_forward_of=when)
    return schedule


def by_controller(schedule: ManualSchedule, each, link) -> tuple[Timeline, Statistics, float]:
    """Make the calls of a schedule on a controller, after a layer or in a hook before its backward."""
    device = ReferenceDevice(link.d2h, link.h2d, link.latency)
    context, sync, controller = make_manual(len(each), device=device)
    plan = schedule.plan()
    names = {
        Do.OFFLOAD: controller.start_offload_layer,
        Do.RELEASE: controller.release_activation_forward_gpu_memory,
        Do.RELOAD: controller.start_reload_layer,
    }

    def call(when: When, k: int) -> None:
        for action in plan.at(when, k):
            names[action.do](action.layer)

    def after(k: int, x: torch.Tensor) -> None:
        call(When.FORWARD_END, k)
        x.register_hook(lambda grad: call(When.BACKWARD_START, k))

    return run(context, sync, device, each, after=after)


@settings(max_examples=150)
@given(st.data(), links)
def test_any_layers_under_a_manual_schedule(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=6))
    schedule = data.draw(manual_schedules(len(each)))
    plan = schedule.plan()
    want = simulate(plan, each, link)
    agree(by_controller(schedule, each, link), want)
    agree(execute(plan, each, link), want)


def test_stalls_in_forward_and_backward_by_hand():
    """Copies take 4 s a layer and compute 1 s: two layers of four leave."""
    each = [LayerCost(1.0, 1.0, (Saved(1024, 1.0, 0.0),))] * 4
    link = Link(256.0, 256.0)
    plan = DefaultSchedule(2, 4).plan()
    timeline, statistics, end = execute(plan, each, link)
    spans = [(s.kind, s.layer, s.start, s.end) for s in timeline.of(Kind.D2H, Kind.H2D, Kind.STALL)]
    assert spans == [
        (Kind.D2H, 0, 1.0, 5.0),
        (Kind.STALL, 0, 2.0, 5.0),  # layer 2 waits until layer 0 has left
        (Kind.D2H, 1, 5.0, 9.0),
        (Kind.STALL, 1, 6.0, 9.0),
        (Kind.H2D, 1, 11.0, 15.0),  # when the backward of layer 3 has ended
        (Kind.STALL, 1, 12.0, 15.0),
        (Kind.H2D, 0, 15.0, 19.0),  # asked for at 12, but the link is busy
        (Kind.STALL, 0, 16.0, 19.0),
    ]
    assert end == 20.0
    assert statistics.peak_resident_bytes == 2 * 1024
    agree((timeline, statistics, end), simulate(plan, each, link))


def test_a_stall_of_microseconds_is_one_too():
    """The clocks of the reference device are exact, so nothing is too short to count."""
    each = [LayerCost(2.0**-20, 2.0**-20, (Saved(1024, 1.0, 0.0),))] * 4
    link = Link(2.0**29, 2.0**29)
    plan = DefaultSchedule(2, 4).plan()
    want = simulate(plan, each, link)
    assert 0 < want.stall_seconds < 1e-5
    agree(execute(plan, each, link), want)


def test_a_second_step_is_like_the_first():
    each = [LayerCost.even(4096, 1.0, 2.0, pieces=4)] * 5
    link = Link(1024.0, 1024.0)
    device = ReferenceDevice(link.d2h, link.h2d)
    plan = DefaultSchedule(3, 5).plan()
    context = OffloadContext(Engine(plan, device))
    want = simulate(plan, each, link)
    for step in range(1, 4):
        context.reset_statistics()
        timeline, statistics, end = run(context, context.synchronize, device, each)
        agree((timeline, statistics, end - (step - 1) * want.step_time), want)


def test_a_timeline_of_nothing():
    device = ReferenceDevice()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context = OffloadContext(Engine(Plan(1), device))
    with context.record_timeline() as recorder:
        pass
    assert recorder.timeline().spans == ()
    assert recorder.timeline().source == "reference device"


@pytest.mark.parametrize("recorded", [True, False])
def test_groups_come_back_into_the_room_of_what_backward_has_used(recorded):
    """A copy takes 0.25 s, and backward has used three of its four tensors after 1.5 s of 2: so nobody waits."""
    each = [LayerCost.even(4096, forward=1.0, backward=2.0, pieces=4)] * 4
    link = Link(1e12, 4096.0)
    plan = GroupSchedule(3).plan(["layer"] * 4)
    want = simulate(plan, each, link)
    at_once = simulate(DefaultSchedule(3, 4).plan(), each, link)
    assert (want.backward_stall, at_once.backward_stall) == (0.0, 0.75)
    assert want.peak_bytes == at_once.peak_bytes + 1024  # for a moment in forward, while room is made
    device = ReferenceDevice(link.d2h, link.h2d)
    context = OffloadContext(Engine(plan, device))
    with context.record_timeline() if recorded else nullcontext():
        x = torch.zeros(1, requires_grad=True) * 1.0
        for cost in each:
            with context:
                x = layer_of(cost, device)(x)
            x = context.synchronize(x)
        x.backward()
        del x
    assert device.main.now == want.step_time
    assert context.statistics().peak_resident_bytes == want.peak_bytes
