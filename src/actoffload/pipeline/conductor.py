"""Follow the steps of a pipeline schedule, and carry out the plan of a rank on the microbatches in flight.

`[Note: following stages]`  Neither a module nor autograd knows the microbatch.  A schedule passes it to the methods
`forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk` of its stages.  So a followed schedule or
stage gets methods in its ``__dict__``, as a followed module does, in which those of its class run inside of a context.
They refer to it weakly; schedules and stages are not copied, as they refer to process groups.  The metadata inference
of the first step calls the module, and none of these methods.

`[Note: microbatches]`  Each microbatch of each stage is a pass of its own.  A pass knows its own groups; the plan of
the rank also acts on those of other passes.  So each pass reports its events, and the conductor looks up what the plan
does at that event.  An event may not be reported, because a group has no graph.  Its actions are carried out at the
next event of the same computation.

`[Note: split backward]`  The backward of the inputs keeps the graph.  The backward of the weights unpacks a part of the
saved tensors again, in several calls of autograd, and frees them.  What was reloaded stays on the device until it ends.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from .._torch.modules import Follower
from .._torch.tensors import address, leaves
from ..engine import eligibility
from ..engine.engine import Engine
from ..engine.passes import ModelPass
from ..schedule.orders import Computation, Event, Order, Step, When
from ..schedule.plan import Action, Do, Plan
from ..tune.costs import StageFacts


@dataclass(eq=False)
class Microbatch:
    """One microbatch of one stage in the present step."""

    stage: int
    number: int
    planned: bool  # the plan has it; otherwise everything is offloaded as soon as possible
    running: Step | None = None  # what is computed of it now
    done: int = 0  # events of that in the plan whose actions are done
    split: bool = False  # its input backward used what it saved
    ref: weakref.ref[ModelPass] | None = None

    @property
    def owner(self) -> ModelPass | None:
        """Its pass, as long as that exists."""
        return None if self.ref is None else self.ref()


class Conductor:
    """What happens in the steps of one schedule on one rank."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.facts = defaultdict[int, StageFacts](StageFacts)  # by stage
        self.order: Order = ()  # of the latest whole step
        self.plan: Plan | None = None
        self.training = False  # a step with backward is in progress
        self.scoped = False  # only groups that are offloaded are followed, see `steering` [Note: modes]
        self.changed = False  # groups saved more bytes in a forward in which not all were followed
        self._events: Mapping[Step, Sequence[Event]] = {}  # of the plan, by step
        self._ran: list[Step] = []
        self._microbatches: dict[tuple[int, int], Microbatch] = {}
        self.watching: Callable[[Step, bool], None] | None = None  # called where a computation begins, and ends (True)

    def follow(self, plan: Plan | None) -> None:
        """Carry out another plan from the next step on."""
        self.plan = plan
        self._events = {} if plan is None else {step: plan.events_of(step) for step in plan.order}

    # Steps

    def begin(self, *, training: bool) -> None:
        """Begin a step of the schedule."""
        self.training = training
        self._clear()

    def end(self, *, failed: bool) -> None:
        """End a step of the schedule."""
        if self.training and self._ran and not failed:
            self.order = tuple(self._ran)
        self.training = False
        self._clear()

    def _clear(self) -> None:
        with self.engine.lock:
            self._ran, self._microbatches = [], {}

    # Computations

    @contextmanager
    def computing(self, stage: Any, step: Step, inputs: Any) -> Iterator[None]:
        """Begin and end one computation of a stage; its inputs are kept, because the caller holds them in the step."""
        for tensor in leaves(inputs):
            eligibility.mark_kept(tensor)
        if not self.training:
            yield
            return
        microbatch = self._begin(step)
        if self.watching is not None:
            self.watching(step, False)
        yield
        if self.watching is not None:
            self.watching(step, True)
        if microbatch is not None:
            self._end(stage, step, microbatch)

    def _begin(self, step: Step) -> Microbatch | None:
        with self.engine.lock:
            self._ran.append(step)
            key = step.stage, step.microbatch
            if step.computation is Computation.FORWARD:
                self._microbatches[key] = Microbatch(step.stage, step.microbatch, planned=step in self._events)
            microbatch = self._microbatches.get(key)
            if microbatch is None:
                return None
            microbatch.running, microbatch.done = step, 0
            if microbatch.split and step.computation is Computation.BACKWARD_WEIGHT:
                self._advance(microbatch, 1)
            return microbatch

    def _end(self, stage: Any, step: Step, microbatch: Microbatch) -> None:
        computation = step.computation
        with self.engine.lock:
            owner = microbatch.owner
            if computation is Computation.FORWARD:
                if owner is not None and not self.scoped:  # otherwise some tensors are saved unseen
                    self._learn_outputs(stage, step, owner)
            elif computation is Computation.BACKWARD_INPUT:
                self.facts[step.stage].split = microbatch.split
            else:
                for layer in () if owner is None else owner.layers:  # what the program keeps with its graph
                    layer.retained = False
                    layer.evict()
                self._microbatches.pop((step.stage, step.microbatch), None)
            # What the computation has freed at its end is free before.
            self._advance(microbatch, len(self._events.get(step, ())))
            microbatch.running = None

    def _learn_outputs(self, stage: Any, step: Step, owner: ModelPass) -> None:
        """Note the bytes of the largest outputs that the schedule keeps for a microbatch, of those not saved."""
        outputs = getattr(stage, "fwd_cache", {}).get(step.microbatch, ((),))[0]
        storages = (tensor.untyped_storage() for tensor in leaves(outputs))
        found = {address(storage): storage.nbytes() for storage in storages}
        kept = sum(nbytes for key, nbytes in found.items() if owner.registry.at(key) is None)
        facts = self.facts[step.stage]
        facts.returns, facts.boundary = bool(getattr(stage, "output_chunks", ())), max(kept, facts.boundary)

    # Passes

    def forward_of(self, stage: int) -> Microbatch | None:
        """Return the microbatch whose forward on a stage runs."""
        forward = stage, Computation.FORWARD
        running = ((each.running, each) for each in self._microbatches.values())
        return next((each for step, each in running if step is not None and step[:2] == forward), None)

    def pass_begins(self, microbatch: Microbatch, owner: ModelPass) -> None:
        """Follow the pass of a microbatch."""
        microbatch.ref = weakref.ref(owner)
        owner.model = microbatch.stage
        owner.observer = partial(self._observe, microbatch)

    def _observe(self, microbatch: Microbatch, when: When, index: int) -> None:
        step, owner = microbatch.running, microbatch.owner
        if step is None or owner is None:
            return
        if when is When.FORWARD_START:
            self._advance(microbatch, index + 1)
        elif when is When.BACKWARD_START and step.computation is not Computation.FORWARD:
            if step.computation is Computation.BACKWARD_WEIGHT and microbatch.split:
                return
            if step.computation is Computation.BACKWARD_INPUT and not microbatch.split:
                microbatch.split = True
                for layer in owner.layers:  # see [Note: split backward]
                    layer.retained = True
            if not microbatch.planned:
                owner.do(Do.RELOAD, index)
            elif step in self._events:
                self._advance(microbatch, len(self._events[step]) - 1 - index)

    # The plan

    @property
    def idle(self) -> bool:
        """Whether the plan offloads nothing."""
        return self.plan is None or not self.plan.steps

    def offloaded(self, stage: int, microbatch: int) -> frozenset[int]:
        """Return the groups of a stage that the plan offloads for a microbatch."""
        plan = self.plan
        assert plan is not None
        layers = plan.layers.get(stage, range(0))
        chosen = (k for k in layers if Action(Do.OFFLOAD, k, microbatch) in plan.at(When.FORWARD_START, k, microbatch))
        return frozenset(k - layers.start for layer in chosen for k in (*_sharing(plan, layer), layer))

    def _advance(self, microbatch: Microbatch, number: int) -> None:
        """Do what the plan does at the first events of what is computed of a microbatch, and is not done yet."""
        step, plan = microbatch.running, self.plan
        if step is None or plan is None:
            return
        for event in self._events.get(step, ())[microbatch.done : max(number, 0)]:
            microbatch.done += 1
            for action in plan.steps.get(event, ()):
                self._act(action, plan)

    def _act(self, action: Action, plan: Plan) -> None:
        """Carry out an action on a group of any microbatch; what does not apply is passed over."""
        stage = plan.stages[action.layer]
        first, microbatch = plan.layers[stage].start, self._microbatches.get((stage, action.microbatch))
        owner = None if microbatch is None else microbatch.owner
        if owner is None or action.layer - first >= len(owner.layers):
            return
        if action.do is not Do.OFFLOAD:  # each tensor is copied where it is saved
            owner.do(action.do, action.layer - first)
            if action.do is Do.RELEASE:
                for k in _sharing(plan, action.layer):
                    owner.do(Do.RELEASE, k - first)


def _sharing(plan: Plan, layer: int) -> range:
    """Return the layers before one of the same stage whose tensors all count in it, because it saves them again."""
    first = layer
    while first > plan.layers[plan.stages[layer]].start and not plan.nbytes[first - 1]:
        first -= 1
    return range(first, layer)


# Following a schedule and its stages


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

SUPPORTED = "ScheduleGPipe", "Schedule1F1B", "_PipelineScheduleRuntime"
"""The classes of PyTorch whose schedules are supported: the last is that of those with several stages a rank."""


def classes_of(given: object) -> set[str]:
    """Return the names of the classes of PyTorch's pipelining that an object is of."""
    kinds = type(given).__mro__
    return {kind.__name__ for kind in kinds if kind.__module__.startswith("torch.distributed.pipelining")}


def is_schedule(given: object) -> bool:
    """Return whether an object is a pipeline schedule of PyTorch, supported or not."""
    classes = classes_of(given)
    return "_PipelineSchedule" in classes or (bool(classes) and hasattr(given, "step") and hasattr(given, "eval"))


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank, in the order of the schedule; none if they are not found."""
    stages = getattr(schedule, "_stages", None)
    one = getattr(schedule, "_stage", None)
    return list(stages) if stages is not None else [] if one is None else [one]
