"""The orders are those that PyTorch executes."""

from typing import Any

import pytest
from pipeline_cases import RecordingStage, planned
from torch.distributed.pipelining import schedules

from actoffload.schedule import Computation, Step, gpipe, one_f_one_b, read_order


def executed(schedule: type, rank: int, ranks: int, microbatches: int) -> tuple[Step, ...]:
    """Let a schedule of one stage run."""
    stage = RecordingStage(rank, ranks, ranks)
    made = schedule(stage, microbatches)
    made._stage_forward_initialized = made._stages_forward_initialized = True
    made._initialize_stage = lambda *_: None
    made._step_microbatches([()] * microbatches, [{}] * microbatches)
    return tuple(stage.calls)


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
