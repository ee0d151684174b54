"""Follow the steps of a pipeline schedule of `torch.distributed.pipelining`, and what its stages compute in them.

`[Note: following stages]`  Neither a module nor autograd knows the microbatch.  A schedule passes it to the methods
`forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk` of its stages.  So a followed schedule or
stage gets methods in its ``__dict__``, as a followed module does, in which those of its class run inside of a context.
They refer to it weakly; schedules and stages are not copied, as they refer to process groups.  The metadata inference
of the first step calls the module, and none of these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from .._torch.modules import Follower
from ..schedule.orders import Computation, Step


class _Follower(Follower):
    """What follows a schedule or a stage."""

    entry = "_actoffload_pipeline"

    def __init__(self, followed: Any, handle: Any, around: Callable[..., AbstractContextManager[None]]) -> None:
        super().__init__(followed)
        self.handle, self.around = handle, around


_COMPUTATIONS = {
    "forward_one_chunk": Computation.FORWARD,
    "backward_one_chunk": Computation.BACKWARD,
    "backward_weight_one_chunk": Computation.BACKWARD_WEIGHT,
}


def _method(name: str) -> Callable[..., Any]:
    """Return the method of a follower that calls the original one in the context."""

    def method(follower: _Follower, *args: Any, **kwargs: Any) -> Any:
        followed, original = follower.ref(), follower.original(name)
        if _Follower.find(followed) is not follower:  # another library may call ours after removal
            return original(*args, **kwargs)
        given: tuple[Any, ...] = ()
        if name in _COMPUTATIONS:
            computation = _COMPUTATIONS[name]
            if not kwargs.get("full_backward", True):
                computation = Computation.BACKWARD_INPUT
            inputs = (args[1:], kwargs) if computation is Computation.FORWARD else ()
            given = Step(followed.stage_index, computation, args[0]), inputs  # type: ignore[union-attr]
        with follower.around(followed, *given):
            return original(*args, **kwargs)

    return method


_METHODS = {name: _method(name) for name in ("step", *_COMPUTATIONS)}


def follow(
    schedule: Any,
    stages: Sequence[Any],
    handle: Any,
    step: Callable[[Any], AbstractContextManager[None]],
    computing: Callable[[Any, Step, Any], AbstractContextManager[None]],
) -> None:
    """Run the steps of a schedule, and what its stages compute, inside of contexts; all or nothing.

    `step` gets the schedule; `computing` gets the stage, the step and what its forward is called with.
    """
    try:
        for each in (*stages, schedule):
            follower = _Follower(each, handle, step if each is schedule else computing)
            names = ["step"] if each is schedule else [name for name in _COMPUTATIONS if hasattr(each, name)]
            follower.install({name: MethodType(_METHODS[name], follower) for name in names})
    except BaseException:
        unfollow((*stages, schedule))
        raise


def unfollow(followed: Sequence[Any]) -> None:
    """Follow these schedules and stages no longer; may be repeated."""
    for each in followed:
        if (follower := _Follower.find(each)) is not None:
            follower.strip(vars(each))


def handle_of(schedule: Any) -> Any:
    """Return the handle that follows a schedule, or None."""
    follower = _Follower.find(schedule)
    return None if follower is None else follower.handle


# What is used of schedules and stages

KINDS = "ScheduleGPipe", "Schedule1F1B", "_PipelineScheduleRuntime"
"""The classes of PyTorch whose schedules are supported: the last is that of those with several stages a rank."""


def _classes(given: object) -> set[str]:
    """Return the names of the classes of PyTorch's pipelining that an object is of."""
    kinds = type(given).__mro__
    return {kind.__name__ for kind in kinds if kind.__module__.startswith("torch.distributed.pipelining")}


def is_schedule(given: object) -> bool:
    """Return whether an object is a pipeline schedule of PyTorch, supported or not."""
    classes = _classes(given)
    return "_PipelineSchedule" in classes or (bool(classes) and hasattr(given, "step") and hasattr(given, "eval"))


def is_supported(schedule: object) -> bool:
    """Return whether a pipeline schedule is of one of the `KINDS`."""
    return not _classes(schedule).isdisjoint(KINDS)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank, in the order of the schedule; none if they are not found."""
    stages = getattr(schedule, "_stages", None)
    one = getattr(schedule, "_stage", None)
    return list(stages) if stages is not None else [] if one is None else [one]
