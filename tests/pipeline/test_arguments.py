"""Arguments of a schedule: what they choose, and those that are wrong."""

import re
from typing import Any

import pytest
import torch
from pipeline_programs import BLOCKS, Block, make, offloaded, train
from torch import nn
from torch.distributed import pipelining

import actoffload
from actoffload import PipelineHandle, offload
from actoffload.pipeline.offload import REMOVED

pytestmark = pytest.mark.usefixtures("one_process")


class WithHead(nn.Module):
    """Blocks, and a head if it is the last stage."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = Block() if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def test_modules_of_one_stage():
    """What `keep` and `layers` name need not be in each stage, but in one."""

    def module(stage: int) -> nn.Module:
        return WithHead(stage == 1)

    schedule, modules = make("ScheduleInterleaved1F1B", module=module)
    for chosen, groups in (({"keep": "head"}, 0), ({"layers": [..., "head"]}, 1)):
        with offloaded(schedule, **chosen) as handle:
            train(schedule, modules, 2)
            assert [len(layers) for layers in handle.plan.layers.values()] == [BLOCKS, BLOCKS + groups]
    handle = offloaded(schedule, keep=["head", "router"])
    with pytest.raises(ValueError, match="Rank 0 of the pipeline: keep: 'router' matches no module of this WithHead"):
        train(schedule, modules, 1)
    handle = offloaded(schedule, layers="head")
    with pytest.raises(ValueError, match="the module of stage 0: layers: 'head' matches no module of this WithHead"):
        train(schedule, modules, 1)
    assert not handle.installed


def test_what_is_no_schedule_that_is_known():
    class Another(pipelining.schedules._PipelineSchedule):
        def __init__(self) -> None:
            pass

        def _step_microbatches(self, *args: Any, **kwargs: Any) -> None: ...

        def step(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.raises(
        ValueError, match="offload got a Another, which is not supported; expected ScheduleGPipe, Schedule1F1B or a "
    ):
        offload(Another())
    with pytest.raises(ValueError, match="delta_bytes_per_rank is for pipeline schedules"):
        offload(Block(), delta_bytes_per_rank=1)
    with pytest.raises(TypeError, match="expected the schedule"):
        PipelineHandle.of(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 2}, "num_layers and plan are for a single module"),
        ({"fraction": 1.5}, "fraction is 1.5; expected a part of the groups, from 0.0 to 1.0"),
        ({"max_inflight": 0}, "max_inflight is 0; expected a whole number, at least 1"),
        ({"delta_bytes_per_rank": -1}, "delta_bytes_per_rank is -1; expected a number of bytes"),
        ({"delta_bytes_per_rank": "much"}, "delta_bytes_per_rank is 'much'; expected a number of bytes, or text"),
        ({"memory_budget": "many"}, "memory_budget is 'many'"),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    schedule, _ = make("Schedule1F1B")
    with pytest.raises(ValueError, match=message):
        offload(schedule, **arguments)
    assert PipelineHandle.of(schedule) is None


def test_offloaded_twice():
    schedule, modules = make("Schedule1F1B")
    with offloaded(schedule), pytest.raises(ValueError, match="This schedule is offloaded already"):
        offload(schedule)
    with actoffload.offload(modules[0]):
        handle = offloaded(schedule)
        with pytest.raises(ValueError, match="Rank 0 of the pipeline: the module of stage 0 is offloaded already"):
            train(schedule, modules, 1)
        assert not handle.installed
    train(schedule, modules, 1)


def test_a_report_before_the_first_step():
    schedule, modules = make("Schedule1F1B")
    with offloaded(schedule) as handle:
        with pytest.raises(RuntimeError, match="no step of the schedule has ended"):
            handle.report()
        assert "first steps" in str(handle)
        train(schedule, modules, 2)
        assert "step" not in str(handle).split("Expected")[1]  # nothing was timed here
        assert handle.plan.seconds is handle.plan.baseline_seconds is None
        assert [group.kind for group in handle.report().groups] == ["stage 0"] * BLOCKS
        assert "0" in repr(handle)
        assert handle.table().ranks == (0,)
    assert str(handle) == REMOVED
    assert handle.report().because == handle.plan.because  # of the latest step


@pytest.mark.parametrize("steps", [0, 1])
def test_a_handle_that_was_removed_says_so(steps):
    schedule, modules = make("Schedule1F1B")
    handle = offloaded(schedule)
    train(schedule, modules, steps)
    handle.remove()
    assert str(handle) == REMOVED
    if steps:
        assert handle.report().because == REMOVED
    else:
        with pytest.raises(RuntimeError, match=f"^{re.escape(REMOVED)}$"):
            handle.report()


def test_iterators_as_arguments():
    schedule, modules = make("ScheduleZBVZeroBubble")
    handle = offloaded(schedule, layers=iter(["0", "1"]), keep=iter(["2"]))
    train(schedule, modules, 2)
    assert (handle.plan.names, handle.plan.stages) == (("0", "1") * 2, (0, 0, 1, 1))
    handle.remove()
