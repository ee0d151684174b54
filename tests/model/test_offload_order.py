"""The order of the groups is learned from the model, or a loop over its blocks, as it runs, and may change."""

import copy
import random
from collections.abc import Callable

import pytest
from helpers import nothing_held
from torch import Tensor
from whole_model import (
    UNIT,
    Wave,
    Waves,
    agrees,
    backward,
    data,
    equal,
    loop,
    measured,
    offload,
    train,
)

from actoffload.device import ReferenceDevice
from actoffload.schedule import Action, Do, Event, Plan, When

SAVES = Wave.SAVES * UNIT


class Ordered(Waves):
    """Runs its blocks in the order in which `order` names them, which may skip or repeat some."""

    def __init__(self, order: list[int] | Callable[[], list[int]], count: int = 6) -> None:
        super().__init__(count)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for k in self.order() if callable(self.order) else self.order:
            x = self.blocks[k](x)
        return x


class Orders:
    """The same orders for each copy of a model: one for every call."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders, self.calls = orders, 0

    def __call__(self) -> list[int]:
        self.calls += 1
        return self.orders[(self.calls - 1) % len(self.orders)]


def names(order: list[int]) -> tuple[str, ...]:
    return tuple(f"blocks.{k}" for k in order)


ORDERS = [
    [5, 4, 3, 2, 1, 0],
    [3, 0, 5, 1, 4, 2],
    [0, 1, 2, 0, 1, 2, 3, 4, 5],
    [2, 4, 1],
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_layers", [None, 2])
def test_any_order_is_learned_in_one_step(order, num_layers):
    model = Ordered(order)
    handle, statistics = agrees(model, num_layers=num_layers)
    assert statistics.passes == 3
    assert handle.groups == names(order)
    kept = 2 if num_layers is None else len(order) - num_layers
    assert handle.plan.offloaded == tuple(range(len(order) - kept))
    statistics = measured(handle, backward(model))
    assert statistics.bytes_offloaded == (len(order) - kept) * SAVES
    assert statistics.reloaded_on_demand == 0
    assert statistics.peak_resident_bytes == kept * 2 * UNIT
    nothing_held(handle)


def test_an_order_that_changes_in_every_step():
    generator = random.Random(5)
    for _ in range(20):
        orders = [[generator.randrange(6) for _ in range(generator.randrange(1, 12))] for _ in range(6)]
        model, reference = (Ordered(Orders(orders)) for _ in range(2))
        reference.load_state_dict(model.state_dict())
        want = train(reference, steps=6)
        handle = offload(model, num_layers=generator.choice([None, 1, 3]))
        equal(train(model, steps=6), want)
        nothing_held(handle)
        assert handle.statistics().passes == 6
        assert handle.groups == names(orders[-1])


# Skipped layers


@pytest.mark.parametrize("skipped", [0, 3, 5])
def test_one_skipped_block_and_back_again(skipped):
    every, some = list(range(6)), [k for k in range(6) if k != skipped]
    model = Ordered(every)
    handle, _ = agrees(model)
    for order in (some, some, every, every):
        model.order = order
        statistics = measured(handle, backward(model))
        assert handle.groups == names(order)
        nothing_held(handle)
    assert statistics.bytes_offloaded == 4 * SAVES
    assert statistics.reloaded_on_demand == 0


# Called more than once


def test_copies_of_a_captured_forward_have_ended_with_it(monkeypatch):
    """Its backward may be captured apart, and must not wait for them."""
    calls = [(Event(When.FORWARD_END, k), Action(Do.OFFLOAD, k)) for k in range(3)]
    calls += [(Event(When.BACKWARD_START, 5), Action(Do.RELEASE, k)) for k in range(3)]
    model = Waves()
    plan = Plan.of(6, calls, names=names([*range(6)]), nbytes=(SAVES,) * 6)
    handle = offload(model, plan=plan, layers=None)
    resident = []
    for captured in (False, False, True):
        monkeypatch.setattr(ReferenceDevice, "capturing", lambda self, captured=captured: captured)
        output = model(data())
        resident.append(handle.statistics().resident_bytes)
        output.sum().backward()
    assert resident[1:] == [3 * SAVES, 0]
    assert handle.statistics().bytes_offloaded == 9 * SAVES


# Blocks that a loop of the program's own calls, without calling the model


@pytest.mark.parametrize("order", [[*range(6)], [3, 0, 5, 1, 4, 2]], ids=["registered", "another"])
def test_a_loop_of_the_programs_own(order):
    def run(model, x):
        for k in order:
            x = model.blocks[k](x)
        return x

    model = Waves(6)
    handle, statistics = agrees(model, run, steps=4)
    assert handle.groups == names(order)
    # A block that comes again in the first step, in which the order is not known, begins a pass.
    assert statistics.passes == handle.report().passes == 4 + (order != [*range(6)])
    statistics = measured(handle, lambda: run(model, data()).sum().backward())
    assert statistics.passes == 1
    assert statistics.bytes_offloaded == 4 * SAVES
    assert statistics.reloaded_on_demand == 0
    assert statistics.peak_resident_bytes == 4 * UNIT


@pytest.mark.parametrize("at_once", [False, True])
def test_a_loop_that_is_left_early(at_once):
    """Its graph is held: what comes next is another pass, whether its backward has run or not."""
    model = Waves(6)
    reference = copy.deepcopy(model)
    handle = offload(model)
    train(model, loop)
    short = data()
    for block in model.blocks[:3]:
        short = block(short)
    if at_once:
        short.sum().backward()
    before = handle.statistics().passes
    model.zero_grad()
    equal(train(model, loop), train(reference, loop))
    assert handle.statistics().passes > before
    if not at_once:
        short.sum().backward()
        model.zero_grad()
    del short
    equal(train(model, loop), train(reference, loop))
    nothing_held(handle)
    statistics = measured(handle, lambda: loop(model, data()).sum().backward())
    assert (statistics.passes, statistics.bytes_offloaded) == (1, 4 * SAVES)
    assert handle.groups == names([*range(6)])
