"""Wrong arguments of public functions: one clear sentence each, with the name of the argument and what is expected."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import actoffload
from actoffload import schedule
from actoffload.device import use
from actoffload.measure import compare_steps, measure_link, measure_step_times, measure_steps
from actoffload.schedule import LayerCost, Link, StageCost, simulate

NAN = math.nan
LARGE = 10**20
COSTS = [LayerCost.even(2**20, forward=0.01, backward=0.02)] * 4
LINK = Link(d2h=1e9, h2d=1e9)
PLAN = schedule.DefaultSchedule(1, 4).plan()
ORDERS = schedule.one_f_one_b(ranks=2, microbatches=4)
STAGES = [StageCost((COSTS[0],))] * 2


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])


def offload(**options: Any) -> None:
    actoffload.offload(model(), **options)


def step() -> None:
    pass


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("value", ["yes", torch.tensor(True), None, 2], ids=repr)
@pytest.mark.parametrize("name", ["enabled", "offload_activations", "manual_synchronization", "double_buffering"])
def test_switches_of_a_context(name: str, value: object):
    options: dict[str, Any] = {"enabled": True, "num_layers": 1, "model_layers": 4, name: value}
    message = refused(lambda: actoffload.get_cpu_offload_context(**options))
    assert message == f"{name} is {value!r}; expected True or False."


def test_use():
    assert refused(lambda: use(None).__enter__()) == "use got None; expected a device, such as ReferenceDevice()."


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: measure_step_times({"a": step}, steps=0), "steps is 0; expected a whole number, at least 1."),
        (lambda: measure_step_times({"a": step}, warmup=-1), "warmup is -1; expected a whole number, at least 0."),
        (lambda: measure_step_times(step), "expected a mapping of names to functions, at least one."),
        (lambda: measure_steps({"a": step}, repeats=0), "repeats is 0; expected a whole number, at least 1."),
        (lambda: measure_steps({}), "steps is {}; expected a mapping of names to functions, at least one."),
        (lambda: measure_link(nbytes=0), "nbytes is 0; expected a whole number, at least 1."),
        (lambda: compare_steps(step, step, None, steps=0), "steps is 0; expected a whole number, at least 1."),
    ],
)
def test_measuring(call: Callable[[], object], expected: str):
    assert refused(call).endswith(expected)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: simulate(PLAN, COSTS, LINK, host_seconds=-1), "host_seconds is -1; expected seconds"),
        (lambda: simulate(5, COSTS, LINK), "plan is 5; expected a Plan."),
        (lambda: simulate(PLAN, [5] * 4, LINK), "layers[0] is 5; expected a LayerCost."),
        (lambda: simulate(PLAN, COSTS, 5), "link is 5; expected a Link."),
        (
            lambda: simulate(PLAN, COSTS[:2], LINK),
            "The plan has 4 layers but 2 costs were given; give one LayerCost per",
        ),
        (lambda: LayerCost("x", 1), "forward is 'x'; expected seconds, finite and 0 or more."),
        (lambda: LayerCost(-1.0, 0.0), "forward is -1.0; expected seconds, finite and 0 or more."),
        (lambda: LayerCost(1, 1, host_forward=-1.0), "host_forward is -1.0; expected seconds, finite and 0 or more."),
        (lambda: LayerCost(1, 1, forward_temporary=-1), "forward_temporary is -1; expected bytes, 0 or more."),
        (lambda: LayerCost(1, 1, other_bytes=(1, 2, 3)), "other_bytes is (1, 2, 3); expected four numbers of bytes"),
        (lambda: LayerCost(1, 1, (5,)), "saved is (5,); expected a tuple of Saved."),
        (
            lambda: LayerCost(1, 1, (schedule.Saved(1, 0.5), schedule.Saved(1, 0.25))),
            "Tensors are saved at [0.5, 0.25]; list them in the order in which forward",
        ),
        (lambda: LayerCost.even(-1, 1.0, 1.0), "nbytes is -1; expected a whole number, at least 0."),
        (lambda: LayerCost.even(1, 1.0, 1.0, pieces=0), "pieces is 0; expected a whole number, at least 1."),
        (lambda: COSTS[0].with_bytes(NAN), "factor is nan; expected a number of times"),
        (lambda: schedule.Saved(0), "nbytes is 0; expected the size of a tensor, at least 1 byte."),
        (lambda: schedule.Saved(1, 1.5), "saved_at is 1.5; expected a fraction of the layer's forward time, from 0.0"),
        (lambda: schedule.Saved(1, 1, NAN), "needed_at is nan; expected a fraction of the layer's backward time, from"),
        (lambda: Link(None, 1), "d2h is None; expected bytes per second, more than 0."),
        (lambda: Link(1.0, 1.0, both=0.0), "both is 0.0; expected bytes per second, more than 0."),
        (lambda: StageCost((), between_bytes=-1), "between_bytes is -1; expected bytes, 0 or more."),
        (lambda: StageCost((5,)), "groups[0] is 5; expected a LayerCost."),
        (lambda: StageCost((COSTS[0],), boundary_bytes=-1), "boundary_bytes is -1; expected bytes, 0 or more"),
        (lambda: LayerCost(1, 1, weight_backward=NAN), "weight_backward is nan; expected seconds"),
        (lambda: schedule.DefaultSchedule(-1, 5), "num_layers is -1; expected a whole number, at least 0."),
        (
            lambda: schedule.DefaultSchedule(5, 5),
            "num_layers is 5 but model_layers is 5: the last layer's activations are needed at once, so offload at mo",
        ),
        (lambda: schedule.Plan(LARGE), f"model_layers is {LARGE}; expected a whole number, at least 1 below 2**63."),
        (lambda: schedule.Plan(2, 5), "steps is 5; expected a Mapping."),
        (lambda: schedule.gpipe("x", 4), "ranks is 'x'; expected a whole number, at least 1."),
        (lambda: schedule.read_order(5), "actions is 5; expected a Iterable."),
        (lambda: schedule.read_order(["1X2"]), "'1X2' is no step of a pipeline; expected a stage"),
        (lambda: schedule.simulate_pipeline([[5]], STAGES, LINK), "orders[0][0] is 5; expected a Step."),
        (lambda: schedule.simulate_pipeline(ORDERS, STAGES, LINK, [5, 5]), "plans[0] is 5; expected a Plan or"),
        (lambda: schedule.simulate_pipeline(ORDERS, [5, 5], LINK), "stages[0] is 5; expected a StageCost."),
        (lambda: schedule.Plan(2, nbytes=(1,)), "nbytes has 1 entries, but the plan has 2 layers; give one for each"),
        (lambda: schedule.Plan(4, names=5), "names is 5; expected a sequence of str."),
    ],
)
def test_schedules(call: Callable[[], object], expected: str):
    assert expected in refused(call)
