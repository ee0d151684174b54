from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import combinations
from typing import Any

import pytest
import torch
from adversary.device import AdversarialDevice
from adversary.harness import check, execute, scaled_down, trial
from adversary.layers import Layers, numbers, saving
from adversary.models import DEVICE_KINDS, KINDS, ROWS, STREAM_KINDS, WIDTH
from adversary.orders import Mode
from adversary.programs import Backward, Forward, Program, layers, programs
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from actoffload.context import OffloadContext
from actoffload.device import use
from actoffload.engine.engine import Engine
from actoffload.schedule.plan import Plan
from actoffload.schedule.schedules import DefaultSchedule, GroupSchedule

ORDERS = 2
"""Different orders of the pending copies, at least, on average over the programs of a sort."""

SEEDS = 4

# Sorts of programs: number of examples, and how they are drawn.
SORTS: dict[str, tuple[int, SearchStrategy[Program]]] = {
    "default schedule": (16, programs()),
    "manual calls": (30, programs(manual=True)),
    "side streams and two devices": (12, programs(streams=True)),
    "manual calls and side streams": (12, programs(streams=True, manual=True)),
    "plans": (16, programs(planned=True)),
    "plans and side streams": (12, programs(planned=True, streams=True)),
    "plans and host limit": (10, programs(planned=True, limited=True)),
    "host limit": (10, programs(limited=True)),
    "manual calls and host limit": (10, programs(limited=True, manual=True)),
}


@pytest.fixture(scope="module", autouse=True)
def _scaled_down() -> Iterator[None]:
    with scaled_down():
        yield


@pytest.mark.parametrize("kind", sorted({**KINDS, **STREAM_KINDS, **DEVICE_KINDS}))
@pytest.mark.parametrize("offload", [2, None, GroupSchedule(3).plan("aaaa")], ids=["default", "manual", "groups"])
def test_each_kind_of_layer(kind: str, offload: int | Plan | None) -> None:
    steps = [Forward(0), Forward(1), Backward(0, retain=True), Backward(1), Backward(0)]
    program = Program(layers([kind], ["linear", kind], [kind], ["chunk", kind]), offload, steps)
    expected, _ = execute(program, None)
    for mode in ("late", "early", "random"):
        _, statistics = trial(program, expected, 1, mode)
        assert statistics.tensors_offloaded > 0
        assert statistics.bytes_reloaded > 0


@pytest.mark.parametrize("mode", ["late", "random"])
@pytest.mark.parametrize(
    "plan",
    [DefaultSchedule(3, 5).plan(), GroupSchedule(3).plan("a" * 5), GroupSchedule(3, max_inflight=1).plan("a" * 5)],
    ids=["default", "groups", "one group in flight"],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_no_wait_crosses_the_border_of_a_capture(plan: Plan, mode: Mode, recorded: bool) -> None:
    """Whatever part of a step is captured: some layers, the forward, the backward, or all."""
    count = plan.model_layers
    for begin, end in combinations(range(count + 2), 2):
        device = AdversarialDevice(0, mode)
        w = torch.ones(ROWS, WIDTH, requires_grad=True)
        context = OffloadContext(Engine(plan, device))
        for captured in (False, True):  # the first step takes the host memory that the second one uses
            with context.record_timeline() if recorded else nullcontext(), ExitStack() as stack:
                outputs = []
                for k in range(count + 1):
                    if captured and k == begin:
                        stack.enter_context(device.capture())
                    if captured and k == end:
                        stack.close()
                    if k < count:
                        with context:
                            y = saving(w, numbers(k)) + saving(w, numbers(k + 10))
                        outputs.append(context.synchronize(y))
                w.grad = None
                torch.stack(outputs).sum().backward()
            outputs.clear()
            del y
            kept = [numbers(k + more).sum() for k in range(count) for more in (0, 10)]
            assert torch.equal(w.grad, torch.ones_like(w) * torch.stack(kept).sum())
        assert check(device, context).tensors_offloaded == 2 * 2 * 3


@pytest.mark.parametrize("mode", ["late", "early", "random"])
def test_what_is_reloaded_before_a_capture_is_used_in_it(mode: Mode) -> None:
    device = AdversarialDevice(0, mode)
    with use(device):
        layers = Layers(None, 1)
        w = torch.ones(ROWS, WIDTH, requires_grad=True)
        y = layers(lambda: saving(w, numbers()))
        layers.out(0)
        layers.back(0)
        with device.capture():
            y.sum().backward()
            del y
    assert torch.equal(w.grad, torch.ones_like(w) * numbers().sum())
    check(device, layers.context)


@pytest.mark.parametrize("mode", ["late", "early", "random"])
def test_a_layer_waits_for_its_own_copy_of_a_storage_that_an_earlier_one_has_copied(mode: Mode) -> None:
    """Each saves half of it, and the end of the first copy says nothing of the second."""
    device = AdversarialDevice(0, mode)
    context = OffloadContext(Engine(DefaultSchedule(2, 4).plan(), device))
    w = torch.ones(ROWS, WIDTH, requires_grad=True)
    halves = list(numbers(rows=2 * ROWS).chunk(2))
    outputs = []
    for k in range(4):
        with context:
            y = saving(w, halves.pop(0) if halves else numbers(k))
        outputs.append(context.synchronize(y))
    del y
    torch.stack(outputs).sum().backward()
    outputs.clear()
    check(device, context)
    want = numbers(rows=2 * ROWS).sum() + numbers(2).sum() + numbers(3).sum()
    assert torch.equal(w.grad, torch.ones_like(w) * want)


@pytest.mark.parametrize("sort", SORTS)
def test_random_orders(sort: str) -> None:
    examples, drawn = SORTS[sort]
    seen: Counter[str] = Counter()
    orders: set[Any] = set()

    @settings(max_examples=examples)
    @given(drawn)
    def orders_of(program: Program) -> None:
        expected, _ = execute(program, None)
        for seed in range(SEEDS):
            order, statistics = trial(program, expected, seed, "random")
            seen["offloaded"] += statistics.tensors_offloaded
            seen["refused"] += sum(n for reason, n in statistics.tensors_kept.items() if reason.name == "HOST_FULL")
            if order:
                orders.add((repr(program), order))
        for mode in ("late", "early"):
            trial(program, expected, 0, mode)
            trial(program, expected, 0, mode, batch=3 * ROWS * WIDTH * 4)

    orders_of()
    assert seen["offloaded"] > 0
    assert (seen["refused"] > 0) == ("host limit" in sort)
    assert len(orders) >= ORDERS * examples
