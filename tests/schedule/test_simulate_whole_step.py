"""Steps worked out on paper: stalls, gaps, the host, a shared link, other memory, and the table of a step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_calls import copied

from actoffload.schedule import (
    Action,
    DefaultSchedule,
    Do,
    Event,
    Kind,
    LayerCost,
    Link,
    Plan,
    Saved,
    Simulation,
    When,
    simulate,
)
from actoffload.schedule.run import Pipeline
from actoffload.schedule.simulate import model_stages


def spans(simulation: Simulation, *kinds: Kind) -> list[tuple[int, float, float]]:
    return [(span.layer, span.start, span.end) for span in simulation.timeline.of(*kinds)]


LAYER = LayerCost(10.0, 20.0, (Saved(10),))
ONE_OF_TWO = Plan.of(2, copied({0: (1, 1)}))
FAST = Link(1.0, 1.0)


def test_the_table_names_what_matters() -> None:
    layers = [LayerCost.even(15 * 2**20, forward=0.010, backward=0.020, pieces=1)] * 5
    link = Link(d2h=2**20 / 0.001, h2d=2**20 / 0.002)
    assert str(simulate(DefaultSchedule(3, 5).plan(), layers, link)) == (
        "step      195.000 ms  1.300 x no offload\n"
        "forward    65.000 ms  15.000 ms stalled\n"
        "backward  130.000 ms  30.000 ms stalled\n"
        "peak        30.0 MiB  saved activations on the device\n"
        "offloaded   45.0 MiB  device to host\n"
        "reloaded    45.0 MiB  host to device, 0 tensors on demand"
    )


def test_gaps_are_compute_before_each_forward_and_backward():
    layers = [replace(LAYER, gap_forward=1.0, gap_backward=2.0), replace(LAYER, gap_forward=3.0, gap_backward=4.0)]
    result = simulate(ONE_OF_TWO, layers, FAST)
    assert spans(result, Kind.FORWARD) == [(0, 1.0, 11.0), (1, 14.0, 24.0)]
    assert spans(result, Kind.BACKWARD) == [(1, 28.0, 48.0), (0, 50.0, 70.0)]
    assert spans(result, Kind.D2H, Kind.H2D) == [(0, 11.0, 21.0), (0, 28.0, 38.0)]
    assert (result.step_time, result.baseline, result.forward_time, result.stall_seconds) == (70.0, 70.0, 24.0, 0.0)


def test_compute_waits_for_the_host_and_that_is_no_stall():
    # The host needs 12 + 12 s for the forward and 15 + 15 s for the backward, compute 20 s and 40 s.
    layers = [replace(LAYER, host_forward=12.0, host_backward=15.0)] * 2
    result = simulate(ONE_OF_TWO, layers, FAST)
    assert spans(result, Kind.FORWARD) == [(0, 0.0, 12.0), (1, 12.0, 24.0)]
    assert spans(result, Kind.D2H) == [(0, 12.0, 22.0)]
    assert spans(result, Kind.BACKWARD) == [(1, 24.0, 44.0), (0, 44.0, 64.0)]
    assert (result.step_time, result.baseline, result.stall_seconds) == (64.0, 64.0, 0.0)


def test_the_host_spends_time_on_each_tensor_of_an_offloaded_layer():
    layer = LayerCost(10.0, 20.0, (Saved(2, 0.5, 0.5), Saved(3, 1.0, 0.0)), host_forward=10.0, host_backward=20.0)
    result = simulate(ONE_OF_TWO, [layer] * 2, FAST, host_seconds=1.0)
    # Hooks of two tensors delay the host, and so compute, by 2 s in each direction; of the second layer there are none.
    # The copy of the first tensor begins when it is saved, that of the second one when the first hook is done.
    assert spans(result, Kind.D2H) == [(0, 5.0, 7.0), (0, 11.0, 14.0)]
    assert (result.forward_time, result.step_time, result.baseline) == (22.0, 64.0, 60.0)
    assert simulate(Plan(2), [layer] * 2, FAST, host_seconds=1.0).step_time == 60.0


def test_both_directions_share_the_link():
    # Both layers are offloaded at 20 s, and while that runs the reload of layer 0, which is copied already, begins.
    calls = [
        (Event(When.FORWARD_START, 0), Action(Do.OFFLOAD, 0)),
        (Event(When.FORWARD_END, 1), Action(Do.RELEASE, 0)),
        (Event(When.FORWARD_START, 1), Action(Do.OFFLOAD, 1)),
        (Event(When.BACKWARD_START, 2), Action(Do.RELOAD, 0)),
    ]
    plan = Plan.of(3, calls)
    layers = [LAYER, LayerCost(10.0, 20.0, (Saved(20),)), LayerCost(5.0, 20.0)]
    alone = simulate(plan, layers, Link(1.0, 1.0))
    assert spans(alone, Kind.D2H) == [(0, 10.0, 20.0), (1, 20.0, 40.0)]
    assert spans(alone, Kind.H2D) == [(0, 25.0, 35.0)]
    # Until 40 s a quarter of the bandwidth is left: 3.75 of 10 bytes.
    shared = simulate(plan, layers, Link(1.0, 1.0, both=1.25))
    assert spans(shared, Kind.D2H) == spans(alone, Kind.D2H)
    assert spans(shared, Kind.H2D) == [(0, 25.0, 46.25)]
    # Nothing is left, and the other way round the copy has enough with the half.
    assert spans(simulate(plan, layers, Link(1.0, 1.0, both=1.0)), Kind.H2D) == [(0, 25.0, 50.0)]
    assert spans(simulate(plan, layers, Link(1.0, 4.0, both=2.0)), Kind.H2D) == [(0, 25.0, 35.0)]
    assert spans(simulate(plan, layers, Link(1.0, 1.0, both=2.0)), Kind.H2D) == [(0, 25.0, 35.0)]


def test_a_compiled_backward_needs_all_when_it_starts_and_frees_all_when_it_ends():
    saved = (Saved(10, 1.0, 0.0), Saved(30, 1.0, 0.5))
    layers = [LayerCost(10.0, 20.0, saved), LayerCost(10.0, 20.0)]
    link = Link(4.0, 2.0)
    eager = simulate(ONE_OF_TWO, layers, link)
    compiled = simulate(ONE_OF_TWO, [replace(cost, unpacks_at_once=True) for cost in layers], link)
    # The reload takes from 20 s to 40 s; the backward of layer 0 starts at 40 s.
    assert (eager.step_time, compiled.step_time) == (60.0, 60.0)
    slow = Link(4.0, 1.0)  # until 60 s: the tensor of 30 bytes arrives at 50 s, and that of 10 at 60 s
    eager = simulate(ONE_OF_TWO, layers, slow)
    compiled = simulate(ONE_OF_TWO, [replace(cost, unpacks_at_once=True) for cost in layers], slow)
    assert eager.step_time == 80.0
    assert compiled.step_time == 80.0
    late = [replace(layers[0], saved=(Saved(10, 1.0, 0.5), Saved(30, 1.0, 0.0))), layers[1]]
    eager = simulate(ONE_OF_TWO, late, slow)
    compiled = simulate(ONE_OF_TWO, [replace(cost, unpacks_at_once=True) for cost in late], slow)
    assert (eager.step_time, compiled.step_time) == (70.0, 80.0)
    freed = [at for at, nbytes in compiled.timeline.resident if nbytes == 0]
    assert freed == [20.0, 80.0]


def test_the_peak_of_the_device_has_other_memory_and_temporaries():
    layer = LayerCost(10.0, 20.0, (Saved(10),), other_bytes=(100, 101, 102, 103))
    keep = Plan(2)
    assert simulate(keep, [layer] * 2, FAST).device_peak_bytes == 20 + 102  # when the last backward starts
    growing = [replace(layer, other_bytes=(100, 100, 100, 111))] * 2
    assert simulate(keep, growing, FAST).device_peak_bytes == 10 + 111  # when it ends
    for name, peak in (
        ("forward_temporary", 20 + 101 + 50),
        ("backward_temporary", 20 + 102 + 50),
        ("gap_forward_temporary", 10 + 101 + 50),
        ("gap_backward_temporary", 20 + 102 + 50),
    ):
        assert simulate(keep, [replace(layer, **{name: 50})] * 2, FAST).device_peak_bytes == peak, name
    # Layer 0 is released before the gap behind the forward and reloaded behind it.
    head = [layer, replace(layer, gap_backward_temporary=50)]
    assert simulate(ONE_OF_TWO, head, FAST).device_peak_bytes == 10 + 102 + 50


def test_a_peak_between_borders_counts():
    # Nothing is resident when the backward of layer 0 begins: all that it saved is reloaded on demand.
    layer = LayerCost(
        10.0, 20.0, (Saved(10, 1.0),), other_bytes=(0, 0, 0, 7), backward_temporary=5, unpacks_at_once=True
    )
    calls = [
        (Event(When.FORWARD_START, 0), Action(Do.OFFLOAD, 0)),
        (Event(When.FORWARD_END, 0), Action(Do.RELEASE, 0)),
    ]
    assert simulate(Plan.of(1, calls), [layer], FAST).device_peak_bytes == 10 + 7 + 5


eighths = st.integers(0, 8).map(lambda k: k / 8)
seconds = st.integers(0, 12).map(lambda k: k / 4)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Plan, list[LayerCost]]:
    count = draw(st.integers(1, 6))
    layers = []
    for _ in range(count):
        places = sorted(draw(st.lists(eighths, max_size=3)))
        saved = tuple(Saved(draw(st.integers(1, 9)), at, draw(eighths)) for at in places)
        hosts = {name: draw(seconds) for name in ("host_forward", "host_backward", "gap_forward", "gap_backward")}
        layers.append(LayerCost(draw(seconds), draw(seconds), saved, **hosts, unpacks_at_once=draw(st.booleans())))
    return DefaultSchedule(draw(st.integers(0, count - 1)), count).plan(), layers


@given(runs(), st.sampled_from([0.5, 1.0, 4.0, float("inf")]), st.sampled_from([0.5, 1.0, 4.0, float("inf")]))
def test_a_step_is_never_faster_than_without_copies_nor_with_a_shared_link(run, d2h, h2d):
    plan, layers = run
    assert simulate(Plan(len(layers)), layers, Link(d2h, h2d)).step_time == simulate(plan, layers, FAST).baseline
    alone = simulate(plan, layers, Link(d2h, h2d))
    assert alone.step_time >= alone.baseline
    if d2h == h2d == float("inf"):
        assert (alone.step_time, alone.slowdown, alone.stall_seconds) == (alone.baseline, 1.0, 0.0)
    assert alone.device_peak_bytes == alone.peak_bytes
    assert simulate(plan, layers, Link(d2h, h2d), host_seconds=0.25).step_time >= alone.step_time
    for both in (0.25, 2.0, float("inf")):
        shared = simulate(plan, layers, Link(d2h, h2d, both=both))
        assert shared.step_time >= alone.step_time
        copies = zip(shared.timeline.of(Kind.H2D), alone.timeline.of(Kind.H2D), strict=True)
        assert all(slow.end >= fast.end for slow, fast in copies)


def test_a_copy_has_the_whole_bandwidth_when_the_other_direction_is_done():
    calls = [
        (Event(When.FORWARD_START, 0), Action(Do.OFFLOAD, 0)),
        (Event(When.FORWARD_END, 0), Action(Do.RELEASE, 0)),
        (Event(When.FORWARD_START, 1), Action(Do.OFFLOAD, 1)),
        (Event(When.FORWARD_END, 1), Action(Do.RELOAD, 0)),
    ]
    plan = Plan.of(2, calls)
    layers = [LAYER, LayerCost(10.0, 20.0, (Saved(10, 0.5),))]
    # Layer 0 is copied and released at 20 s, and layer 1 is copied from 25 s to 35 s; the reload begins at 30 s.
    result = simulate(plan, layers, Link(1.0, 1.0, both=1.5))
    assert spans(result, Kind.D2H) == [(0, 10.0, 20.0), (1, 25.0, 35.0)]
    assert spans(result, Kind.H2D) == [(0, 30.0, 42.5)]


@given(runs(), st.sampled_from([0.5, 1.0, 4.0]))
def test_copies_of_a_layer_as_one_take_as_long_and_no_less_memory(
    run: tuple[Plan, list[LayerCost]], rate: float
) -> None:
    plan, layers = run
    layers = [replace(cost, host_forward=0.0, host_backward=0.0) for cost in layers]
    exact, merged = (
        Pipeline([plan], model_stages(layers), Link(rate, rate), exact=each).run([plan.steps])[0]
        for each in (True, False)
    )
    assert merged.compute == pytest.approx(exact.compute)
    assert merged.peak >= exact.peak
