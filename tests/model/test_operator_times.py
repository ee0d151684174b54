"""Times of the operators in recomputed regions, in virtual time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_recompute_operators import DEVICES, MIB, work
from timed_device import Timed

from actoffload.device import use
from actoffload.model.operator_times import EVENTS, OperatorTimes
from actoffload.planner import OperatorCost
from actoffload.recompute import Reads, Region, Trace, recomputed


def test_what_operators_read_and_who_needs_them():
    device = Timed(1e6, 1e6)
    with use(device):
        times, reads, trace = OperatorTimes(device), Reads(), Trace()
        region = Region(lambda call: True, reads=reads, trace=trace, timed=times.of(0, reads, trace))
        recomputed(lambda x: x.cos().add(1.0).sigmoid().sin(), region, torch.ones(2, requires_grad=True))
        device.synchronize(torch.device("cpu"))
        (costs,) = times.costs().values()
    assert [(of.name.split(".")[1], of.reads, of.needed) for of in costs] == [
        ("cos", (), False),
        ("add", (0,), False),
        ("sigmoid", (1,), True),
        ("sin", (), False),
    ]


def test_alike_groups_have_the_median_and_what_is_not_read_is_not_worth_saving():
    device = Timed(1e6, 1e6)
    DEVICES.append(device)
    weight = torch.ones(1, requires_grad=True)
    with use(device):
        times, reads = OperatorTimes(device), Reads()
        for group, seconds in enumerate((1.0, 2.0, 9.0)):
            trace = Trace(known=True)
            region = Region(lambda call: True, reads=reads, trace=trace, timed=times.of(group, reads, trace))
            recomputed(lambda x, seconds=seconds: work(x * weight, seconds, 1.0, MIB)[:1] * 2.0, region, torch.ones(2))
        again = times.of(0, reads, Trace())
        assert again("operator", 7, partial(int, 5)) == 5, "another call is not timed"
        device.synchronize(torch.device("cpu"))
        (costs,) = {tuple(of) for of in times.costs().values()}
        name = str(torch.ops.actoffload_tests.work.default)
        assert OperatorCost(f"{name}#0", 2.0, (MIB,)) in costs
        assert [of.nbytes for of in costs if "slice" in of.name] == [0], "views are not saved"
        reads.learn([(torch.ops.actoffload_tests.work.default, 0)], [])
        (costs,) = {tuple(of) for of in times.costs().values()}
        assert OperatorCost(f"{name}#0", 2.0, ()) in costs


def costs_of(function, device: Timed) -> list[OperatorCost]:
    """Return the costs of the operators of a function of one tensor."""
    DEVICES.append(device)
    with use(device):
        times, reads, trace = OperatorTimes(device), Reads(), Trace()
        region = Region(lambda call: True, reads=reads, trace=trace, timed=times.of(0, reads, trace))
        recomputed(function, region, torch.ones(2, requires_grad=True))
        device.synchronize(torch.device("cpu"))
        (costs,) = times.costs().values()
    return costs


def test_what_runs_on_another_stream_takes_no_time_and_is_not_worth_saving():
    """Inside of a group FSDP2 gathers the weights of the next one."""
    device = Timed(1e6, 1e6)
    other = device.new_stream(torch.device("cpu"))

    def function(x):
        with device.on(other):
            gathered = work(x.detach(), 50.0, 0.0, MIB)
        return work(x, 2.0, 0.0, MIB)[:2] + gathered[:2]

    first, second = [of for of in costs_of(function, device) if "work" in of.name]
    assert (first.seconds, first.sizes) == (0.0, ())
    assert (second.seconds, second.sizes) == (2.0, (MIB,))


def test_an_output_that_shares_the_memory_of_an_input_is_not_worth_saving():
    costs = costs_of(lambda x: torch.ops.aten._unsafe_view(x.cos(), [2]).sin(), Timed(1e6, 1e6))
    assert {of.name.split(".")[1]: of.sizes for of in costs} == {"cos": (8,), "_unsafe_view": (), "sin": (8,)}


def test_the_time_between_two_events_is_not_that_of_an_operator():
    for shortest, none in (4e-6, 4e-6), (0.5, EVENTS):
        costs = costs_of(lambda x, shortest=shortest: work(work(x, shortest, 0.0, 8), 2.0, 0.0, 8), Timed(1e6, 1e6))
        assert [of.seconds for of in costs] == pytest.approx([shortest - none, 2.0 - none], rel=1e-9, abs=1e-12)
