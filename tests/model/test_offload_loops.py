"""Blocks that a loop of the program's own calls, without calling the model: pipelines, mainly."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
from helpers import nothing_held
from whole_model import UNIT, Transformer, Wave, Waves, agrees, data, equal, loop, measured, offload, train

from actoffload.report import Reason

SAVES = Wave.SAVES * UNIT


def names(order: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"blocks.{k}" for k in order)


def test_a_loop_of_the_programs_own():
    model = Waves(6)
    handle, statistics = agrees(model, loop)
    assert statistics.passes == 3
    assert statistics.bytes_offloaded == 3 * 4 * SAVES
    assert statistics.reloaded_on_demand == 0
    assert statistics.peak_resident_bytes == 5 * UNIT
    assert handle.report().passes == 3


def test_a_loop_in_another_order_than_registered():
    order = [3, 0, 5, 1, 4, 2]

    def run(model, x):
        for k in order:
            x = model.blocks[k](x)
        return x

    model = Waves(6)
    handle, _ = agrees(model, run, steps=4)
    assert handle.groups == names(order)
    statistics = measured(handle, lambda: run(model, data()).sum().backward())
    assert statistics.passes == 1
    assert statistics.bytes_offloaded == 4 * SAVES
    assert statistics.reloaded_on_demand == 0


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
    assert handle.groups == names(range(6))


def test_the_model_is_called_while_a_loop_is_half_way():
    """Its forward is a pass of its own, and the loop goes on with another one."""
    model = Waves(6)
    reference = copy.deepcopy(model)
    handle = offload(model)
    found = []
    for each in (model, reference):
        half = data(3).requires_grad_() * 1.0
        for block in each.blocks[:3]:
            half = block(half)
        y = each(data(4))
        for block in each.blocks[3:]:
            half = block(half)
        (y + half).square().sum().backward()
        found.append([p.grad for p in each.parameters()])
        del half, y
    equal(*found)
    assert handle.statistics().passes == 3
    nothing_held(handle)
    model.zero_grad()
    assert measured(handle, lambda: model(data()).sum().backward()).passes == 1
    assert handle.groups == names(range(6))


def test_the_model_and_a_loop_in_turns():
    model = Waves(6)
    reference = copy.deepcopy(model)
    handle = offload(model)
    for k in range(4):
        for run in (loop, lambda model, x: model(x)):
            equal(train(model, run, steps=1 + k % 2), train(reference, run, steps=1 + k % 2))
            nothing_held(handle)
    assert handle.statistics().bytes_offloaded == handle.statistics().passes * 4 * SAVES


def test_a_kept_module_that_the_loop_calls_alone():
    model = Transformer(6)

    def run(model, x):
        x = model.inp(x)
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x))

    handle, statistics = agrees(model, run, keep=["inp", "head"], num_layers=4)
    assert len(handle.report().offloaded_groups) == 4, "the report is that of the blocks"
    assert statistics.bytes_kept[Reason.KEPT] > 0
