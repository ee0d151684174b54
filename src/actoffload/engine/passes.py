"""One pass: one forward of the model and the backward that belongs to it.

A pass belongs to its graph and ends when that is freed.  Several may be in flight, in any order.

`[Note: between the groups]`  What is saved while no group runs is kept on the device, and so is what a module named in
`keep` saves.  Its storages are followed as well: copying them for a group would free nothing.  Inputs of a group
are an exception.  Checkpointing saves them just before the module runs (without reentrant autograd) or just after
(with it), and they are all that a checkpointed group saves.  So what was saved between two groups, and is an input of
the group that starts, is offloaded with that group.  What is saved after groups that built no graph, and was an input
of one of them, is offloaded with the last of them: a checkpointed region may hold several groups, and backward comes
to the last one first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .._torch.modules import NOT_COMPILED, opaque
from .._torch.subclasses import plain_parts
from .._torch.tensors import NO_BACKWARD, address, after_backward, backward_id, stands_for_another
from ..device.base import Backend
from ..schedule.orders import When
from ..schedule.plan import OUTSIDE, Do, Plan
from ..schedule.schedules import ExecutionOrder
from ..schedule.timeline import Kind
from .eligibility import ModuleTensors, StorageRef
from .engine import Engine
from .layer import Layer, Phase, StorageRegistry, queue_copies, reload
from .layout import View
from .statistics import Counters, Reason
from .storage import Residency, SavedStorage


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
class _LayerEnd:
    """The hook where backward leaves a layer for its input: ends the recorded span."""

    owner: weakref.ref[Pass]
    index: int

    def __call__(self, gradients: Any) -> None:
        owner = self.owner()
        if owner is not None:
            with owner.lock:
                owner._finish(Kind.BACKWARD, self.index)


opaque(_LayerEnd.__call__, NOT_COMPILED)


class Pass:
    """One forward and its backward: `OffloadContext.current_pass`, and `in_pass` of the `ManualController`."""

    def __init__(self, engine: Engine, plan: Plan | None = None) -> None:
        self.engine = engine
        self.backend: Backend = engine.backend
        self.counters: Counters = engine.counters
        self.lock = engine.lock
        self.layers: list[Layer] = []
        self.aborted = False
        self.backward_begun = False
        self.plan = engine.plan if plan is None else plan
        self.registry = StorageRegistry(engine)
        self.forward_ended: Callable[[Pass], None] | None = None  # called when backward begins, with the lock
        # Called at each event of a layer, with the lock, before what happens there.
        self.observer: Callable[[When, int], None] | None = None
        self._backwards: dict[int, _Backward] = {}  # those that run, by autograd's id
        self._reached: set[int] = set()  # layers that one of them, or one that overlapped with them, has started
        with engine.lock:
            engine.counters.passes += 1
            engine.latest = weakref.ref(self)

    # Forward

    @property
    def open(self) -> bool:
        """Whether the next layer that starts belongs to this pass."""
        if self.aborted or self.backward_begun or self.complete:
            return False
        return not self.layers or self.layers[-1].continues

    @property
    def complete(self) -> bool:
        """Whether the last layer has started."""
        return len(self.layers) >= self.plan.model_layers

    def forward_start(self) -> Layer:
        """Begin the forward of the next layer."""
        layer = Layer(len(self.layers), self.backend.capturing())
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
            layer.count_kept(self.counters)
            self._finish(Kind.FORWARD, layer.index)
            self._event(When.FORWARD_END, layer.index)

    def layer_of(self, layer: Layer, tensor: torch.Tensor) -> Layer:
        """Return the layer that saves a tensor: the current one."""
        return layer

    def follow(self, plan: Plan) -> None:
        """Go on by another plan; what it would have done before now is done now, as far as it still applies."""
        with self.lock:
            self.plan = plan
            for layer in self.layers:
                for when in (When.FORWARD_START, When.FORWARD_END):
                    for action in plan.at(when, layer.index):
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
                reload([storage], self.layers[min(storage.layers)], on_demand=True)
            tensor = storage.fetch(view, probe, index, captured)
            if self.engine.recorder is not None:
                self.engine.recorder.level(outside=index == OUTSIDE)
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
            # One that is freed has ended in an earlier call of a backward in parts.
            for k in range(len(self.layers) - 1, index, -1):
                layer = self.layers[k]
                if k not in backward.ended and (k in backward.started or layer.freed):
                    backward.ended.add(k)
                    if not self._needed(k, backward):
                        layer.evict()  # [guard: release at the end of a backward]
                    self._finish(Kind.BACKWARD, k)
                    self._event(When.BACKWARD_END, k)
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
        running = self.engine.in_backward
        running[task] = weakref.ref(self, partial(running.pop, task))
        # A gradient that is taken inside a layer does not end the forward.
        # [guard: forward that continues after its backward]
        # [guard: gradient inside a layer -> True]
        self.backward_begun = self.layers[-1].phase is not Phase.FORWARD
        after_backward(ended)
        if self.backward_begun and self.forward_ended is not None:
            self.forward_ended(self)
        return backward

    def _end_backward(self, backward: _Backward) -> None:
        """End a backward: what a retained graph needs, and no other backward, stays on the host alone."""
        for k in sorted(backward.started - backward.ended, reverse=True):
            self._finish(Kind.BACKWARD, k)
        del self._backwards[backward.task]
        self.engine.in_backward.pop(backward.task, None)
        reached = backward.started if self._backwards else self._reached
        # A freed graph does not need its layers again; what it has prefetched is for the next part of the backward.
        retained = any(self.layers[k].living() for k in reached)
        for layer in self.layers:
            if self._needed(layer.index, backward):  # [guard: layer of another backward]
                continue
            # [guard: release after the backward of a retained graph -> removed]
            if layer.index in reached or retained:
                layer.evict()
        if not self._backwards:
            self._reached.clear()

    def _needed(self, index: int, backward: _Backward) -> bool:
        """Whether another backward than this one runs and has not ended a layer."""
        return any(other is not backward and index not in other.ended for other in self._backwards.values())

    # Events

    def _event(self, when: When, index: int) -> None:
        recorder = self.engine.recorder
        if recorder is not None:
            recorder.level()
        if self.observer is not None:
            self.observer(when, index)
        for action in self.plan.at(when, index):
            if action.layer < len(self.layers):
                self.do(action.do, action.layer)
                if recorder is not None:
                    recorder.level()
        if recorder is not None:
            recorder.level()
            if when is When.FORWARD_START:
                recorder.begin(self, Kind.FORWARD, index)
            elif when is When.BACKWARD_START:
                recorder.begin(self, Kind.BACKWARD, index)

    def do(self, action: Do, index: int) -> None:
        """Carry out one action on a layer; what does not apply any more is passed over."""
        layer = self.layers[index]
        if action is Do.OFFLOAD and layer.phase is Phase.FORWARD:
            layer.eager = True
        elif action is Do.OFFLOAD and layer.phase is Phase.SAVED:
            self.registry.refused(layer.offload())
        elif action is Do.RELEASE and layer.phase is Phase.OFFLOADING:
            layer.release()
        elif action is Do.RELOAD and layer.phase is Phase.RELEASED:
            layer.reload()

    def _finish(self, kind: Kind, index: int) -> None:
        if self.engine.recorder is not None:
            self.engine.recorder.finish(self, kind, index)


def pass_in_backward(engine: Engine) -> Pass | None:
    """Return the pass of an engine whose backward runs in this thread."""
    ref = engine.in_backward.get(backward_id())
    return None if ref is None else ref()


# A pass of a model


class ModelPass(Pass):
    """State of one pass through a model; `plan_for` returns the plan for a sequence of groups."""

    def __init__(
        self,
        engine: Engine,
        order: ExecutionOrder,
        plan_for: Callable[[tuple[int, ...]], Plan],
        owned: ModuleTensors,
        *,
        partly: bool = False,
    ) -> None:
        self._plan_for = plan_for
        self.order = order
        # What is saved between the groups, and what modules save whose tensors are kept
        self.between, self.withheld = (Layer(OUTSIDE, engine.backend.capturing()) for _ in range(2))
        self.between.owned = self.withheld.owned = owned
        self.withheld.kept, self.withheld.small = self.between.kept, self.between.small
        self.inputs: frozenset[int] = frozenset()  # addresses of those of the model, which the caller may hold
        self._inputs: dict[int, StorageRef] = {}  # of the groups that built no graph, since the last that did
        self._region_saved = False  # what checkpointed them has saved them
        self.adopted = 0  # bytes saved between the groups that are offloaded with one of them
        self.partly = partly  # only what offloaded groups save is seen
        self.model: Hashable = None  # which of several models of the engine this is a pass of
        super().__init__(engine, plan_for(order.sequence))

    @property
    def complete(self) -> bool:
        """Whether the last group that is expected has started."""
        return self.order.complete

    def take_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note what the model is called with."""
        self.inputs = frozenset(address(memory) for tensor in inputs for memory in _storages(tensor))

    def group_start(self, key: int, inputs: Iterable[torch.Tensor], owned: ModuleTensors) -> Layer:
        """Begin the forward of a group, whose module is called with `inputs` and owns `owned`."""
        if not self.order.start(key):
            plan = self._plan_for(self.order.sequence)
            if plan is not self.plan:
                self.follow(plan)
        layer = self.forward_start()
        layer.owned = owned
        if self.engine.recorder is not None:
            # Autograd runs what was computed before a layer after all of the layer.
            inputs, hook = list(inputs), _LayerEnd(weakref.ref(self), layer.index)
            for node in {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}:
                node.register_prehook(hook)  # [guard: recorded end of a backward]
        graph = torch.is_grad_enabled()
        if graph or self._region_saved:
            self._inputs = {}
            self._region_saved = False
        if self.between.storages or not graph:
            storages = [memory for tensor in inputs for memory in _storages(tensor)]
            # A group that stays, as do all that follow, has no use for them.
            leaves = layer.index <= self.plan.last_leaving
            self._adopt(layer, {address(memory) for memory in storages} if leaves else set())
            if not graph:
                self._inputs |= {address(memory): StorageRef(memory) for memory in storages}
        return layer

    def _adopt(self, layer: Layer, addresses: set[int]) -> None:
        """Count inputs of a group that were saved before as saved by it; see [Note: between the groups]."""
        with self.lock:
            for address in addresses:
                storage = self.registry.at(address)
                if storage is not None and storage in self.between.living():
                    storage.layers.pop(OUTSIDE, None)  # [guard: input of a group that was saved between the groups]
                    storage.layers[layer.index] = storage.residency is Residency.HOST
                    self.adopted += storage.nbytes
                    layer.storages += [ref for ref in self.between.storages if ref() is storage]
                    if layer.eager:
                        self.registry.refused(queue_copies([storage], layer.index, layer.captured, ended=False))
            self._count_outside()

    def _count_outside(self) -> None:
        for layer, reason in ((self.between, Reason.OUTSIDE), (self.withheld, Reason.KEPT)):
            for storage in layer.living():
                if OUTSIDE in storage.layers:
                    layer.note(reason, storage.nbytes)
            layer.storages.clear()

    @property
    def kept_outside(self) -> dict[Reason, list[int]]:
        """Count and bytes of what was kept, and not saved by a group, by reason."""
        return {reason: count for reason, count in self.between.kept.items() if count[0]}

    def forward_done(self) -> None:
        """End the forward of the model: from here on the plan is that of what really ran."""
        with self.lock:
            self._count_outside()
            self.between.count_kept(self.counters)
            self._inputs = {}
            if not self.order.complete and self.order.started:
                self.follow(self._plan_for(tuple(self.order.started)))
            # A plan may release in backward, which may be captured apart from this forward; see [Note: capture].
            offloading = [layer for layer in self.layers if layer.phase is Phase.OFFLOADING]
            if offloading and self.backend.capturing():  # [guard: copies of a captured forward]
                for layer in offloading:
                    layer.release()

    def layer_of(self, layer: Layer, tensor: torch.Tensor) -> Layer:
        """Return the group that has just ended, if a tensor was an input of it, or of others without a graph before."""
        ref = self._inputs.get(address(tensor.untyped_storage())) if layer is self.between else None
        if ref is None or ref.expired:
            return layer
        self._region_saved = True  # [guard: region that has saved its inputs]
        self.adopted += tensor.nbytes
        return self.layers[-1]


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return where the data of an input is; nothing of one that only stands for others, as in `torch.vmap`."""
    if stands_for_another(tensor):
        return []
    return [
        part.untyped_storage()
        for part in plain_parts(tensor)
        if type(part) is torch.Tensor and part.layout is torch.strided and not part.is_nested
    ]
