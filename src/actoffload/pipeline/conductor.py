"""Carry out the plan of a rank: what is done at each moment, on the passes of the microbatches in flight.

`[Note: microbatches]`  Each microbatch of each stage is a pass of its own.  A pass knows its own groups; the plan of
the rank also acts on those of other passes.  So each pass reports its events, and the conductor looks up what the plan
does at that moment.  A moment may not be reported, because a group has no graph.  Its actions are carried out at the
next moment of the same computation.

`[Note: split backward]`  The backward of the inputs keeps the graph.  The backward of the weights unpacks a part of the
saved tensors again, in several calls of autograd, and frees them.  What was reloaded stays on the device until it ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._torch.tensors import address, leaves
from ..engine import eligibility
from ..engine.engine import Engine
from ..engine.passes import ModelPass
from ..schedule.pipeline import ChunkAction, Computation, Moment, PipelinePlan, Step
from ..schedule.plan import Do, When
from ..tune.costs import StageFacts


@dataclass(eq=False)
class Microbatch:
    """One microbatch of one stage in the present step."""

    stage: int
    number: int
    planned: bool  # the plan has it; otherwise everything is offloaded as soon as possible
    running: Step | None = None  # what is computed of it now
    split: bool = False  # its input backward used what it saved
    ref: weakref.ref[ModelPass[int]] | None = None

    @property
    def owner(self) -> ModelPass[int] | None:
        """Its pass, as long as that exists."""
        return None if self.ref is None else self.ref()


class Conductor:
    """What happens in the steps of one schedule on one rank."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.learned = StageFacts()
        self.plan: PipelinePlan | None = None
        self.training = False  # a step with backward is in progress
        self.scoped = False  # only groups that are offloaded are followed, see `steering` [Note: modes]
        self._steps: Mapping[Step, int] = {}  # of the plan
        self._ran: list[Step] = []
        self._done: dict[Step, int] = {}  # in progress, and in the plan: the last position whose actions are done
        self._microbatches: dict[tuple[int, int], Microbatch] = {}
        self._forwards: dict[int, Microbatch] = {}  # in progress, by stage
        self.watching: Callable[[Step, bool], None] | None = None  # called where a computation begins, and ends (True)

    def follow(self, plan: PipelinePlan | None) -> None:
        """Carry out another plan from the next step on."""
        self.plan = plan
        self._steps = {} if plan is None else {step: k for k, step in enumerate(plan.order)}

    # Steps

    def begin(self, *, training: bool) -> None:
        """Begin a step of the schedule."""
        self.training = training
        self._clear()

    def end(self, *, failed: bool) -> bool:
        """End a step of the schedule; return whether it ran another order than the plan has, or than the one before."""
        ran, training = tuple(self._ran), self.training
        self.training = False
        self._clear()
        if failed or not training or not ran:
            return False
        before = self.learned.order if self.plan is None else self.plan.order
        self.learned.order = ran
        return ran != before

    def _clear(self) -> None:
        with self.engine.lock:
            self._ran, self._done, self._microbatches, self._forwards = [], {}, {}, {}

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
                found = Microbatch(step.stage, step.microbatch, planned=step in self._steps)
                self._microbatches[key] = self._forwards[step.stage] = found
            microbatch = self._microbatches.get(key)
            if microbatch is None:
                return None
            microbatch.running = step
            if step in self._steps:
                self._done[step] = -1
            if microbatch.split and step.computation is Computation.BACKWARD_WEIGHT:
                self._advance(step, 0)
            return microbatch

    def _end(self, stage: Any, step: Step, microbatch: Microbatch) -> None:
        computation = step.computation
        with self.engine.lock:
            owner = microbatch.owner
            if computation is Computation.FORWARD:
                self._forwards.pop(step.stage, None)
                if owner is not None and not self.scoped:  # otherwise some tensors are saved unseen
                    self._learn_outputs(stage, step, owner)
            elif computation is Computation.BACKWARD_INPUT:
                self.learned.split[step.stage] = microbatch.split
            else:
                for layer in () if owner is None else owner.layers:  # what the program keeps with its graph
                    layer.retained = False
                    layer.evict()
                self._microbatches.pop((step.stage, step.microbatch), None)
            microbatch.running = None
            if step in self._done and self.plan is not None:
                # What the computation has freed at its end is free before.
                self._advance(step, self.plan.end(self._steps[step]).position)
                del self._done[step]

    def _learn_outputs(self, stage: Any, step: Step, owner: ModelPass[int]) -> None:
        """Note the bytes of the largest outputs that the schedule keeps for a microbatch, of those not saved."""
        outputs = getattr(stage, "fwd_cache", {}).get(step.microbatch, ((),))[0]
        storages = (tensor.untyped_storage() for tensor in leaves(outputs))
        found = {address(storage): storage.nbytes() for storage in storages}
        kept = sum(nbytes for key, nbytes in found.items() if owner.registry.at(key) is None)
        self.learned.returns[step.stage] = bool(getattr(stage, "output_chunks", ()))
        self.learned.boundary[step.stage] = max(kept, self.learned.boundary.get(step.stage, 0))

    # Passes

    def forward_of(self, stage: int) -> Microbatch | None:
        """Return the microbatch whose forward on a stage runs."""
        return self._forwards.get(stage)

    def pass_begins(self, microbatch: Microbatch, owner: ModelPass[int]) -> None:
        """Follow the pass of a microbatch."""
        microbatch.ref = weakref.ref(owner)
        owner.model = microbatch.stage
        owner.observer = partial(self._observe, microbatch)

    def _observe(self, microbatch: Microbatch, when: When, index: int) -> None:
        step, owner = microbatch.running, microbatch.owner
        if step is None or owner is None:
            return
        if when is When.FORWARD_START:
            self._advance(step, index)
        elif when is When.BACKWARD_START and step.computation is not Computation.FORWARD:
            if step.computation is Computation.BACKWARD_WEIGHT and microbatch.split:
                return
            if step.computation is Computation.BACKWARD_INPUT and not microbatch.split:
                microbatch.split = True
                for layer in owner.layers:  # see [Note: split backward]
                    layer.retained = True
            if not microbatch.planned:
                owner.do(Do.RELOAD, index)
            elif self.plan is not None:
                self._advance(step, len(self.plan.names[step.stage]) - 1 - index)

    # The plan

    def _advance(self, step: Step, position: int) -> None:
        """Do what the plan does in a computation up to a position, and is not done yet."""
        if step not in self._done or self.plan is None:
            return
        while self._done[step] < position:
            self._done[step] += 1
            for action in self.plan.at(Moment(self._steps[step], self._done[step])):
                self._act(action)

    def _act(self, action: ChunkAction) -> None:
        """Carry out an action on a chunk; what does not apply is passed over."""
        chunk = action.chunk
        microbatch = self._microbatches.get((chunk.stage, chunk.microbatch))
        owner = None if microbatch is None else microbatch.owner
        if microbatch is None or owner is None or chunk.group >= len(owner.layers):
            return
        if action.do is not Do.OFFLOAD:  # each tensor is copied where it is saved
            owner.do(action.do, chunk.group)
            if action.do is Do.RELEASE and self.plan is not None:
                for k in self.plan.sharing(chunk):
                    owner.do(Do.RELEASE, k)
