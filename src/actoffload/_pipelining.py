"""What the package uses of `torch.distributed.pipelining`, each behind a feature check.

Where PyTorch is built without it, `is_schedule` is false for everything.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "NAMES",
    "actions_of",
    "is_schedule",
    "is_supported",
    "microbatches",
    "rank_of",
    "runs_backward",
    "stages_of",
]

NAMES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
"""The schedules that are supported; a subclass of one of them is, too."""

RUNTIME = "_PipelineScheduleRuntime"
"""The base class of those with several stages a rank, which runs any order, such as one that was loaded from a file."""


def _schedules() -> Any:
    try:
        return importlib.import_module("torch.distributed.pipelining.schedules")
    except ImportError:
        return None


def is_schedule(given: object) -> bool:
    """Return whether an object is a pipeline schedule of PyTorch, supported or not."""
    if not any(of.__module__.startswith("torch.distributed.pipelining") for of in type(given).__mro__):
        return False
    base = getattr(_schedules(), "_PipelineSchedule", ())
    return isinstance(given, base) or (hasattr(given, "step") and hasattr(given, "eval"))


def is_supported(schedule: object) -> bool:
    """Return whether a pipeline schedule is one of `NAMES`, or runs an order of its own in the same way."""
    known = tuple(found for name in (*NAMES, RUNTIME) if (found := getattr(_schedules(), name, None)) is not None)
    return isinstance(schedule, known)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank, in the order of the schedule; none if they are not found."""
    stages = getattr(schedule, "_stages", None)
    one = getattr(schedule, "_stage", None)
    return list(stages) if stages is not None else [] if one is None else [one]


def microbatches(schedule: Any) -> int:
    """Return the number of microbatches of a step; 0 if it is not known."""
    return int(getattr(schedule, "_n_microbatches", 0))


def runs_backward(schedule: Any) -> bool:
    """Return whether the step that begins runs backward: not in `eval`, and not without a loss."""
    return bool(getattr(schedule, "_has_backward", True))


def rank_of(stage: Any) -> tuple[int, Any]:
    """Return the rank of a stage in its process group, and the group; None for the default one."""
    return int(getattr(stage, "group_rank", 0)), getattr(stage, "group", None)


def actions_of(schedule: Any, rank: int) -> list[Any]:
    """Return the actions of a rank, in order; none if the schedule does not say.

    Schedules with several stages a rank run `pipeline_order_with_comms`; for the others there is a diagram.
    """
    for name in ("pipeline_order_with_comms", "pipeline_order"):
        orders = getattr(schedule, name, None)
        if orders and rank in orders:
            return list(orders[rank])
    return []
