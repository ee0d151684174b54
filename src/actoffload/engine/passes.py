"""One pass: one forward of the model and the backward that belongs to it.

A pass belongs to its graph and ends when that is freed.  Several may be in flight, in any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .._torch.autograd import NO_BACKWARD, after_backward, backward_id
from .._torch.compiling import NOT_COMPILED, opaque
from ..device.base import Backend
from ..schedule.plan import OUTSIDE, Do, Roles, When
from ..schedule.timeline import Kind
from .engine import Engine
from .layer import Layer, Phase
from .layout import View
from .pack import Pack, Packer
from .registry import StorageRegistry
from .reload import Residency, reload
from .statistics import Counters
from .storage import SavedStorage

__all__ = ["Pass", "latest_pass", "pass_in_backward"]


@dataclass(slots=True, eq=False)
class _Backward:
    """State of one backward in one pass."""

    task: int
    captured: bool  # into a graph
    # What autograd calls at the end.  Autograd drops it when an exception ends the backward.
    callback: weakref.ref[Callable[[], None]] = field(init=False)
    started: set[int] = field(default_factory=set)  # layers
    ended: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Left:
    """The hook where backward leaves a layer for its input: ends the recorded span."""

    of: weakref.ref[Pass]
    index: int

    def __call__(self, gradients: Any) -> None:
        of = self.of()
        if of is not None:
            with of.lock:
                of._finish(Kind.BACKWARD, self.index)


opaque(_Left.__call__, NOT_COMPILED)


class Pass:
    """One forward and its backward: `OffloadContext.current_pass`, and `in_pass` of the `ManualController`."""

    # Whether all layers came as the plan expects them; otherwise a kept layer may have to be offloaded after all.
    settled = True

    def __init__(self, engine: Engine, roles: Roles | None = None) -> None:
        self.engine = engine
        self.backend: Backend = engine.backend
        self.counters: Counters = engine.counters
        self.lock = engine.lock
        self.layers: list[Layer] = []
        self.aborted = False
        self.backward_begun = False
        self.roles = engine.roles if roles is None else roles
        self.registry = StorageRegistry(engine)
        self.forward_ended: Callable[[Pass], None] | None = None  # called when backward begins, with the lock
        # Called at each event of a layer, with the lock, before what happens there.
        self.observer: Callable[[When, int], None] | None = None
        # What backward has used, by layer and place in its order of saving; only while it is a set.
        self.used: set[tuple[int, int]] | None = None
        self._backwards: dict[int, _Backward] = {}  # those that run, by autograd's id
        self._reached: set[int] = set()  # layers that one of them, or one that overlapped with them, has started
        with engine.lock:
            engine.counters.passes += 1
            _latest[engine] = weakref.ref(self)

    # Forward

    @property
    def open(self) -> bool:
        """Whether the next layer that starts belongs to this pass."""
        if self.aborted or self.backward_begun or len(self.layers) >= self.roles.plan.model_layers:
            return False
        return not self.layers or self.layers[-1].continues

    def forward_start(self) -> Layer:
        """Begin the forward of the next layer."""
        layer = Layer(len(self.layers), self.backend.capturing())
        layer.releases_incrementally = layer.index in self.roles.released_incrementally
        layer.layouts = self.engine.layouts.setdefault(layer.index, {})
        with self.lock:
            self.layers.append(layer)
            self.aborted = True  # until the forward has begun
            self._event(When.FORWARD_START, layer.index)
            self.aborted = False
        return layer

    def forward_end(self, layer: Layer) -> None:
        """End the forward of a layer."""
        with self.lock:
            self.registry.refused(layer.end())
            layer.releasing = None
            for reason, (count, nbytes) in layer.kept.items():
                self.counters.keep(reason, nbytes, count)
            self._finish(Kind.FORWARD, layer.index)
            self._event(When.FORWARD_END, layer.index)

    def record_inputs(self, layer: Layer, inputs: Iterable[torch.Tensor]) -> None:
        """Let the recorded backward of a layer end where the gradient of an input is complete.

        Autograd runs what was computed before a layer after all of the layer.
        """
        hook = _Left(weakref.ref(self), layer.index)
        for node in {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}:
            node.register_prehook(hook)  # [guard: recorded end of a backward]

    def packer(self, layer: Layer) -> Pack:
        """Return the pack hook of a layer: it takes each tensor that autograd saves."""
        packer = Packer()
        packer.take_for(self, layer)
        return packer.pack

    def follow(self, roles: Roles) -> None:
        """Go on by another plan, whose layers are those of this pass so far and what is now expected to come.

        What the new plan would have done before now is done now, as far as it still applies.
        """
        with self.lock:
            self.roles = roles
            for layer in self.layers:
                layer.releasing = None
                for when in (When.FORWARD_START, When.FORWARD_END):
                    for action in roles.plan.at(when, layer.index):
                        late = action.do is Do.OFFLOAD and self.layers[action.layer].phase is Phase.SAVED
                        if late or action.do is Do.RELEASE:
                            self.do(action.do, action.layer)

    # Backward

    def fetch(self, index: int, storage: SavedStorage, view: View, probe: torch.Tensor) -> torch.Tensor:
        """Return a tensor that a layer saved, on the device; the unpack hook."""
        task = backward_id()
        if index == OUTSIDE:
            index = min(storage.layers)  # the layer with which it is offloaded, if there is one
        backward = self._backwards.get(task)
        if index != OUTSIDE and (backward is None or index not in backward.started):
            self.backward_reached(index)
            backward = self._backwards.get(task)
        # A node's saved tensors may be read outside of any backward, inside or outside of a capture.
        captured = self.backend.capturing() if backward is None else backward.captured
        with self.lock:
            if storage.residency is Residency.HOST:
                reload([storage], index, on_demand=True)
                first = self.layers[min(storage.layers)]
                first.on_demand += 1
                first.bytes_reloaded += storage.bytes_copied
            if self.used is not None and index != OUTSIDE:
                self.used.update((k, self.layers[k].place_of(storage)) for k in storage.layers if k != OUTSIDE)
            tensor = storage.fetch(view, probe, index, captured)
            if self.engine.recorder is not None:
                self.engine.recorder.level()
            return tensor

    def backward_reached(self, index: int) -> None:
        """Note that backward has come to the start of a layer, or uses something that it saved."""
        task = backward_id()
        if task == NO_BACKWARD:  # a node's saved tensors are read outside of any backward
            return
        backward = self._backwards.get(task)
        if backward is not None and index in backward.started:
            return
        with self.lock:
            if backward is None:
                for other in [other for other in self._backwards.values() if other.callback() is None]:
                    self._end_backward(other)  # an exception ended it
                backward = self._begin_backward(task)
            self._end_behind(backward, index)
            backward.started.add(index)
            self._reached.add(index)
            self._event(When.BACKWARD_START, index)

    def _begin_backward(self, task: int) -> _Backward:
        backward = _Backward(task, self.backend.capturing())

        def ended() -> None:
            with self.lock:
                if self._backwards.get(task) is backward:
                    self._end_backward(backward)

        backward.callback = weakref.ref(ended)
        self._backwards[task] = backward
        # After an exception nothing is called; the entry is removed with its pass, see [Note: finalizers].
        key = self.engine.number, task
        _in_backward[key] = weakref.ref(self, partial(_in_backward.pop, key))
        # A gradient that is taken inside a layer does not end the forward.
        # [guard: forward that continues after its backward]
        # [guard: gradient inside a layer -> True]
        self.backward_begun = self.layers[-1].phase is not Phase.FORWARD
        after_backward(ended)
        if self.backward_begun and self.forward_ended is not None:
            self.forward_ended(self)
        return backward

    def _end_backward(self, backward: _Backward) -> None:
        """End a backward: what it reloaded and a retained graph still needs stays on the host alone.

        The tensors of a layer stay on the device while another backward has not ended that layer.  The last of several
        backwards that overlap frees what they have left.
        """
        for k in sorted(backward.started - backward.ended, reverse=True):
            self._finish(Kind.BACKWARD, k)
        del self._backwards[backward.task]
        _in_backward.pop((self.engine.number, backward.task), None)
        reached = backward.started if self._backwards else self._reached
        # A freed graph does not need its layers again; what it has prefetched is for the next part of the backward.
        retained = any(self.layers[k].living() for k in reached)
        for layer in self.layers:
            if self._needed(layer.index, backward):  # [guard: layer of another backward]
                continue
            # [guard: release after the backward of a retained graph -> removed]
            if layer.index in reached:
                layer.backward_done()
            elif retained:  # [guard: reload ahead for the next part of a backward -> True]
                layer.evict()
        if not self._backwards:
            self._reached.clear()

    def _needed(self, index: int, backward: _Backward) -> bool:
        """Whether another backward than this one runs and has not ended a layer."""
        return any(other is not backward and index not in other.ended for other in self._backwards.values())

    def _end_behind(self, backward: _Backward, index: int) -> None:
        """End the backward of every layer behind one; a freed one ended in an earlier call of a backward in parts."""
        for k in range(len(self.layers) - 1, index, -1):
            layer = self.layers[k]
            if k not in backward.ended and (k in backward.started or layer.freed):
                backward.ended.add(k)
                if not self._needed(k, backward):
                    layer.backward_done()
                self._finish(Kind.BACKWARD, k)
                self._event(When.BACKWARD_END, k)

    # Events

    def _event(self, when: When, index: int) -> None:
        recorder = self.engine.recorder
        if recorder is not None:
            recorder.before_actions()
        if self.observer is not None:
            self.observer(when, index)
        for action in self.roles.actions.get((when._name_, index), ()):
            if action.layer < len(self.layers):
                self.do(action.do, action.layer, index)
                if recorder is not None:
                    recorder.level()
        if recorder is not None:
            recorder.level()
            if when is When.FORWARD_START:
                recorder.begin(self, Kind.FORWARD, index)
            elif when is When.BACKWARD_START:
                recorder.begin(self, Kind.BACKWARD, index)

    def do(self, action: Do, index: int, at: int = -1) -> None:
        """Carry out one action on a layer, at an event of another; what does not apply any more is passed over."""
        layer = self.layers[index]
        if action is Do.OFFLOAD and layer.phase is Phase.FORWARD:
            layer.eager = True
        elif action is Do.OFFLOAD and layer.phase is Phase.SAVED:
            self.registry.refused(layer.offload())
        elif action is Do.INCREMENTAL_RELEASE and layer.phase is Phase.OFFLOADING:
            self.layers[at].releasing = layer
        elif action is Do.RELEASE and layer.phase is Phase.OFFLOADING:
            layer.release()
        elif action is Do.RELOAD and layer.phase is Phase.RELEASED:
            layer.reload()

    def _finish(self, kind: Kind, index: int) -> None:
        if self.engine.recorder is not None:
            self.engine.recorder.finish(self, kind, index)


_in_backward: dict[tuple[int, int], weakref.ref[Pass]] = {}  # by the numbers of the engine and of the backward
_latest: weakref.WeakKeyDictionary[Engine, weakref.ref[Pass]] = weakref.WeakKeyDictionary()


def pass_in_backward(engine: Engine) -> Pass | None:
    """Return the pass of an engine whose backward runs in this thread."""
    ref = _in_backward.get((engine.number, backward_id()))
    return None if ref is None else ref()


def latest_pass(engine: Engine) -> Pass | None:
    """Return the latest pass of an engine that any thread began, if it still exists."""
    ref = _latest.get(engine)
    return None if ref is None else ref()
