"""Follow the steps of a pipeline schedule, and what its stages compute in them.

`[Note: following stages]`  Neither a module nor autograd knows the microbatch.  A schedule passes it to the methods
`forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk` of its stages.  So a followed schedule or
stage gets another class, as a followed module does: a subclass of its own, of the same name, whose methods call an
`Observer` around the original ones.  The metadata inference of the first step calls the module, and none of these
methods.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from ..schedule.pipeline import Computation, Step

__all__ = ["Observer", "follow", "observer_of", "unfollow"]

_ENTRY = "_actoffload_pipeline"
_ORIGINAL = "_actoffload_original"


class Observer(Protocol):
    """Sees the steps of a schedule and what is computed in them."""

    def step(self, schedule: Any) -> AbstractContextManager[None]:
        """Return a context for one step of the schedule."""

    def computing(self, stage: Any, step: Step, inputs: Any = ()) -> AbstractContextManager[None]:
        """Return a context for one computation of a stage, whose forward is called with `inputs`."""


_classes: dict[tuple[type, bool], type] = {}


def _schedule_methods(original: type) -> dict[str, Callable[..., Any]]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with vars(self)[_ENTRY].step(self):
            return original.step(self, *args, **kwargs)  # type: ignore[attr-defined]

    return {"step": step}


def _stage_methods(original: Any) -> dict[str, Callable[..., Any]]:
    @contextmanager
    def computing(self: Any, computation: Computation, microbatch: int, inputs: Any = ()) -> Iterator[None]:
        with vars(self)[_ENTRY].computing(self, Step(self.stage_index, computation, microbatch), inputs):
            yield

    def forward_one_chunk(self: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with computing(self, Computation.FORWARD, fwd_chunk_id, (args, kwargs)):
            return original.forward_one_chunk(self, fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        computation = Computation.BACKWARD if full_backward else Computation.BACKWARD_INPUT
        with computing(self, computation, bwd_chunk_id):
            return original.backward_one_chunk(self, bwd_chunk_id, loss, full_backward, *args, **kwargs)

    def backward_weight_one_chunk(self: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with computing(self, Computation.BACKWARD_WEIGHT, bwd_chunk_id):
            return original.backward_weight_one_chunk(self, bwd_chunk_id, *args, **kwargs)

    methods = forward_one_chunk, backward_one_chunk, backward_weight_one_chunk
    return {each.__name__: each for each in methods if hasattr(original, each.__name__)}


def _followed(original: type, *, is_stage: bool) -> type:
    """Return the class for followed objects of a class; always the same one."""
    if hasattr(original, _ORIGINAL):
        return original
    key = original, is_stage
    if key not in _classes:
        names: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        names |= {_ORIGINAL: original}
        names |= _stage_methods(original) if is_stage else _schedule_methods(original)
        _classes[key] = types.new_class(original.__name__, (original,), exec_body=lambda body: body.update(names))
    return _classes[key]


def follow(schedule: Any, stages: Sequence[Any], observer: Observer) -> None:
    """Let an observer see the steps of a schedule and what its stages compute; all or nothing."""
    done: list[Any] = []
    try:
        for each in (*stages, schedule):
            done.append(each)
            vars(each)[_ENTRY] = observer
            each.__class__ = _followed(type(each), is_stage=each is not schedule)
    except BaseException:
        unfollow(done)
        raise


def unfollow(followed: Sequence[Any]) -> None:
    """Follow these schedules and stages no longer; may be repeated."""
    for each in followed:
        original = vars(type(each)).get(_ORIGINAL)
        if original is not None:
            each.__class__ = original
        vars(each).pop(_ENTRY, None)


def observer_of(schedule: Any) -> Observer | None:
    """Return what sees the steps of a schedule, or None."""
    found: Observer | None = vars(schedule).get(_ENTRY)
    return found
