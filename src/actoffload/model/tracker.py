"""Follows one model as it runs: which of its groups is at work in a thread, and what autograd saves there."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from .._torch import (
    NO_BACKWARD,
    backward_id,
    in_transform,
    saved_tensor_hooks,
    saved_tensor_hooks_disabled,
    unsupported,
)
from ..engine.engine import Engine
from ..engine.layer import Layer, tensors_in
from ..engine.model_pass import ModelPass
from ..engine.ownership import GroupTensors, ModelTensors
from ..engine.pack import Pack, Packer, unpack
from ..engine.tensor_marks import running
from ..schedule.execution_order import ExecutionOrder, GroupKey, Planner

__all__ = ["GROUP", "KEPT", "ROOT", "Obstacles", "Place", "Tracker"]

TAKEN = (
    "that already runs under saved-tensor hooks of somebody else, such as those of torch.utils.checkpoint around the "
    "whole model or torch.autograd.graph.save_on_cpu: theirs take the tensors. Put them around parts of the model."
)
OURS = (
    "that runs inside of the forward of another model, or of a layer, which actoffload offloads as well: what is "
    "outside takes the tensors. Offload one of the two only."
)
RECOMPUTED = (
    "that is computed a second time in backward, as with torch.utils.checkpoint around the whole model: there is "
    "nothing left to save. Put it around parts of the model."
)
TRANSFORMED = (
    "inside of torch.func.grad, jvp and their relatives, which do not go together with saved-tensor hooks. Use "
    "torch.func.functional_call with torch.autograd.grad or backward."
)


class Obstacles:
    """Looks for what is in the way of a forward, and tells of each kind once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def hinder(self) -> bool:
        """Return whether what this thread saves from now on would not come to hooks of ours."""
        if _transformed():
            self._tell(TRANSFORMED)
            return True
        hooks = saved_tensor_hooks()
        if hooks is not None:
            self._tell(OURS if hooks[1] is unpack else TAKEN)
            return True
        return False

    def recomputed(self) -> None:
        """Tell of a whole model that runs inside of a backward."""
        # The variant of checkpointing that has hooks was told of in the forward.
        if torch.is_grad_enabled() and saved_tensor_hooks() is None:
            self._tell(RECOMPUTED)

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            warnings.warn(f"Nothing is offloaded in a forward {why} This is said once.", UserWarning, stacklevel=7)


def _transformed() -> bool:
    """Whether this thread is inside of a transform of functions under which autograd saves no plain tensors."""
    if saved_tensor_hooks_disabled() is not None:
        return True
    return in_transform()


ROOT, GROUP, KEPT = "root", "group", "kept"

COMPILED = f"torch{os.sep}_dynamo{os.sep}eval_frame.py"
"""Where compiled code is called; a frame of its own cannot be told from others."""


@dataclass(frozen=True, eq=False)
class Place:
    """A module that the tracker is told of.  Nothing here keeps a model alive: its hooks lead here.

    Parameters
    ----------
    role : str
        ``ROOT``, ``GROUP`` or ``KEPT``.
    name : str
        Dotted name in the model.
    ref : weakref of torch.nn.Module
        The module.
    group : int
        Its number among the chosen modules; -1 for others.
    kind : str
        Groups of one kind are scheduled alike.
    """

    role: str
    name: str
    ref: weakref.ref[Module]
    group: int = -1
    kind: str = ""

    @property
    def module(self) -> Module:
        """The module, which exists wherever it is asked for."""
        found = self.ref()
        assert found is not None
        return found


@dataclass(eq=False)
class _Frame:
    """A place whose forward runs; for a group also what it is in the pass."""

    place: Place
    handled: BaseException | None  # what was being handled when it began: an exception that is none of ours
    part: int = 0
    layer: Layer | None = None


class _State(threading.local):
    """Where one thread is in the model."""

    def __init__(self) -> None:
        self.current: ModelPass[GroupKey] | None = None
        self.owned: ModelTensors | None = None
        self.frames: list[_Frame] = []
        self.inside: saved_tensors_hooks | None = None
        # A gradient that is taken inside of a forward saves tensors in autograd's threads, so this is shared with them.
        self.packer = Packer()
        self.between: Pack | None = None  # takes what is saved in no group


