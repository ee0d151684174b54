"""The orders are those that PyTorch executes."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from actoffload.schedule import Computation, Step, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b, read_order


class RecordingStage:
    """A stage that only notes what its schedule calls."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size, self.group = index % ranks, ranks, None
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.submod = SimpleNamespace()
        self.stage_index_to_group_rank: dict[int, int] = {k: k % ranks for k in range(stages)}
        self.calls: list[Step] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.calls.append(Step(self.stage_index, Computation.FORWARD, microbatch))

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.calls.append(Step(self.stage_index, Computation.BACKWARD, microbatch))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            return lambda *_: []  # no communication
        return lambda *_, **__: None


def executed(schedule: type, rank: int, ranks: int, microbatches: int) -> tuple[Step, ...]:
    """Let a schedule of one stage run."""
    stage = RecordingStage(rank, ranks, ranks)
    made = schedule(stage, microbatches)
    made._stage_forward_initialized = made._stages_forward_initialized = True
    made._initialize_stage = lambda *_: None
    made._step_microbatches([()] * microbatches, [{}] * microbatches)
    return tuple(stage.calls)


def planned(schedule: type, ranks: int, microbatches: int, each: int = 2) -> tuple[tuple[Step, ...], ...]:
    """Return the orders that a schedule of several stages a rank makes."""
    stages = [RecordingStage(k * ranks, ranks, ranks * each) for k in range(each)]
    made = schedule(stages, microbatches)
    return tuple(read_order(made.pipeline_order[rank]) for rank in range(ranks))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 8), (4, 2)])
@pytest.mark.parametrize(
    ("schedule", "orders"), [(schedules.ScheduleGPipe, gpipe), (schedules.Schedule1F1B, one_f_one_b)]
)
def test_one_stage_a_rank(schedule: type, orders: Any, ranks: int, microbatches: int) -> None:
    if schedule is schedules.Schedule1F1B and microbatches < ranks:
        with pytest.raises(ValueError, match="stages"):
            schedule(RecordingStage(0, ranks, ranks), microbatches)
        return
    expected = tuple(executed(schedule, rank, ranks, microbatches) for rank in range(ranks))
    assert orders(ranks, microbatches) == expected


@pytest.mark.parametrize(("ranks", "microbatches", "each"), [(2, 4, 2), (4, 8, 3), (4, 10, 2), (4, 3, 2), (1, 4, 2)])
def test_several_stages_a_rank(ranks: int, microbatches: int, each: int) -> None:
    expected = planned(schedules.ScheduleInterleaved1F1B, ranks, microbatches, each)
    assert interleaved_1f1b(ranks, microbatches, each) == expected
    assert looped_bfs(ranks, microbatches, each) == planned(schedules.ScheduleLoopedBFS, ranks, microbatches, each)


def test_zero_bubble_and_overlap_are_read() -> None:
    orders = planned(schedules.ScheduleInterleavedZeroBubble, 2, 4)
    for rank, order in enumerate(orders):
        kinds = [step.computation for step in order]
        assert {step.stage for step in order} == {rank, rank + 2}
        assert [kinds.count(kind) for kind in Computation] == [8, 0, 8, 8]
    assert read_order(["(1F2;2I0)OVERLAP_F_B", "", "0UNSHARD", " 1SEND_F2", "2RECV_B0", "1REDUCE_GRAD", "2W0"]) == (
        Step(1, Computation.FORWARD, 2),
        Step(2, Computation.BACKWARD_INPUT, 0),
        Step(2, Computation.BACKWARD_WEIGHT, 0),
    )
