"""Per-layer API with Transformer Engine's signature: `get_cpu_offload_context`, its context, and the controller."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, TypeVar

import torch

from . import device as devices
from ._arguments import check_kind, check_whole, number_of_bytes
from ._torch import unsupported
from ._torch.tensors import SavedTensorHooks, leaves
from ._warnings import warn
from .device import ReferenceDevice
from .engine.eligibility import module_calls, running
from .engine.engine import Engine
from .engine.hooks import Packer, unpack
from .engine.layer import Layer, Phase
from .engine.passes import Pass, pass_in_backward
from .engine.statistics import TimelineRecorder
from .report.build import Offloading, PassLog, build
from .report.report import Report
from .schedule.plan import Do, Plan
from .schedule.schedules import DefaultSchedule

__all__ = ["ManualController", "OffloadContext", "Pass", "get_cpu_offload_context"]

T = TypeVar("T")

UNPLANNED = "nothing is planned, and the program calls for each transfer"


class _Cursor(threading.local):
    """The current pass of one thread, and the layer that it is in or has just left."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.layer: Layer | None = None
        self.inside: SavedTensorHooks | None = None
        self.backends = 0  # length of `running.backends` outside of the context


class OffloadContext(Offloading, ContextDecorator):
    """The context of `get_cpu_offload_context`: entered once for each layer, in the order of the forward.

    ``model_layers`` entries make a pass.  An unfinished pass ends when an exception leaves the context, when its
    backward has begun, or when its graph and its last output are freed; the next entry is then layer 0.  Each thread
    has its own passes.  A disabled context does nothing, can be nested, and counts nothing.
    """

    def __init__(self, engine: Engine, *, enabled: bool = True) -> None:
        self._engine, self._enabled = engine, enabled
        self._cursor = _Cursor()
        self._log = PassLog(_label)
        self._logs = [self._log]
        self._short, self._warned = set[int](), False  # numbers of layers of passes that had fewer than the plan

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or loaded model gets its own context, with its own passes and limit.
        if self._engine.stream is not None:
            raise TypeError("An offloading context with an offload_stream cannot be copied or pickled: make a new one.")
        return _context, (self._engine.plan, self._engine.max_host_bytes, self._enabled)

    # Per layer

    def __enter__(self) -> OffloadContext:
        if not self._enabled:
            return self
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
            module_calls.watch(layer.owned)
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
            if not self._enabled:
                return
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
            module_calls.unwatch(cursor.layer.owned)
            cursor.inside = None

    def synchronize(self, output: T) -> T:
        """Mark a layer's output as complete, and return it; the context's ``sync_function``.

        The output is a tensor, or any nesting of tuples, lists, mappings and dataclasses of tensors.  Raises a
        `RuntimeError` inside the context, before a layer was left, and for the second call after a layer.
        """
        if not self._enabled:
            return output
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
        if last is None or last.aborted or not last.backward_begun or not self.plan.steps:
            return
        ran, expected = len(last.layers), self.plan.model_layers
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
        because = UNPLANNED if self.plan.manual else ""
        return build(latest, self.statistics(), self._log.recording, because=because)

    def close(self) -> None:
        """Free the pinned memory, that of captured graphs included; such graphs must not be replayed again.

        Buffers of passes in flight are freed with their graphs.  The context may be used again.
        """
        self._engine.close()


def _label(key: int) -> tuple[str, str]:
    return f"layer {key}", "layer"


def _context(plan: Plan, max_host_bytes: int | None, enabled: bool, stream: object = None) -> OffloadContext:
    backend = devices.backend() if enabled else ReferenceDevice()
    if enabled and stream is not None:
        backend.adopt(stream)  # raises if it is none
    return OffloadContext(Engine(plan, backend, max_host_bytes, stream), enabled=enabled)


