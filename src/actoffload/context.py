"""Front door 1: a context around each layer and a function over its output."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from . import device as devices
from .controller import ManualController
from .disabled import NoController, NoOffloadContext
from .engine.engine import Engine
from .engine.layer import Layer
from .engine.owned import unwatch, watch
from .engine.passes import Pass
from .engine.saved import unpack
from .engine.state import running
from .observe.counters import Statistics
from .observe.recorder import TimelineRecorder
from .outputs import tensors_in
from .schedule.default import DefaultSchedule
from .schedule.plan import Plan

__all__ = ["OffloadContext", "get_cpu_offload_context"]

T = TypeVar("T")


class _Cursor(threading.local):
    """Where one thread is in a context: its current pass, and the layer that it is in or has just left."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.layer: Layer | None = None
        self.inside: saved_tensors_hooks | None = None


class OffloadContext(ContextDecorator):
    """The context of `get_cpu_offload_context`: entered once for each layer, in the order of the forward.

    ``model_layers`` entries make a pass.  A pass that is not finished is given up when an exception leaves the
    context, when its backward has begun, or when its graph and its last output are gone; the next entry is then
    layer 0 again.  Each thread has passes of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cursor = _Cursor()

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadContext:
        # A model that is copied with its context gets one of its own: passes and host memory are not shared.
        return OffloadContext(self._engine.fresh())

    def __reduce__(self) -> tuple[Any, ...]:
        return _context, self._engine.portable

    # Per layer

    def __enter__(self) -> OffloadContext:
        cursor = self._cursor
        if cursor.inside is not None:
            raise RuntimeError(
                "This offloading context was entered twice: leave the context of one layer before the next one "
                "begins, and do not nest it."
            )
        current, layer = self._next_layer(cursor)
        current.aborted = True  # until everything is installed
        hooks = saved_tensors_hooks(current.packer(layer), unpack)
        hooks.__enter__()
        watch(layer.owned)
        running.backends.append(self._engine.backend)
        cursor.current, cursor.layer, cursor.inside = current, layer, hooks
        current.aborted = False
        return self

    def _next_layer(self, cursor: _Cursor) -> tuple[Pass, Layer]:
        current, last = cursor.current, cursor.layer
        if current is None or not current.open:
            current = Pass(self._engine)
        elif last is not None and not last.synchronized:
            raise RuntimeError(
                f"Layer {last.index} was left without its synchronization function: call sync_function(output) "
                "after each layer, before the context is entered again."
            )
        return current, current.forward_start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cursor = self._cursor
        hooks, current, layer = cursor.inside, cursor.current, cursor.layer
        if hooks is None or current is None or layer is None:
            raise RuntimeError("This offloading context is left but was not entered; use it as `with context:`.")
        cursor.inside = None
        running.backends.pop()
        unwatch(layer.owned)
        hooks.__exit__()
        current.aborted = True  # also if what follows fails
        current.forward_end(layer)
        current.aborted = kind is not None

    def synchronize(self, output: T) -> T:
        """Tell that a layer's output is complete, and return it; the context's ``sync_function``.

        Parameters
        ----------
        output : torch.Tensor or nested tuple, list, mapping or dataclass of them
            What the layer returned.  Outputs that need no gradient are fine.

        Returns
        -------
        output
            The same object.

        Raises
        ------
        RuntimeError
            If no layer was left before, the context has not been left yet, or the layer was synchronized already.
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
        layer.watch(list(tensors_in(output)), current.backward_reached)
        return output

    # Passes

    def new_pass(self) -> None:
        """Let the next entry be layer 0 of a new pass, whatever came before.

        Only needed where a forward was given up between two layers and its tensors are still held, for instance
        by the traceback of an exception that was kept.
        """
        if self._cursor.inside is not None:
            raise RuntimeError("new_pass() was called inside the offloading context; leave the context first.")
        self._cursor.current = self._cursor.layer = None

    @property
    def current_pass(self) -> Pass | None:
        """The pass whose backward runs in the calling thread, else that of its last entry, else the latest of any.

        Backward runs on threads of autograd's own, so a hook sees the pass that it belongs to.
        """
        return self._engine.pass_in_backward() or self._cursor.current or self._engine.latest_pass()

    @property
    def plan(self) -> Plan:
        """What is done at which event."""
        return self._engine.plan

    # What happened

    def statistics(self) -> Statistics:
        """Return counts and bytes since the context was made or `reset_statistics` was called."""
        with self._engine.lock:
            pools = [transfers.pool for transfers in self._engine.all_transfers]
            for pool in pools:
                pool.settle()
            return self._engine.counters.snapshot(
                host_bytes=sum(pool.bytes_held for pool in pools),
                host_bytes_used=sum(pool.bytes_taken for pool in pools),
                host_bytes_high_water=sum(pool.high_water for pool in pools),
            )

    def reset_statistics(self) -> None:
        """Start all counts and sums anew, and the peaks from what is held now."""
        with self._engine.lock:
            self._engine.counters.reset()

    @contextmanager
    def record_timeline(self) -> Iterator[TimelineRecorder]:
        """Record what happens in a ``with`` block, usually one step, as a timeline.

        Yields
        ------
        TimelineRecorder
            Its ``timeline()`` gives a `Timeline` once the block is left.
        """
        recorder = TimelineRecorder(self._engine.backend, self._engine.counters)
        self._engine.record(recorder)
        try:
            yield recorder
            recorder.level()
        finally:
            self._engine.record(None)

    def close(self) -> None:
        """Give the host memory back, that of captured graphs included; such graphs must not be replayed again.

        Buffers of passes that are still in flight are freed when their graphs are.  The context can be used on;
        it takes new memory then.
        """
        with self._engine.lock:
            for transfers in self._engine.all_transfers:
                transfers.pool.close()


