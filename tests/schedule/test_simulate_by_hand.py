"""Steps small enough to be worked out on paper; every number below was."""

from __future__ import annotations

import pytest

from actoffload.schedule.costs import LayerCost, Link, Saved
from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.schedules import DefaultSchedule, ManualSchedule
from actoffload.schedule.simulate import Simulation, simulate
from actoffload.schedule.timeline import Kind


def spans(simulation: Simulation, *kinds: Kind) -> list[tuple[int, float, float]]:
    return [(span.layer, span.start, span.end) for span in simulation.timeline.of(*kinds)]


def test_two_of_five_overlap_fully() -> None:
    # Each layer saves 10 bytes at its end, and the link moves one byte per second.
    layers = [LayerCost.even(10, forward=10.0, backward=20.0, pieces=1)] * 5
    result = simulate(DefaultSchedule(2, 5).plan(), layers, Link(d2h=1.0, h2d=1.0))

    assert spans(result, Kind.FORWARD) == [(i, 10.0 * i, 10.0 * i + 10.0) for i in range(5)]
    assert spans(result, Kind.D2H) == [(0, 10.0, 20.0), (1, 20.0, 30.0)]
    assert spans(result, Kind.BACKWARD) == [
        (4, 50.0, 70.0),
        (3, 70.0, 90.0),
        (2, 90.0, 110.0),
        (1, 110.0, 130.0),
        (0, 130.0, 150.0),
    ]
    assert spans(result, Kind.H2D) == [(1, 70.0, 80.0), (0, 90.0, 100.0)]
    assert spans(result, Kind.STALL) == []
    assert result.timeline.resident == (
        (10.0, 10),
        (20.0, 20),
        (30.0, 30),
        (30.0, 20),  # layer 0 is released before layer 3 starts
        (40.0, 30),
        (40.0, 20),  # layer 1 is released before layer 4 starts
        (50.0, 30),
        (70.0, 20),
        (70.0, 30),  # layer 1 is let in
        (90.0, 20),
        (90.0, 30),  # layer 0 is let in
        (110.0, 20),
        (130.0, 10),
        (150.0, 0),
    )
    assert (result.step_time, result.forward_time, result.backward_time) == (150.0, 50.0, 100.0)
    assert (result.baseline, result.slowdown, result.stall_seconds) == (150.0, 1.0, 0.0)
    assert (result.peak_bytes, result.bytes_offloaded, result.bytes_reloaded) == (30, 20, 20)
    assert result.reloaded_on_demand == 0
    assert result.timeline.source == "simulated"


def test_three_of_five_stall_on_a_slow_link() -> None:
    # An offload takes 15 s and a reload 30 s; forward takes 10 s, backward 20 s.
    layers = [LayerCost.even(15, forward=10.0, backward=20.0, pieces=1)] * 5
    result = simulate(DefaultSchedule(3, 5).plan(), layers, Link(d2h=1.0, h2d=0.5))

    assert spans(result, Kind.D2H) == [(0, 10.0, 25.0), (1, 25.0, 40.0), (2, 40.0, 55.0)]
    assert spans(result, Kind.H2D) == [(2, 85.0, 115.0), (1, 115.0, 145.0), (0, 145.0, 175.0)]
    assert spans(result, Kind.STALL) == [
        (0, 20.0, 25.0),
        (1, 35.0, 40.0),
        (2, 50.0, 55.0),
        (2, 105.0, 115.0),
        (1, 135.0, 145.0),
        (0, 165.0, 175.0),
    ]
    assert spans(result, Kind.FORWARD) == [
        (0, 0.0, 10.0),
        (1, 10.0, 20.0),
        (2, 25.0, 35.0),
        (3, 40.0, 50.0),
        (4, 55.0, 65.0),
    ]
    assert spans(result, Kind.BACKWARD) == [
        (4, 65.0, 85.0),
        (3, 85.0, 105.0),
        (2, 115.0, 135.0),
        (1, 145.0, 165.0),
        (0, 175.0, 195.0),
    ]
    assert (result.forward_time, result.step_time, result.baseline) == (65.0, 195.0, 150.0)
    assert (result.forward_stall, result.backward_stall, result.slowdown) == (15.0, 30.0, 1.3)
    assert result.peak_bytes == 30


