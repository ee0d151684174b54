"""Per-layer API with Transformer Engine's signature: `get_cpu_offload_context`, and what it returns when disabled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch

from .. import device as devices
from .._arguments import check_kind, check_whole, number_of_bytes
from .._torch import unsupported
from ..device import ReferenceDevice
from ..engine.engine import Engine
from ..engine.passes import Pass
from ..schedule.plan import Do, Plan
from ..schedule.schedules import DefaultSchedule
from .context import ManualController, OffloadContext

__all__ = ["ManualController", "OffloadContext", "Pass", "get_cpu_offload_context"]

T = TypeVar("T")


class NoOffloadContext(OffloadContext):
    """The context of a disabled `get_cpu_offload_context`: does nothing, can be nested, and counts nothing."""

    def __init__(self) -> None:
        super().__init__(Engine(Plan(1), ReferenceDevice()))

    def __deepcopy__(self, memo: object) -> NoOffloadContext:
        return NoOffloadContext()

    def __reduce__(self) -> tuple[Any, ...]:
        return NoOffloadContext, ()

    def __enter__(self) -> NoOffloadContext:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def synchronize(self, output: T) -> T:
        """Return the output."""
        return output


class NoController(ManualController):
    """The controller of a disabled context: accepts every call and does nothing."""

    def _do(self, action: Do, layer_id: int, in_pass: object) -> None:
        pass


@overload
def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: Literal[False] = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.Stream | None = None,
    *,
    max_host_bytes: int | str | None = None,
) -> tuple[OffloadContext, Callable[[T], T]]: ...


@overload
def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    *,
    manual_synchronization: Literal[True],
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.Stream | None = None,
    max_host_bytes: int | str | None = None,
) -> tuple[OffloadContext, Callable[[T], T], ManualController]: ...


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
) -> tuple[OffloadContext, Callable[[T], T]] | tuple[OffloadContext, Callable[[T], T], ManualController]:
    """Return a context and a synchronization function that offload the activations of a sequential model.

    Each layer runs in the context, and its output goes through the function::

        for layer in layers:
            with context:
                x = layer(x)
            x = sync_function(x)

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
    TypeError
        If a number is not a whole number, another argument not True or False, or `offload_stream` is not a stream.

    Warns
    -----
    UserWarning
        If ``num_layers == model_layers - 1``: then copies do not overlap with compute.
    DeprecationWarning
        If a deprecated argument is not at its default.

    Notes
    -----
    Names, order, defaults and return values are those of Transformer Engine's ``get_cpu_offload_context``, and
    `max_host_bytes` is added.

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
    if not enabled or not offload_activations or problem is not None:
        nothing = NoOffloadContext()
        if manual_synchronization:
            return nothing, nothing.synchronize, NoController(nothing)
        return nothing, nothing.synchronize
    check_whole(model_layers=model_layers, least=1)
    backend = devices.backend()
    if offload_stream is not None:
        backend.adopt(offload_stream)
    if manual_synchronization:
        plan = Plan(model_layers)
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
    context = OffloadContext(Engine(plan, backend, host_bytes, offload_stream))
    if manual_synchronization:
        return context, context.synchronize, ManualController(context)
    return context, context.synchronize
