"""Follow the steps of a pipeline schedule of `torch.distributed.pipelining`, and what its stages compute in them.

`[Note: following stages]`  Neither a module nor autograd knows the microbatch.  A schedule passes it to the methods
`forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk` of its stages.  So a followed schedule or
stage gets methods in its ``__dict__``, as a followed module does, which call an `Observer` around those of its class.
They refer to it weakly; schedules and stages are not copied, as they refer to process groups.  The metadata inference
of the first step calls the module, and none of these methods.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

from .._torch.modules import class_attribute
from ..schedule.pipeline import Computation, Step

__all__ = [
    "NAMES",
    "Observer",
    "actions_of",
    "follow",
    "is_schedule",
    "is_supported",
    "microbatches",
    "observer_of",
    "rank_of",
    "runs_backward",
    "stages_of",
    "unfollow",
]

_ENTRY = "_actoffload_pipeline"


class Observer(Protocol):
    """Sees the steps of a schedule and what is computed in them."""

    def step(self, schedule: Any) -> AbstractContextManager[None]:
        """Return a context for one step of the schedule."""

    def computing(self, stage: Any, step: Step, inputs: Any = ()) -> AbstractContextManager[None]:
        """Return a context for one computation of a stage, whose forward is called with `inputs`."""


class _Entry(NamedTuple):
    """What follows a schedule or a stage, our methods, and what was in their place before."""

    observer: Observer
    methods: dict[str, Callable[..., Any]]
    before: dict[str, Any]


class _Originals:
    """The methods of a schedule or stage that are there without us; refers weakly to the object."""

    def __init__(self, each: Any, before: dict[str, Any]) -> None:
        self._ref, self._before = weakref.ref(each), before

    def get(self, name: str) -> tuple[Any, Observer | None, Callable[..., Any]]:
        """Return the object, what observes it, and its original method; another library may call ours after removal."""
        each = self._ref()
        assert each is not None
        return each, observer_of(each), self._before[name] if name in self._before else class_attribute(each, name)


def _schedule_methods(originals: _Originals) -> dict[str, Callable[..., Any]]:
    def step(*args: Any, **kwargs: Any) -> Any:
        schedule, observer, original = originals.get("step")
        with nullcontext() if observer is None else observer.step(schedule):
            return original(*args, **kwargs)

    return {"step": step}


def _stage_methods(originals: _Originals) -> dict[str, Callable[..., Any]]:
    @contextmanager
    def computing(name: str, computation: Computation, microbatch: int, inputs: Any = ()) -> Iterator[Any]:
        stage, observer, original = originals.get(name)
        step = Step(stage.stage_index, computation, microbatch)
        with nullcontext() if observer is None else observer.computing(stage, step, inputs):
            yield original

    def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with computing("forward_one_chunk", Computation.FORWARD, fwd_chunk_id, (args, kwargs)) as original:
            return original(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        computation = Computation.BACKWARD if full_backward else Computation.BACKWARD_INPUT
        with computing("backward_one_chunk", computation, bwd_chunk_id) as original:
            return original(bwd_chunk_id, loss, full_backward, *args, **kwargs)

    def backward_weight_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with computing("backward_weight_one_chunk", Computation.BACKWARD_WEIGHT, bwd_chunk_id) as original:
            return original(bwd_chunk_id, *args, **kwargs)

    return {each.__name__: each for each in (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk)}


def follow(schedule: Any, stages: Sequence[Any], observer: Observer) -> None:
    """Let an observer see the steps of a schedule and what its stages compute; all or nothing."""
    done: list[Any] = []
    try:
        for each in (*stages, schedule):
            before: dict[str, Any] = {}
            make = _schedule_methods if each is schedule else _stage_methods
            methods = {name: method for name, method in make(_Originals(each, before)).items() if hasattr(each, name)}
            before |= {name: vars(each)[name] for name in methods if name in vars(each)}
            done.append(each)
            vars(each).update(methods, **{_ENTRY: _Entry(observer, methods, before)})
    except BaseException:
        unfollow(done)
        raise


def unfollow(followed: Sequence[Any]) -> None:
    """Follow these schedules and stages no longer; may be repeated."""
    for each in followed:
        entry: _Entry | None = vars(each).get(_ENTRY)
        if entry is not None:
            for name, method in entry.methods.items():
                if vars(each).get(name) is method and name in entry.before:
                    vars(each)[name] = entry.before[name]
                elif vars(each).get(name) is method:
                    del vars(each)[name]
            del vars(each)[_ENTRY]


def observer_of(schedule: Any) -> Observer | None:
    """Return what sees the steps of a schedule, or None."""
    entry: _Entry | None = vars(schedule).get(_ENTRY)
    return None if entry is None else entry.observer


# What is used of schedules and stages; where PyTorch is built without them, nothing is a schedule

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
    if not any(kind.__module__.startswith("torch.distributed.pipelining") for kind in type(given).__mro__):
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
