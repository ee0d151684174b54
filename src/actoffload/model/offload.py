"""The function `offload`: checks its arguments, chooses modules and returns the handle."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn import Module

from .. import device as devices
from .._arguments import check_bytes, check_fraction, check_num_layers, check_whole
from .._torch import unsupported, warn
from ..engine.engine import Engine
from ..schedule.execution_order import GroupPlans
from ..schedule.plan import Plan
from ..schedule.schedules import GroupSchedule
from .follow import followers_of, refuse_scripted
from .handle import OffloadHandle
from .outside import written
from .select import choose, find_kept
from .tracker import GROUP, KEPT, ROOT, FollowedModule

__all__ = ["offload"]


def offload(
    module: Module,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    num_layers: int | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int = 1 << 20,
    fraction: float = 1.0,
    max_host_bytes: int | None = None,
    max_inflight: int | None = None,
) -> OffloadHandle:
    """Offload the activations of a model, whose code stays as it is.

    The chosen modules are *groups*: what autograd saves in one of them is offloaded together.  Each group is copied to
    the host while it computes, freed before a later group needs the memory, and reloaded before backward needs it.  The
    execution order of the groups is learned from the forward.

    Parameters
    ----------
    module : torch.nn.Module
        The model, or any part of it; wrapped or not.  Call this object in training.
    layers : str, module, type or iterable of these, optional
        What to offload.  None finds the repeated blocks.  A string is the dotted path of a module, of a list of
        modules, whose children are meant then, or a glob pattern over dotted names: ``"*.self_attn"``.  Several
        entries give several kinds of groups; the entry ``...`` means what None does: ``[..., "*.head"]``.
    num_layers : int, optional
        Number of groups of each kind to offload, from the first on; the last of a kind is always kept.  None offloads
        all but the last two; with several kinds, all but the last of each, and not the last two of all.
    keep : str, module, type or iterable of these
        Modules whose saved tensors are kept on the device, given like `layers`: the router, the head, a norm.  Where
        chosen and kept modules are nested, the innermost decides.
    min_bytes : int
        Smaller tensors are kept, in bytes.
    fraction : float
        Fraction of the eligible groups of each kind to offload, from the first on; 0.0 to 1.0.
    max_host_bytes : int, optional
        Largest amount of page-locked host memory to hold for each device, in bytes; it is allocated in steps of 2 MiB.
        What does not fit is kept on the device, with one warning.
    max_inflight : int, optional
        Largest number of groups in flight whenever one has ended, in either direction; compute waits for the others.

    Returns
    -------
    OffloadHandle
        Prints what was chosen, reports what happened, pauses and ends offloading.

    Raises
    ------
    ValueError
        If nothing is found, a pattern matches nothing, a number is out of its range, or the model is offloaded already.
    TypeError
        If `module` is not a module, or a ``ScriptModule``; if an entry of `layers` or `keep` is of another type; or if
        a numeric argument is not a number.

    Warns
    -----
    UserWarning
        If so few groups were found that none is offloaded.

    Examples
    --------
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    >>> handle = actoffload.offload(model)
    >>> x = torch.randn(1024, 512, requires_grad=True)
    >>> model(x * 1.0).sum().backward()
    >>> handle.statistics().tensors_offloaded
    4
    >>> handle.remove()
    """
    if not isinstance(module, Module):
        raise TypeError(f"offload got a {type(module).__name__}; expected a torch.nn.Module, such as the whole model.")
    refuse_scripted(module, type(module).__name__)
    check_whole(num_layers=num_layers, max_inflight=max_inflight, optional=True)
    check_fraction(fraction)
    check_bytes(min_bytes=min_bytes)
    check_bytes(max_host_bytes=max_host_bytes, optional=True)
    if followers_of(module) is not None:
        raise ValueError(
            "This model is offloaded already: call remove() of its handle first; OffloadHandle.of(model) returns it."
        )
    schedule = GroupSchedule(num_layers, fraction, max_inflight)
    # An iterator is read once.
    layers = list(layers) if isinstance(layers, Iterator) else layers
    keep = list(keep) if isinstance(keep, Iterator) else keep
    chosen = choose(module, layers)
    kept = find_kept(module, keep)
    both = {name for name, _ in kept} & {of.name for of in chosen}
    if both:
        by = "default, as a repeated block," if layers is None else "layers"
        raise ValueError(
            f"The module '{min(both)}' is chosen by {by} and by keep: take it out of keep, or set other layers."
        )
    kinds = [group.kind for group in chosen]
    plans = GroupPlans(schedule, kinds)
    check_num_layers(num_layers, kinds)
    modules = [
        FollowedModule(ROOT, type(module).__name__, weakref.ref(module)),
        *(FollowedModule(GROUP, of.name, weakref.ref(of.module), k, of.kind) for k, of in enumerate(chosen)),
        *(FollowedModule(KEPT, name, weakref.ref(of)) for name, of in kept),
    ]
    engine = Engine(Plan(1), devices.backend(), max_host_bytes, min_bytes=min_bytes)
    arguments = {
        "layers": written(module, layers),
        "num_layers": num_layers,
        "keep": written(module, keep),
        "min_bytes": min_bytes,
        "fraction": fraction,
        "max_host_bytes": max_host_bytes,
        "max_inflight": max_inflight,
    }
    handle = OffloadHandle(modules, plans, engine, arguments=arguments)
    problem = unsupported()
    if problem is not None:
        warn(problem)
        return handle
    if not handle.plan.offloaded and num_layers != 0 and fraction:
        warn(
            f"None of the groups that were found ({len(chosen)}) is offloaded: the last of each kind and the last two "
            "of all are kept, because backward begins there. Choose modules with layers of which there are several of "
            "a kind, or more groups with num_layers or fraction. Where a forward calls a group several times, its "
            "earlier calls are offloaded."
        )
    return handle