class _InForward(threading.local):
    """Whose forwards a thread is in, outermost first."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []


_in_forward = _InForward()


def _reset_others() -> None:
    """Leave the forwards of other models out of which an interrupt took this thread; their hooks are in the way."""
    for tracker in reversed(_in_forward.trackers.copy()):
        if tracker.runs():
            return
        tracker.reset()


class Tracker:
    """Turns the comings and goings of modules into passes.

    Parameters
    ----------
    root : Place
        The model.
    engine : Engine
        What its passes share.
    planner : Planner
        Which plan a pass follows.
    done : callable
        Told of each pass whose forward has ended, with its sequence of groups.
    """

    def __init__(
        self,
        root: Place,
        engine: Engine,
        planner: Planner,
        done: Callable[[ModelPass[GroupKey], Sequence[GroupKey]], None],
    ) -> None:
        self._root = root
        self._engine = engine
        self._planner = planner
        self._done = done
        self._state = _State()
        self._obstacles = Obstacles()
        self._at_work = 0  # threads in a forward
        self._then: Callable[[], None] | None = None
        self.paused = int(unsupported() is not None)

    # Beginnings

    def begin(self, place: Place, args: Any, kwargs: Any) -> None:
        """Learn that the forward of a module begins."""
        state = self._state
        self._finish(failed=False)
        if backward_id() != NO_BACKWARD:  # a recomputation
            if place.role is ROOT and not self.paused:
                self._obstacles.recomputed()
            return
        if state.inside is not None and not self._goes_on(place):
            self.reset()  # an interrupt took the program out of the forward before this one, past every hook
        if state.inside is None:
            _reset_others()
        if state.inside is None and (self.paused or not torch.is_grad_enabled() or self._obstacles.hinder()):
            return
        frame = _Frame(place, sys.exception())
        if state.inside is None:
            self._begin_pass(alone=place.role is not ROOT)
        state.frames.append(frame)
        if place.role is GROUP:
            self._pause_outer()
            self._start_group(frame, tensors_in((args, kwargs)))
        self._resume()

    def _begin_pass(self, *, alone: bool) -> None:
        state = self._state
        current = state.current
        if not alone or current is None or not current.open:
            if current is not None and alone:
                self._learn(current)  # the end of a forward that is a loop of the program's own is seen only now
            state.owned = ModelTensors(self._root.module)
            course = ExecutionOrder(self._planner.expected)
            current = ModelPass(self._engine, course, self._planner.roles, GroupTensors(None, state.owned))
            state.current = current
        state.packer = Packer()
        state.between = current.packer_between()
        inside = saved_tensors_hooks(state.packer.pack, unpack)
        inside.__enter__()
        running.backends.append(self._engine.backend)
        _in_forward.trackers.append(self)
        state.inside = inside
        with self._engine.lock:
            self._at_work += 1

    def _start_group(self, frame: _Frame, inputs: Iterable[torch.Tensor]) -> None:
        state, place = self._state, frame.place
        assert state.current is not None
        assert state.owned is not None
        key = GroupKey(place.group, frame.part)
        owned = GroupTensors(place.module, state.owned)
        frame.layer = state.current.group_start(key, inputs, owned)

    def _pause_outer(self) -> None:
        """End the part of an outer group that has run so far, because an inner one begins."""
        state = self._state
        for frame in reversed(state.frames[:-1]):
            if frame.place.role is GROUP:
                if frame.layer is not None:
                    self._end_group(frame, ())
                    frame.part += 1
                return

    def _resume(self) -> None:
        """Let the innermost place have what is saved from here on."""
        state = self._state
        current = state.current
        assert current is not None
        if not state.frames or state.frames[-1].place.role is ROOT:
            assert state.between is not None
            state.packer.take_aside(state.between)
        elif state.frames[-1].place.role is KEPT:
            state.packer.take_aside(current.packer_withheld())
        else:
            frame = state.frames[-1]
            if frame.layer is None:  # it goes on, behind an inner one
                self._start_group(frame, ())
            assert frame.layer is not None
            state.packer.take_for(current, frame.layer)

    # Ends

    def end(self, place: Place, output: Any) -> None:
        """Learn that the forward of a module has ended, or was left by an exception."""
        state = self._state
        if state.inside is None or not any(frame.place is place for frame in state.frames):
            return
        if backward_id() != NO_BACKWARD:  # a recomputation, while the forward is in the same module
            return
        frame = state.frames.pop()
        while frame.place is not place:  # an interrupt passed over their hooks
            frame = state.frames.pop()
        failed = sys.exception() is not None and sys.exception() is not frame.handled
        current = state.current
        assert current is not None
        try:
            if failed:
                current.aborted = True
            if frame.layer is not None:
                self._end_group(frame, () if failed else list(tensors_in(output)))
            if state.frames and not failed:
                self._resume()
        finally:
            if not state.frames:
                self._leave(finished=place.role is ROOT and not failed)
                self._finish(failed)

    def _end_group(self, frame: _Frame, outputs: Sequence[torch.Tensor]) -> None:
        current, layer = self._state.current, frame.layer
        assert current is not None
        assert layer is not None
        frame.layer = None
        failed, current.aborted = current.aborted, True  # if what follows fails
        current.forward_end(layer)
        layer.owned.forget()
        layer.watch(outputs, current.backward_reached)
        current.aborted = failed

    def _leave(self, *, finished: bool) -> None:
        state = self._state
        current, inside = state.current, state.inside
        assert inside is not None
        assert current is not None
        state.inside = state.between = None
        state.packer.end()
        state.frames.clear()
        with self._engine.lock:
            self._at_work -= 1
        running.backends.pop()
        _in_forward.trackers.remove(self)
        inside.__exit__()
        if finished or (current.course.complete and not current.aborted):
            current.forward_done()
            self._learn(current)
            state.current = None

    def _learn(self, current: ModelPass[GroupKey]) -> None:
        if not current.aborted:
            sequence = tuple(current.course.arrived)
            self._planner.learn(sequence)
            self._done(current, sequence)

    def reset(self) -> None:
        """Leave a forward that nothing will end any more."""
        state = self._state
        if state.current is not None:
            state.current.aborted = True
        self._leave(finished=False)
        state.current = None

    def retire(self, then: Callable[[], None]) -> None:
        """Begin nothing any more, and call `then` as soon as no forward is under way that began before."""
        self.paused += 1
        self._then = then
        frames = self._state.frames
        if self._state.inside is not None and not (frames and self._calls(frames[0].place)):
            self.reset()  # an interrupt took the program out of it
        self._finish(failed=False)

    def _finish(self, failed: bool) -> None:
        """Do what waits for the last forward; hooks that run because of an exception must not go while they do."""
        if self._then is not None and not self._at_work and not failed:
            then, self._then = self._then, None
            then()
            self._engine.close()  # again: the last forward may have taken host memory since

    def runs(self) -> bool:
        """Whether the forward that was begun in this thread is still under way, as far as can be seen."""
        frames = self._state.frames
        return bool(frames) and self._calls(frames[0].place, unknown=1) > 0

    def _goes_on(self, place: Place) -> bool:
        """Whether a module that begins does so inside of the forward that was begun before."""
        if place.role is ROOT:
            return self._calls(place, 2) > 1  # only if the model runs inside itself
        frames = self._state.frames
        enough = 1 + bool(frames and frames[0].place is place)
        return bool(frames) and self._calls(frames[0].place, enough, unknown=2) >= enough

    def _calls(self, place: Place, enough: int = 1, unknown: int = 0) -> int:
        """Return how often a module's own call is on the stack, or `unknown` if compiled code called what runs.

        It is asked at the beginning of each group, and the stack may be deep; so nobody looks further than `enough`.
        """
        found = 0
        frame: FrameType | None = sys._getframe()
        call, hooks = Module._call_impl.__code__, place.module._forward_pre_hooks  # a replica shares them
        while frame is not None and found < enough:
            code = frame.f_code
            if code is call:
                found += frame.f_locals["self"]._forward_pre_hooks is hooks
            elif unknown and code.co_filename.endswith(COMPILED):
                return unknown
            frame = frame.f_back
        return found