def _context(plan: Plan, max_host_bytes: int | None) -> OffloadContext:
    return OffloadContext(Engine(plan, devices.backend(), max_host_bytes))


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.Stream | None = None,
    *,
    max_host_bytes: int | None = None,
) -> Any:
    """Return a context and a synchronization function that offload the activations of a sequential model.

    Each layer runs in the context, and its output goes through the function::

        for layer in layers:
            with context:
                x = layer(x)
            x = sync_function(x)

    Parameters
    ----------
    enabled : bool
        False returns objects of the same kind that do nothing.
    num_layers : int
        Offload the first so many layers.  Not used with manual synchronization.
    model_layers : int
        How many times the context is entered in one forward of the model.
    offload_activations : bool
        Deprecated.  False asks for nothing to be offloaded, and gives the same as ``enabled=False``.
    offload_weights : bool
        Deprecated and without effect: weights stay on the device.
    double_buffering : bool
        Deprecated and without effect: buffers are reused by themselves.
    manual_synchronization : bool
        Nothing moves by itself; a `ManualController` is returned as well, and the program says when.
    retain_pinned_cpu_buffers : bool
        Accepted for compatibility.  Page-locked memory is always kept between steps, and always stays in
        place for captured graphs, until the context is closed or dropped.
    offload_stream : torch.Stream, optional
        The stream for all transfers, with manual synchronization only.
    max_host_bytes : int, optional
        Largest amount of page-locked host memory to hold for each device, in bytes.  What does not fit stays
        on the device, with one warning.  A keyword of this library's own.

    Returns
    -------
    context : OffloadContext
        Entered once for each layer.
    sync_function : callable
        Takes the output of a layer, any nesting of tensors, and returns it.
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
        If ``num_layers == model_layers - 1``, which leaves no compute beside which to copy.
    DeprecationWarning
        If a deprecated argument asks for something.

    Notes
    -----
    Names, order, defaults and return values are those of Transformer Engine's ``get_cpu_offload_context``
    (PyTorch API), so a program that uses it changes its import and nothing else.

    Examples
    --------
    >>> layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
    >>> context, sync_function = actoffload.get_cpu_offload_context(
    ...     enabled=True, num_layers=1, model_layers=3
    ... )
    >>> x = torch.randn(1024, 512, requires_grad=True) * 1.0
    >>> for layer in layers:
    ...     with context:
    ...         x = layer(x)
    ...     x = sync_function(x)
    >>> x.sum().backward()
    >>> context.statistics().bytes_offloaded
    2097152
    """
    _deprecated(offload_weights, double_buffering, offload_activations)
    if offload_stream is not None and not manual_synchronization:
        raise ValueError(
            "offload_stream was given without manual_synchronization=True; the default schedule has streams of "
            "its own. Leave it out, or set manual_synchronization=True."
        )
    if max_host_bytes is not None and max_host_bytes < 0:
        raise ValueError(f"max_host_bytes is {max_host_bytes}; expected a number of bytes, or None for no limit.")
    if not enabled or not offload_activations:
        nothing = NoOffloadContext()
        if manual_synchronization:
            return nothing, nothing.synchronize, NoController()
        return nothing, nothing.synchronize
    if manual_synchronization:
        if model_layers < 1:
            raise ValueError(f"model_layers is {model_layers}; expected the number of layers, at least 1.")
        plan = Plan(model_layers)
    else:
        schedule = DefaultSchedule(num_layers, model_layers)
        if not schedule.overlaps:
            warnings.warn(
                f"num_layers={num_layers} of model_layers={model_layers} leaves one resident layer: every copy waits "
                "for compute and compute for every copy. Offload at most model_layers - 2 layers.",
                UserWarning,
                stacklevel=2,
            )
        plan = schedule.plan()
    context = OffloadContext(Engine(plan, devices.backend(), max_host_bytes, offload_stream))
    if manual_synchronization:
        return context, context.synchronize, ManualController(context)
    return context, context.synchronize


def _deprecated(offload_weights: bool, double_buffering: bool, offload_activations: bool) -> None:
    for asked, text in (
        (offload_weights, "offload_weights=True has no effect: weights stay on the device"),
        (double_buffering, "double_buffering=True has no effect: buffers are reused by themselves"),
        (not offload_activations, "offload_activations=False offloads nothing: use enabled=False"),
    ):
        if asked:
            warnings.warn(f"{text}.", DeprecationWarning, stacklevel=3)
