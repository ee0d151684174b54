"""The function `offload` for a whole model and for a pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, overload

import torch.distributed as dist
from torch.nn import Module

from .. import device as devices
from .._arguments import checked_limits
from .._torch import unsupported
from .._warnings import warn
from ..engine.engine import Engine
from ..model import OffloadHandle, offload_model
from ..model.groups import read_entries
from ..replay.policy import Policy, PolicyArgument, policy_for
from ..schedule.plan import Plan
from ..tune.exchange import Ranks, Settings
from .conductor import Conductor
from .first_steps import FirstSteps, Limits
from .follow import NAMES, handle_of, is_schedule, is_supported, stages_of
from .handle import PipelineHandle
from .stages import RankStage


@overload
def offload(
    module: Module,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    num_layers: int | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int | str = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | str | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    recompute: bool | PolicyArgument | Literal["auto"] = "auto",
    plan: Plan | str | PathLike[str] | None = None,
) -> OffloadHandle: ...


@overload
def offload(
    module: Any,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int | str = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | str | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    delta_bytes_per_rank: int | str | None = None,
    recompute: bool | PolicyArgument | Literal["auto"] = "auto",
) -> PipelineHandle: ...


def offload(
    module: Any,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    num_layers: int | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int | str = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | str | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    delta_bytes_per_rank: int | str | None = None,
    recompute: bool | PolicyArgument | Literal["auto"] = "auto",
    plan: Plan | str | PathLike[str] | None = None,
) -> OffloadHandle | PipelineHandle:
    """Offload the activations of a model, or of the stages of a pipeline schedule; their code stays as it is.

    The chosen modules are *groups*: what autograd saves in one of them is kept, offloaded or recomputed together.

    Without `num_layers`, `fraction`, `max_inflight` and `plan` three to five steps are measured, of which the first two
    take the least memory.  If the model fits as it is, nothing is installed from then on.  Otherwise the fastest plan
    within the memory of the device, or within `memory_budget`, is followed.  `OffloadHandle.settling` is True until the
    plan is final.  All ranks of a model follow one plan.  Without an accelerator nothing is measured, and all groups
    but the last two and the last of each kind are offloaded.

    Of a schedule of ``torch.distributed.pipelining`` every rank passes its own, with the same arguments; one plan is
    made for all microbatches and stages of a rank.

    Parameters
    ----------
    module : torch.nn.Module or schedule
        The model, or any part of it; wrapped or not.  Call this object in training.  Or a pipeline schedule of PyTorch,
        also ``_PipelineScheduleRuntime`` with an order from a file.
    layers : str, module, type or iterable of these, optional
        What may be offloaded.  None finds the groups in the first forward: the repeated blocks, or the modules that
        together save most.  A string is the dotted path of a module, of a list of modules, whose children are meant
        then, or a glob pattern over dotted names: ``"*.self_attn"``.  Several entries give several kinds of groups; the
        entry ``...`` means what None does: ``[..., "*.head"]``.
    num_layers : int, optional
        Number of groups of each kind to offload, from the first on; the last of a kind is always kept.  Not for
        schedules.
    keep : str, module, type or iterable of these
        Modules whose saved tensors are kept on the device, given like `layers`: the router, the head, a norm.  Where
        chosen and kept modules are nested, the innermost decides.
    min_bytes : int or str
        Smaller tensors are kept: bytes, or text such as ``"256KiB"``.
    fraction : float, optional
        Fraction of the eligible groups of each kind to offload, from the first on; 0.0 to 1.0.  Eligible are all but
        the last two; with several kinds, all but the last of each, and not the last two of all.
    max_host_bytes : int or str, optional
        Largest amount of page-locked host memory to hold for each device: bytes, or text such as ``"64GiB"``.  It is
        allocated in steps of 2 MiB.  What does not fit is kept on the device, with one warning.
    max_inflight : int, optional
        Largest number of groups in flight whenever one has ended, in either direction; compute waits for the others.
        Of a schedule: largest number of groups that are copied to the host at a time, as planned; what would be one
        more is kept, and reloads are not limited.
    memory_budget : int, str or float, optional
        Limit for the peak of device memory in forward and backward: bytes, text such as ``"24GiB"``, or a fraction of
        the memory of the device.  The fastest plan within it is chosen; the measured passes are within it too.  None is
        the memory of the device.  With a schedule it is the limit of each rank.
    delta_bytes_per_rank : int or str, optional
        Of a schedule: bytes, or text such as ``"1GiB"``, by which each rank offloads less than the rank before it,
        because later ranks have fewer microbatches in flight.
    recompute : "auto", bool, callable or list
        What of the groups is computed again in backward, by running the operators whose results were dropped.
        ``"auto"`` lets the planner choose for each group, by measured times, where not everything fits.  True
        recomputes everything that can be, in all groups.  With a policy, the operators that it saves do not run again:
        a list of operators, or a function, as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes
        them.  False recomputes nothing.  Values that would not have the same bits are kept or offloaded.
    plan : Plan, str or PathLike, optional
        A plan of another run, or the file to which ``handle.plan.save`` wrote it; nothing is measured then.  Not for
        schedules.

    Returns
    -------
    OffloadHandle
        Prints what was chosen, reports what happened, pauses and ends offloading.  `PipelineHandle` for a schedule.

    Raises
    ------
    ValueError
        If nothing is found, a pattern matches nothing, a number is out of its range, or the model is offloaded already.
        In the first forward, if the ranks of a sharded or data-parallel model got different arguments.  For a schedule
        in its first step on every rank, if the arguments differ, or the stages of one rank have no groups.
    TypeError
        If `module` is not a module, or a ``ScriptModule``; if an entry of `layers` or `keep` is of another type; or if
        a numeric argument is not a number.

    Warns
    -----
    UserWarning
        If `plan` lacks repeated blocks of the model.  Once the first passes are measured, if no plan is within the
        memory budget.  For a schedule, if another rank takes no part in the first steps: this one goes on without it.

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
    common: dict[str, Any] = {
        "layers": layers,
        "keep": keep,
        "min_bytes": min_bytes,
        "fraction": fraction,
        "max_host_bytes": max_host_bytes,
        "max_inflight": max_inflight,
        "memory_budget": memory_budget,
        "recompute": recompute,
    }
    if is_schedule(module):
        stages = stages_of(module)
        first = stages[0] if stages else None
        rank, ranks = int(getattr(first, "group_rank", 0)), Ranks(pipeline=True, group=getattr(first, "group", None))
        try:
            if num_layers is not None or plan is not None:
                raise ValueError(
                    "num_layers and plan are for a single module: leave them out for a pipeline schedule, and use "
                    "fraction or delta_bytes_per_rank."
                )
            return _offload_schedule(module, stages, rank, ranks, delta_bytes_per_rank=delta_bytes_per_rank, **common)
        except (TypeError, ValueError):
            ranks.refuse(stages)
            raise
    if delta_bytes_per_rank is not None:
        raise ValueError("delta_bytes_per_rank is for pipeline schedules: call offload with the schedule object.")
    return offload_model(module, num_layers=num_layers, plan=plan, **common)


