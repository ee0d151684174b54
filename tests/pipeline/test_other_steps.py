"""Steps, orders and stages that are not like those before, and exceptions in a microbatch."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_programs import (
    BLOCKS,
    MIN_BYTES,
    STEPS,
    WIDTH,
    Block,
    StoppedError,
    Stopping,
    held,
    make,
    offloaded,
    same,
    train,
)
from torch import nn
from torch.distributed import pipelining

from actoffload import PipelineHandle, offload
from actoffload.report import Report
from actoffload.schedule import read_order

ZERO_BUBBLE = "ScheduleZBVZeroBubble"


pytestmark = pytest.mark.usefixtures("one_process")


def as_planned(handle: PipelineHandle) -> Report:
    """Check that what was counted since the last reset followed the plan, and that nothing is held."""
    report = handle.report()
    assert report.peak_resident_bytes == handle.plan.saved_peak_bytes
    assert handle.statistics().reloaded_on_demand == 0
    assert held(handle) == (0, 0)
    return report


def agrees(build: Callable[[], tuple[Any, list[nn.Module]]]) -> tuple[PipelineHandle, Report]:
    """Train what a function returns without offload and with: the same bits, and a last step as planned."""
    want = train(*build())
    schedule, modules = build()
    handle = offloaded(schedule)
    got = train(schedule, modules, after=lambda k: handle.reset_statistics() if k < STEPS - 1 else None)
    assert same(want, got)
    return handle, as_planned(handle)


class Skipping(nn.Module):
    """Blocks of which each forward skips one, or none."""

    def __init__(self, turns: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.turns, self.calls = turns, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        skipped = self.turns[self.calls % len(self.turns)]
        for k, block in enumerate(self.blocks):
            x = x if k == skipped else block(x)
        return x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("turns", [[-1, 1, 1, 1, 1, 1, -1], [-1, 0, 1], [0, 1, -1, -1, 1]], ids=str)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B", ZERO_BUBBLE])
def test_skipped_groups(name, turns, recompute):
    """Other groups in microbatches of the same step, and in other steps."""
    schedule, modules = make(name, module=lambda stage: Skipping(turns))
    want = train(schedule, modules, 8)
    schedule, modules = make(name, module=lambda stage: Skipping(turns))
    handle = offloaded(schedule, recompute=recompute)
    assert same(train(schedule, modules, 8), want)
    assert held(handle) == (0, 0)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", ZERO_BUBBLE])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_an_exception_in_a_microbatch(name, backward, first):
    def module(stage: int) -> nn.Module:
        return Stopping(*(Block() for _ in range(BLOCKS)))

    schedule, modules = make(name, module=module)
    want = train(schedule, modules)
    schedule, modules = make(name, module=module)
    handle = offloaded(schedule)
    if not first:
        train(schedule, modules, 2)
    modules[1].backward = backward
    modules[1].after = 3 if first and not backward else 2
    with pytest.raises((StoppedError, RuntimeError)):
        train(schedule, modules, 1)
    schedule._internal_losses.clear()  # PyTorch's own schedule does not
    got = train(schedule, modules)
    assert same(want, got)
    gc.collect()  # PyTorch's exception refers to the frames of the schedule
    assert held(handle) == (0, 0)
    assert handle.plan is not None
    handle.reset_statistics()
    train(schedule, modules, 1)
    as_planned(handle)


def test_another_number_of_microbatches():
    """The plan is followed as far as it applies, and other microbatches are offloaded."""
    schedule, modules = make("Schedule1F1B", 4)
    handle = offloaded(schedule)
    train(schedule, modules, 2)
    before = handle.plan
    for number in (6, 3):
        schedule._n_microbatches = number
        want = train(*make("Schedule1F1B", number), 3, number)
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = False  # buffers for all of them
        assert same(want, train(schedule, modules, 3, number))
        assert held(handle) == (0, 0)
    assert handle.plan is before


def test_larger_microbatches():
    schedule, modules = make(ZERO_BUBBLE)
    handle = offloaded(schedule)
    train(schedule, modules, 2)
    before = handle.plan
    for stage in schedule._stages:
        stage._runtime_validate = False
    schedule._stages_forward_initialized = schedule._stages_backward_initialized = False
    want = train(*make(ZERO_BUBBLE), 3, rows=24)
    got = train(schedule, modules, 3, rows=24)
    assert same(want, got)
    assert before.peak_bytes is not None
    assert handle.plan.offloaded_bytes == 3 * before.offloaded_bytes
    assert handle.plan.peak_bytes == 3 * before.peak_bytes


class Repeating(nn.Sequential):
    """Blocks whose last output is repeated, which saves nothing."""

    times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x)] * self.times)


@pytest.mark.parametrize("min_bytes", [MIN_BYTES, 2**20], ids=["groups that are offloaded", "groups that save nothing"])
def test_larger_outputs(min_bytes):
    """The groups save as much as before, but the schedule keeps more for each microbatch in flight."""
    schedule, (blocks,) = make("ScheduleGPipe", module=lambda stage: Repeating(*(Block() for _ in range(BLOCKS))))
    schedule._loss_fn = lambda output, target: output.square().mean()
    schedule._stage._runtime_validate = False
    handle = offload(schedule, min_bytes=min_bytes)
    train(schedule, [blocks], 2)
    before, output = handle.plan, 8 * WIDTH * 4
    blocks.times = 3
    train(schedule, [blocks], 1)
    assert handle.plan.peak_bytes == before.peak_bytes + 4 * 2 * output  # four microbatches are in flight
    plan = handle.plan
    train(schedule, [blocks], 2)
    assert handle.plan is plan


def test_smaller_microbatches():
    """Where sizes follow from the data, as with experts, one plan serves all that are not larger."""

    def run(schedule: Any, modules: list[nn.Module], after: Any = lambda k: None) -> list[torch.Tensor]:
        results = []
        for rows in (24, 24, 8, 16, 8):
            schedule._stages_forward_initialized = schedule._stages_backward_initialized = False
            for stage in schedule._stages:
                stage._runtime_validate = False
            results += train(schedule, modules, 1, after=after, rows=rows)
        return results

    want = run(*make(ZERO_BUBBLE))
    schedule, modules = make(ZERO_BUBBLE)
    handle, plans = offloaded(schedule), list[Any]()

    def after(k: int) -> None:
        plans.append(handle.plan)
        handle.reset_statistics()

    got = run(schedule, modules, after)
    assert same(want, got)
    assert plans[1] is not None
    assert all(plan is plans[1] for plan in plans[1:])
    train(schedule, modules, 1, rows=8)
    assert handle.statistics().reloaded_on_demand == 0
    assert held(handle) == (0, 0)


def test_a_loss_that_calls_a_block():
    """What a loss saves is kept, also in a module that is a group of the last stage."""

    def with_loss() -> tuple[Any, list[nn.Module]]:
        schedule, modules = make("Schedule1F1B")
        blocks: Any = modules[-1]
        schedule._loss_fn = lambda output, target: (blocks[0](output) - target).square().mean()
        return schedule, modules

    agrees(with_loss)


@pytest.mark.parametrize("name", ["Schedule1F1B", ZERO_BUBBLE])
def test_blocks_that_save_their_outputs(name):
    """What a block saves is the input of the next one, where it counts; nothing else is saved in the first block."""

    def module(stage: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(BLOCKS)))

    agrees(lambda: make(name, module=module))


@pytest.mark.parametrize("chosen", [{"layers": "*.up"}, {"layers": "*.up", "keep": "*.down"}], ids=["outside", "kept"])
def test_a_plan_counts_what_is_not_in_groups(chosen):
    schedule, modules = make("ScheduleGPipe")
    handle = offloaded(schedule, **chosen)
    train(schedule, modules)
    plan = handle.plan
    assert plan.peak_bytes is not None
    assert plan.saved_peak_bytes < handle.report().peak_resident_bytes <= plan.peak_bytes


def test_evaluation_between_steps():
    x = torch.randn(32, 16)

    def evaluate(schedule: Any) -> None:
        with torch.no_grad():
            assert schedule.eval(x, target=x) is not None
        assert schedule.eval(x, target=x) is not None  # with a graph that no backward runs

    def evaluate_offloaded(k: int) -> None:
        plan, nbytes = handle.plan, handle.statistics().bytes_offloaded
        evaluate(schedule)
        assert handle.plan is plan
        assert handle.statistics().bytes_offloaded == nbytes

    # PyTorch cannot evaluate schedules with two adjacent stages on a rank.
    plain, modules = make("Schedule1F1B")
    want = train(plain, modules, after=lambda k: evaluate(plain))
    schedule, modules = make("Schedule1F1B")
    handle = offloaded(schedule)
    got = train(schedule, modules, after=evaluate_offloaded)
    assert same(want, got)
    assert handle.plan is not None


def test_removed_in_the_middle():
    want = train(*make(ZERO_BUBBLE), 4)
    schedule, modules = make(ZERO_BUBBLE)
    handle = offloaded(schedule)
    got = train(schedule, modules, 4, after=lambda k: handle.remove() if k == 2 else None)
    assert same(want, got)
    assert type(schedule) is pipelining.ScheduleZBVZeroBubble
    assert "step" not in vars(schedule)
    assert all("forward_one_chunk" not in vars(stage) for stage in schedule._stages)
    assert not handle.installed
    assert handle.statistics().host_bytes == 0
    handle.remove()
    with offloaded(schedule) as again:
        train(schedule, modules, 2)
        assert PipelineHandle.of(schedule) is not None
        assert again.plan.offloaded_bytes
    assert PipelineHandle.of(schedule) is None


def test_no_cycle_keeps_a_schedule():
    schedule, modules = make("Schedule1F1B")
    offloaded(schedule)
    train(schedule, modules, 2)
    gc.collect()
    ref = weakref.ref(schedule)
    gc.disable()
    try:
        del schedule, modules
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["Schedule1F1B", ZERO_BUBBLE])
def test_stages_with_known_shapes(name):
    """PyTorch infers no metadata then, so the groups are found in the first microbatch."""

    def known(microbatches: int = 4) -> tuple[Any, list[nn.Module]]:
        schedule, modules = make(name, microbatches)
        old = getattr(schedule, "_stages", None) or [schedule._stage]
        example = torch.zeros(8, 16)
        stages = [
            pipelining.PipelineStage(
                stage.submod,
                stage.stage_index,
                stage.num_stages,
                torch.device("cpu"),
                input_args=example.clone().requires_grad_(stage.stage_index > 0),
                output_args=example.clone().requires_grad_(),
            )
            for stage in old
        ]
        single = name == "Schedule1F1B"
        return type(schedule)(stages[0] if single else stages, microbatches, loss_fn=schedule._loss_fn), modules

    agrees(known)


# Orders that are not those of the named schedules: changed between steps, and loaded from a file


def test_the_same_microbatches_in_another_order():
    def change(schedule: Any) -> None:
        # PyTorch finds the loss of a microbatch only if the last stage runs them in their order.
        numbers = {"0F": (2, 0, 3, 1), "1F": (0, 1, 2, 3), "1B": (1, 3, 0, 2), "0B": (3, 1, 2, 0)}
        texts = [f"{step}{number}" for step, order in numbers.items() for number in order]
        schedule.pipeline_order[0] = [pipelining.schedules._Action.from_str(text) for text in texts]
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)

    schedule, modules = make("ScheduleInterleaved1F1B")
    want = train(schedule, modules, 4, after=lambda k: change(schedule) if k == 1 else None)
    other, modules = make("ScheduleInterleaved1F1B")
    handle = offloaded(other)
    got = train(other, modules, 4, after=lambda k: change(other) if k == 1 else None)
    assert same(want, got)
    assert held(handle) == (0, 0)


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

    handle, report = agrees(loaded)
    assert handle.plan.order == read_order(loaded()[0].pipeline_order[0]), "that of the file"
    assert report.totals.bytes_offloaded > 0
