"""The context around each layer, the synchronization function over its output, the manual controller, the report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from .. import device as devices
from .._torch.autograd import SavedTensorHooks
from .._torch.tensors import leaves
from .._warnings import warn
from ..engine.eligibility import running, unwatch, watch
from ..engine.engine import Engine
from ..engine.hooks import Packer, unpack
from ..engine.layer import Layer, Phase
from ..engine.passes import Pass, pass_in_backward
from ..engine.statistics import Statistics, TimelineRecorder
from ..report.build import PassLog, build
from ..report.report import Report
from ..schedule.execution_order import GroupKey
from ..schedule.plan import Do, Plan

T = TypeVar("T")

UNPLANNED = "nothing is planned, and the program calls for each transfer"


class _Cursor(threading.local):
    """The current pass of one thread, and the layer that it is in or has just left."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.layer: Layer | None = None
        self.inside: SavedTensorHooks | None = None
        self.backends = 0  # length of `running.backends` outside of the context


class OffloadContext(ContextDecorator):
    """The context of `get_cpu_offload_context`: entered once for each layer, in the order of the forward.

    ``model_layers`` entries make a pass.  An unfinished pass ends when an exception leaves the context, when its
    backward has begun, or when its graph and its last output are freed; the next entry is then layer 0.  Each thread
    has its own passes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cursor = _Cursor()
        self._log = PassLog(_label)
        self._short: set[int] = set()  # numbers of layers of passes that had fewer than the plan
        self._warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadContext:
        # A copied model gets its own context, with its own passes and limit.
        return OffloadContext(replace(self._engine))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._engine.stream is not None:
            raise TypeError(
                "An offloading context with an offload_stream cannot be pickled: a stream belongs to its process. "
                "Make the context anew where it is loaded."
            )
        return _context, (self._engine.plan, self._engine.max_host_bytes)

    # Per layer

    def __enter__(self) -> OffloadContext:
        cursor = self._cursor
        if cursor.inside is not None:
            raise RuntimeError(
                "This offloading context was entered twice: leave the context of one layer before the next one "
                "begins, and do not nest it."
            )
        current, last = cursor.current, cursor.layer
        if current is None or not current.open:
            self._check_layers(current)
            current = Pass(self._engine)
            self._log.forward_begins(current)
        elif last is not None and not last.synchronized:
            raise RuntimeError(
                f"Layer {last.index} was left without its synchronization function: call sync_function(output) "
                "after each layer, before the context is entered again."
            )
        layer = current.forward_start()
        current.aborted = True  # until everything is installed
        cursor.backends = len(running.backends)
        packer = Packer()
        packer.take_for(current, layer)
        hooks = SavedTensorHooks(packer.pack, unpack)
        try:
            cursor.current, cursor.layer, cursor.inside = current, layer, hooks
            watch(layer.owned)
            hooks.install()
            running.backends.append(self._engine.backend)
            current.aborted = False
            return self
        except BaseException:  # Python calls __exit__ only if __enter__ returns
            self._uninstall()
            current.aborted = True
            raise

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:  # an interrupt before this line leaves the hooks: Python cannot prevent it
            cursor = self._cursor
            current, layer = cursor.current, cursor.layer
            if cursor.inside is None or current is None or layer is None:
                raise RuntimeError("This offloading context is left but was not entered; use it as `with context:`.")
            current.aborted = True  # also if what follows fails
            self._uninstall()
            current.forward_end(layer)
            current.aborted = kind is not None  # [guard: failed forward -> False]
        except BaseException:
            self._uninstall()
            raise

    def _uninstall(self) -> None:
        """Undo what `__enter__` installed; may be repeated after an interrupt."""
        cursor = self._cursor
        if cursor.inside is not None and cursor.layer is not None:
            cursor.inside.remove()
            del running.backends[cursor.backends :]
            unwatch(cursor.layer.owned)
            cursor.inside = None

    def synchronize(self, output: T) -> T:
        """Mark a layer's output as complete, and return it; the context's ``sync_function``.

        The output is a tensor, or any nesting of tuples, lists, mappings and dataclasses of tensors.  Raises a
        `RuntimeError` inside the context, before a layer was left, and for the second call after a layer.
        """
        cursor = self._cursor
        if cursor.inside is not None:
            raise RuntimeError(
                "The synchronization function was called inside the offloading context: leave the context first, "
                "then call sync_function(output)."
            )
        current, layer = cursor.current, cursor.layer
        if current is None or layer is None:
            raise RuntimeError(
                "The synchronization function was called before any layer ran: use `with context: x = layer(x)`, "
                "then sync_function(x)."
            )
        if layer.synchronized:
            raise RuntimeError(
                f"The synchronization function was called twice for layer {layer.index}: call it once after each "
                "layer, with all its outputs in a tuple if there are several."
            )
        layer.watch(list(leaves(output)), current.backward_reached)
        return output

    # Passes

    def _check_layers(self, last: Pass | None) -> None:
        """Warn, once, if passes have too few layers, and none with all has a backward of its own in between."""
        roles = self._engine.roles
        if last is None or last.aborted or not last.backward_begun or not roles.planned:
            return
        ran, expected = len(last.layers), roles.plan.model_layers
        if ran == expected:
            self._short.clear()  # [guard: early exits between whole passes]
            return
        if ran in self._short and not self._warned:  # one alone may be an early exit
            self._warned = True
            warn(
                f"Backward began after {ran} layer{'s' * (ran > 1)} of a pass, but model_layers is {expected}: layers "
                "are offloaded and reloaded at the wrong time, or for nothing. Set model_layers to the number of times "
                "that one forward enters the context. This is reported once."
            )
        self._short.add(ran)

    def new_pass(self) -> None:
        """Start a new pass: the next entry is layer 0.

        Only needed where a forward was abandoned between two layers and its tensors are still referenced, for instance
        by a stored traceback.
        """
        if self._cursor.inside is not None:
            raise RuntimeError("new_pass() was called inside the offloading context; leave the context first.")
        self._cursor.current = self._cursor.layer = None

    @property
    def current_pass(self) -> Pass | None:
        """The pass whose backward runs in the calling thread, else that of its last entry, else the latest of any."""
        latest = self._engine.latest
        return pass_in_backward(self._engine) or self._cursor.current or (None if latest is None else latest())

    @property
    def plan(self) -> Plan:
        """The actions at each event."""
        return self._engine.plan

    # What happened

    def statistics(self) -> Statistics:
        """Return counts and bytes since the context was created or `reset_statistics` was called."""
        return self._engine.statistics()

    def reset_statistics(self) -> None:
        """Reset all counts and sums; the peaks start from what is held now."""
        with self._engine.lock:
            self._engine.counters.reset()
        self._log.reset()

    @contextmanager
    def record_timeline(self) -> Iterator[TimelineRecorder]:
        """Record a ``with`` block, usually one step; ``timeline()`` of what it yields then returns a `Timeline`."""
        with self._log.record(self._engine) as recording:
            yield recording.recorder

    def report(self) -> Report:
        """Return what the latest pass with a backward did, layer by layer, with advice.

        Times, stalls, and the names of what else references offloaded memory need a step inside `record_timeline`.
        Raises a `RuntimeError` if no backward has begun since the context was created.
        """
        latest = self._log.full
        if latest is None:
            raise RuntimeError(
                "There is nothing to report yet: no backward has begun in this context. Run a training step first."
            )
        return build(
            latest,
            self.statistics(),
            self._log.recording,
            because="" if self._engine.roles.planned else UNPLANNED,
            context=True,
        )

    def trim(self) -> int:
        """Free pinned memory that no saved tensor uses now, as after a huge batch, and return the bytes freed."""
        return self._engine.trim()

    def close(self) -> None:
        """Free the pinned memory, that of captured graphs included; such graphs must not be replayed again.

        Buffers of passes in flight are freed with their graphs.  The context may be used again.
        """
        self._engine.close()


def _label(key: GroupKey) -> tuple[str, str]:
    return f"layer {key.group}", "layer"


def _context(plan: Plan, max_host_bytes: int | None) -> OffloadContext:
    return OffloadContext(Engine(plan, devices.backend(), max_host_bytes))


class ManualController:
    """Offloads, releases and reloads the activations of one layer at a time.

    A layer without calls stays on the device.  For the others the order is `start_offload_layer`,
    `release_activation_forward_gpu_memory`, `start_reload_layer`.  A released layer without a reload is reloaded when
    backward needs it, with a stall.

    Layer ids count the entries of the context in one forward, from 0.  They refer to `OffloadContext.current_pass`: in
    a hook that runs in backward, the pass of that backward; else the calling thread's latest.  `in_pass` is another
    pass in flight.  Each method raises `ValueError` if there is no such layer, and `RuntimeError` if the layer has not
    run, is still in its forward, or the call is out of order.

    Notes
    -----
    Names and meaning are those of the manual controller in Transformer Engine's PyTorch API.
    """

    def __init__(self, context: OffloadContext) -> None:
        self._context = context

    def start_offload_layer(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Queue the copies of a layer's activations to the host; each starts as soon as its tensor is ready."""
        self._do(Do.OFFLOAD, layer_id, in_pass)

    def release_activation_forward_gpu_memory(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Let the current stream wait for the copies of a layer, and free its device memory."""
        self._do(Do.RELEASE, layer_id, in_pass)

    def start_reload_layer(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Allocate device memory for a layer and queue the copies to it; backward waits for each tensor it uses."""
        self._do(Do.RELOAD, layer_id, in_pass)

    def _do(self, action: Do, layer_id: int, in_pass: Pass | None) -> None:
        call, expected, order = _CALLS[action]
        count = self._context.plan.model_layers
        if type(layer_id) is not int or not 0 <= layer_id < count:
            raise ValueError(
                f"{call}({layer_id!r}): there is no such layer; expected a layer id from 0 to {count - 1}."
            )
        target = in_pass or self._context.current_pass
        if target is None or layer_id >= len(target.layers):
            raise RuntimeError(
                f"{call}({layer_id}): layer {layer_id} has not run in this pass; call it after its forward."
            )
        with target.lock:
            layer = target.layers[layer_id]
            if layer.phase is not expected:
                raise RuntimeError(f"{call}({layer_id}): layer {layer_id} {layer.phase.value}; call it once, {order}.")
            target.do(action, layer_id)


# The method of each action, the phase that a layer must be in, and when that is.
_CALLS = {
    Do.OFFLOAD: (
        "start_offload_layer",
        Phase.SAVED,
        "after the layer's context was left and before the layer is released",
    ),
    Do.RELEASE: ("release_activation_forward_gpu_memory", Phase.OFFLOADING, "after start_offload_layer"),
    Do.RELOAD: ("start_reload_layer", Phase.RELEASED, "after release_activation_forward_gpu_memory"),
}