def _offload_schedule(
    schedule: Any,
    stages: list[Any],
    rank: int,
    ranks: Ranks,
    *,
    layers: Any,
    keep: Any,
    recompute: Any,
    **given: Any,
) -> PipelineHandle:
    """Offload the stages of this rank by one plan."""
    name = type(schedule).__name__
    if not is_supported(schedule):
        raise ValueError(f"offload got a {name}, which is not supported; expected one of {', '.join(NAMES)}.")
    if handle_of(schedule) is not None:
        raise ValueError(
            "This schedule is offloaded already: call remove() of its handle first; PipelineHandle.of(schedule) "
            "returns it."
        )
    backend = devices.backend()
    checked = checked_limits(backend.total_memory(), **given)
    layers, keep = read_entries("layers", ... if layers is None else layers), read_entries("keep", keep)
    min_bytes, max_host_bytes = checked.pop("min_bytes"), checked.pop("max_host_bytes")
    if not backend.times and all(number is None for number in checked.values()):
        checked["fraction"] = 1.0
    limits = Limits(**checked)
    limits = replace(limits, may_recompute=recompute == "auto" and backend.times and not limits.by_hand)
    engine = Engine(Plan(1), backend, max_host_bytes, min_bytes=min_bytes)
    conductor = Conductor(engine)
    again = limits.may_recompute if recompute == "auto" else recompute
    policy: Policy | None = None if again is False else policy_for(again)
    problem, made = "" if stages else "the schedule has no stages.", list[RankStage]()
    try:
        for stage in stages:
            made.append(RankStage(stage, conductor, layers, keep, policy))
    except (TypeError, ValueError) as error:  # raised in the first step, on every rank
        problem, made = str(error), []
    shown = {**given, "recompute": _shown(recompute)}
    arguments = {"schedule": name, "the number of microbatches": getattr(schedule, "_n_microbatches", 0), **shown}
    entries = dict[str, str]()
    for each in made:  # without a reason, if an entry means something in one of them
        entries |= {entry: reason and entries.get(entry, reason) for entry, reason in each.entries.items()}
    settings = Settings(dist.get_rank() if stages else 0, arguments, problem, entries)
    first = FirstSteps(made, conductor, rank, ranks, limits)
    found = PipelineHandle(schedule, stages, first, settings)
    missing = unsupported()
    if missing is not None:
        found.remove()
        warn(missing)
    return found


def _shown(recompute: Any) -> Any:
    """Return what the ranks compare of the argument `recompute`; a function is one of its process."""
    if isinstance(recompute, (bool, str)):
        return recompute
    return "a policy" if callable(recompute) else f"a policy of {', '.join(sorted(map(str, recompute)))}"