def test_copies_start_when_saved_and_uses_wait_for_their_own_tensor() -> None:
    # 1 of 2: two tensors of 5 and 8 bytes, saved half-way and at the end, needed the other way round.
    cost = LayerCost(10.0, 20.0, (Saved(5, 0.5, 0.75), Saved(8, 1.0, 0.0)))
    link = Link(d2h=1.0, h2d=0.5, latency=1.0)
    result = simulate(DefaultSchedule(1, 2).plan(), [cost, cost], link)

    assert spans(result, Kind.D2H) == [(0, 5.0, 11.0), (0, 11.0, 20.0)]
    # Layer 1: 20 to 30 forward, 30 to 50 backward; then the tensors of layer 0 are reloaded, 8 bytes first.
    assert spans(result, Kind.H2D) == [(0, 50.0, 67.0), (0, 67.0, 78.0)]
    assert spans(result, Kind.STALL) == [(0, 10.0, 20.0), (0, 50.0, 67.0)]
    # The second tensor is needed at 67 + 15 = 82, after its arrival.
    assert spans(result, Kind.BACKWARD) == [(1, 30.0, 50.0), (0, 67.0, 87.0)]
    assert result.timeline.resident == (
        (5.0, 5),
        (10.0, 13),
        (20.0, 0),
        (25.0, 5),
        (30.0, 13),
        (45.0, 5),  # the 8 bytes of layer 1 are free when its other tensor is needed
        (50.0, 0),
        (50.0, 13),
        (82.0, 5),
        (87.0, 0),
    )


def test_a_layer_without_a_reload_is_reloaded_on_demand() -> None:
    layers = [LayerCost(10.0, 20.0, (Saved(4, 0.5, 0.5), Saved(6, 1.0, 0.0))), LayerCost(10.0, 20.0)]
    plan = (
        ManualSchedule(2)
        .start_offload_layer(0, after_forward_of=0)
        .release_activation_forward_gpu_memory(0, after_forward_of=1)
        .plan()
    )
    result = simulate(plan, layers, Link(d2h=1.0, h2d=1.0))

    # Queued after the forward of layer 0, yet each copy runs from the moment its tensor was ready.
    assert spans(result, Kind.D2H) == [(0, 5.0, 9.0), (0, 10.0, 16.0)]
    assert spans(result, Kind.H2D) == [(0, 40.0, 46.0), (0, 56.0, 60.0)]
    assert spans(result, Kind.STALL) == [(0, 40.0, 46.0), (0, 56.0, 60.0)]
    assert spans(result, Kind.BACKWARD) == [(1, 20.0, 40.0), (0, 46.0, 56.0), (0, 60.0, 70.0)]
    assert result.timeline.resident == (
        (5.0, 4),
        (10.0, 10),
        (20.0, 0),
        (40.0, 6),
        (56.0, 0),
        (56.0, 4),
        (70.0, 0),
    )
    assert (result.reloaded_on_demand, result.backward_stall, result.forward_stall) == (2, 10.0, 0.0)


def test_a_layer_that_is_copied_but_never_released_stays_until_the_copy_has_read_it() -> None:
    layers = [LayerCost.even(10, forward=10.0, backward=20.0, pieces=1)] * 2
    plan = ManualSchedule(2).start_offload_layer(0, after_forward_of=0).plan()
    result = simulate(plan, layers, Link(d2h=0.1, h2d=0.1))

    assert spans(result, Kind.D2H) == [(0, 10.0, 110.0)]
    # Its backward is done at 60, but its memory may not be reused before the copy has ended.
    assert spans(result, Kind.STALL) == [(0, 60.0, 110.0)]
    assert (result.peak_bytes, result.step_time, result.bytes_reloaded) == (20, 110.0, 0)


def test_copies_of_two_layers_share_one_queue() -> None:
    layers = [LayerCost.even(10, forward=10.0, backward=20.0, pieces=1)] * 3
    both = (Action(Do.OFFLOAD, 1), Action(Do.OFFLOAD, 0))
    plan = Plan(3, {Event(When.FORWARD_END, 1): both, Event(When.FORWARD_END, 2): (Action(Do.RELEASE, 0),)})
    result = simulate(plan, layers, Link(d2h=1.0, h2d=1.0))

    # Layer 1 was queued first, so layer 0 waits behind it although it was ready at 10.
    assert spans(result, Kind.D2H) == [(1, 20.0, 30.0), (0, 30.0, 40.0)]
    # The plan does not reload it, so backward waits for it from 80.
    assert spans(result, Kind.STALL) == [(0, 30.0, 40.0), (0, 80.0, 90.0)]


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


def test_the_number_of_costs_must_be_the_number_of_layers() -> None:
    sentence = "The plan has 3 layers but 2 costs were given; give one LayerCost per layer, in order of the forward."
    with pytest.raises(ValueError, match=sentence):
        simulate(Plan(3), [LayerCost(1.0, 1.0)] * 2, Link(1.0, 1.0))