class ManualController:
    """Offloads, releases and reloads the activations of one layer at a time.

    A layer without calls stays on the device.  For the others the order is `start_offload_layer`,
    `release_activation_forward_gpu_memory`, `start_reload_layer`.  A released layer without a reload is reloaded when
    backward needs it, with a stall.

    Layer ids count the entries of the context in one forward, from 0.  They refer to `OffloadContext.current_pass`: in
    a hook that runs in backward, the pass of that backward; else the calling thread's latest.  `in_pass` is another
    pass in flight.  Each method raises `ValueError` if there is no such layer, and `RuntimeError` if the layer has not
    run, is still in its forward, or the call is out of order.
    """

    def __init__(self, context: OffloadContext) -> None:
        self._context = context

    def start_offload_layer(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Queue the copies of a layer's activations to the host; each starts as soon as its tensor is ready."""
        when = "after the layer's context was left and before the layer is released"
        self._do(Do.OFFLOAD, "start_offload_layer", Phase.SAVED, when, layer_id, in_pass)

    def release_activation_forward_gpu_memory(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Let the current stream wait for the copies of a layer, and free its device memory."""
        call = "release_activation_forward_gpu_memory"
        self._do(Do.RELEASE, call, Phase.OFFLOADING, "after start_offload_layer", layer_id, in_pass)

    def start_reload_layer(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Allocate device memory for a layer and queue the copies to it; backward waits for each tensor it uses."""
        when = "after release_activation_forward_gpu_memory"
        self._do(Do.RELOAD, "start_reload_layer", Phase.RELEASED, when, layer_id, in_pass)

    def _do(self, action: Do, call: str, expected: Phase, when: str, layer_id: int, in_pass: Pass | None) -> None:
        if not self._context._enabled:
            return
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
                raise RuntimeError(f"{call}({layer_id}): layer {layer_id} {layer.phase.value}; call it once, {when}.")
            target.do(action, layer_id)


# The function


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.Stream | None = None,
    *,
    max_host_bytes: int | str | None = None,
) -> tuple[Any, ...]:
    """Return a context and a synchronization function that offload the activations of a sequential model.

    Parameters
    ----------
    enabled : bool
        False returns objects that do nothing.
    num_layers : int, optional
        Number of layers to offload, from the first.  Not used with manual synchronization, where it may be None.
    model_layers : int
        How many times the context is entered in one forward of the model.
    offload_activations, offload_weights, double_buffering : bool
        Deprecated.  ``offload_activations=False`` is the same as ``enabled=False``; the others have no effect.
    manual_synchronization : bool
        Only the calls of the `ManualController`, which is returned as well, offload.
    retain_pinned_cpu_buffers : bool
        Without effect: pinned memory is always kept, until the context is closed or dropped.
    offload_stream : torch.Stream, optional
        The stream for all transfers, with manual synchronization only.
    max_host_bytes : int or str, optional
        Largest amount of pinned host memory to hold for each device: bytes, or text such as ``"64GiB"``.  What does not
        fit stays on the device, with one warning.

    Returns
    -------
    context : OffloadContext
        Entered once for each layer.
    sync_function : callable
        `OffloadContext.synchronize`: takes the output of a layer, any nesting of tensors, and returns it.
    controller : ManualController
        Only with ``manual_synchronization=True``.

    Raises
    ------
    ValueError
        If `num_layers` is not smaller than `model_layers`, or `offload_stream` is given without manual
        synchronization.

    Warns
    -----
    UserWarning
        If ``num_layers == model_layers - 1``, so that no copy overlaps with compute; later, if `model_layers` is wrong.

    Examples
    --------
    >>> layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
    >>> context, sync_function = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    >>> x = torch.randn(1024, 512, requires_grad=True) * 1.0
    >>> for layer in layers:
    ...     with context:
    ...         x = layer(x)
    ...     x = sync_function(x)
    >>> x.sum().backward()
    >>> context.statistics().bytes_offloaded
    2097152
    """
    check_kind(
        bool,
        "True or False",
        enabled=enabled,
        offload_activations=offload_activations,
        offload_weights=offload_weights,
        double_buffering=double_buffering,
        manual_synchronization=manual_synchronization,
        retain_pinned_cpu_buffers=retain_pinned_cpu_buffers,
    )
    for asked, text in (
        (offload_weights, "offload_weights=True has no effect: weights stay on the device"),
        (double_buffering, "double_buffering=True has no effect: buffers are reused by themselves"),
        (not offload_activations, "offload_activations=False offloads nothing: use enabled=False"),
    ):
        if asked:
            warnings.warn(f"{text}.", DeprecationWarning, stacklevel=2)
    if offload_stream is not None and not manual_synchronization:
        raise ValueError(
            "offload_stream was given without manual_synchronization=True; the default schedule has streams of "
            "its own. Leave it out, or set manual_synchronization=True."
        )
    host_bytes = number_of_bytes("max_host_bytes", max_host_bytes, optional=True)
    problem = unsupported() if enabled and offload_activations else None
    if problem is not None:
        warnings.warn(problem, UserWarning, stacklevel=2)
    enabled = enabled and offload_activations and problem is None
    if enabled:
        check_whole(model_layers=model_layers, least=1)
    if not enabled:
        plan = Plan(1)
    elif manual_synchronization:
        plan = Plan(model_layers, manual=True)
    else:
        check_whole(num_layers=num_layers)
        assert num_layers is not None
        schedule = DefaultSchedule(num_layers, model_layers)
        if not schedule.overlaps:
            warnings.warn(
                f"num_layers={num_layers} of model_layers={model_layers} leaves one resident layer: every copy waits "
                "for compute and compute for every copy. Offload at most model_layers - 2 layers.",
                UserWarning,
                stacklevel=2,
            )
        plan = schedule.plan()
    context = _context(plan, host_bytes, enabled, offload_stream)
    if manual_synchronization:
        return context, context.synchronize, ManualController(context)
    return context, context.synchronize
