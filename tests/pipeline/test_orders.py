"""Orders that are not those of the named schedules: changed between steps, and loaded from a file."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_programs import held, make, offloaded, same, train
from torch import nn
from torch.distributed import pipelining

ZERO_BUBBLE = "ScheduleZBVZeroBubble"


pytestmark = pytest.mark.usefixtures("one_process")


def another_order(schedule: Any) -> None:
    """Run all forwards before the backwards from the next step on, with the microbatches in another order."""
    # PyTorch finds the loss of a microbatch only if the last stage runs them in their order.
    numbers = {"0F": (2, 0, 3, 1), "1F": (0, 1, 2, 3), "1B": (1, 3, 0, 2), "0B": (3, 1, 2, 0)}
    texts = [f"{step}{number}" for step, of in numbers.items() for number in of]
    schedule.pipeline_order[0] = [pipelining.schedules._Action.from_str(text) for text in texts]
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)


def test_the_same_microbatches_in_another_order():
    def between(schedule: Any) -> Any:
        return lambda k: another_order(schedule) if k == 1 else None

    schedule, modules = make("ScheduleInterleaved1F1B")
    want = train(schedule, modules, 4, after=between(schedule))
    schedule, modules = make("ScheduleInterleaved1F1B")
    handle, change = offloaded(schedule), between(schedule)
    reports, orders = list[Any](), list[Any]()

    def after(k: int) -> None:
        change(k)
        reports.append(handle.report())
        orders.append(handle.plan and handle.plan.order)
        handle.reset_statistics()

    got = train(schedule, modules, 4, after=after)
    assert same(want, got)
    assert orders[1] != orders[2] == orders[3] == handle.order
    assert [str(step) for step in handle.order[:4]] == ["0F2", "0F0", "0F3", "0F1"]
    assert handle.plan.offloaded_bytes > 0
    assert reports[3].peak_bytes == reports[3].expected_bytes
    assert reports[3].on_demand == 0
    assert held(handle) == (0, 0)
    handle.remove()


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", ZERO_BUBBLE])
def test_an_order_from_a_file(name, tmp_path):
    """The class that runs it is the base class of the schedules with several stages a rank."""
    path = str(tmp_path / "order.csv")

    def loaded() -> tuple[Any, list[nn.Module]]:
        made, modules = make(name)
        made._dump_csv(path, "compute_only")
        schedule = pipelining.schedules._PipelineScheduleRuntime(made._stages, 4, loss_fn=made._loss_fn)
        schedule._load_csv(path)
        return schedule, modules

    want = train(*loaded())
    schedule, modules = loaded()
    handle = offloaded(schedule)
    order = handle.order
    got = train(schedule, modules, after=lambda k: handle.reset_statistics() if k < 2 else None)
    assert same(want, got)
    assert handle.plan.order == order
    report = handle.report()
    assert report.offloaded_bytes > 0
    assert report.peak_bytes == report.expected_bytes
    assert report.on_demand == 0
    assert held(handle) == (0, 0)
    handle.remove()
