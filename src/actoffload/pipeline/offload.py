"""The function `offload` for a whole model and for a pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any, Literal, overload

from torch.nn import Module

from .. import device as devices
from .._arguments import budget_bytes, check_bytes, check_fraction, check_whole
from .._pipelining import NAMES, is_schedule, is_supported, microbatches, rank_of, stages_of
from .._torch import load_dynamo, unsupported, warn
from ..engine.engine import Engine
from ..model import OffloadHandle
from ..model import offload as offload_module
from ..planner import GroupPlan
from ..recompute import Given, Noted, Policy, never, policy_of, worth_saving
from ..schedule.plan import Plan
from .conductor import Conductor
from .exchange import Settings
from .follow import follow, observer_of
from .handle import PipelineHandle
from .planning import Limits
from .runner import Runner
from .stages import RankStage, problem_of

__all__ = ["offload"]


@overload
def offload(
    module: Module,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    num_layers: int | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    recompute: bool | Given | Literal["auto"] = "auto",
    plan: GroupPlan | str | PathLike[str] | None = None,
) -> OffloadHandle: ...


@overload
def offload(
    module: Any,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    delta_bytes_per_rank: int | None = None,
    recompute: bool | Given | Literal["auto"] = "auto",
) -> PipelineHandle: ...


def offload(
    module: Any,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    num_layers: int | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    delta_bytes_per_rank: int | None = None,
    recompute: bool | Given | Literal["auto"] = "auto",
    plan: GroupPlan | str | PathLike[str] | None = None,
) -> OffloadHandle | PipelineHandle:
    """DOC."""
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
        if num_layers is not None or plan is not None:
            raise ValueError(
                "num_layers and plan are for a single module: leave them out for a pipeline schedule, and use fraction "
                "or delta_bytes_per_rank."
            )
        return _offload_schedule(module, delta_bytes_per_rank=delta_bytes_per_rank, **common)
    if delta_bytes_per_rank is not None:
        raise ValueError("delta_bytes_per_rank is for pipeline schedules: call offload with the schedule object.")
    return offload_module(module, num_layers=num_layers, plan=plan, **common)


def _offload_schedule(schedule: Any, *, layers: Any, keep: Any, recompute: Any, **given: Any) -> PipelineHandle:
    """Offload the stages of this rank by one plan."""
    name = type(schedule).__name__
    if not is_supported(schedule):
        raise ValueError(f"offload got a {name}, which is not supported; expected one of {', '.join(NAMES)}.")
    if observer_of(schedule) is not None:
        raise ValueError(
            "This schedule is offloaded already: call remove() of its handle first; PipelineHandle.of(schedule) "
            "returns it."
        )
    limits = _limits(**given)
    backend = devices.backend()
    stages = stages_of(schedule)
    rank, group = rank_of(stages[0]) if stages else (0, None)
    engine = Engine(Plan(1), backend, given["max_host_bytes"], min_bytes=given["min_bytes"])
    conductor = Conductor(engine)
    policy: Policy | None = None
    if recompute is not False and recompute != "auto":
        policy = worth_saving if recompute is True else policy_of(recompute)
        policy = policy if policy is never else Noted(policy)
        load_dynamo()
    problem, made = problem_of(stages), list[RankStage]()
    try:
        for stage in stages if not problem else ():
            made.append(RankStage(stage, conductor, layers, keep, policy, given))
    except (TypeError, ValueError) as error:  # raised in the first step, on every rank
        problem = str(error)
        for each in made:
            each.handle.remove()
        made = []
    shown = {**given, "recompute": recompute if isinstance(recompute, (bool, str)) else "a policy"}
    arguments = {"schedule": name, "the number of microbatches": microbatches(schedule), **shown}
    runner = Runner([*stages, schedule], made, conductor, Settings(rank, arguments, problem), limits, group)
    missing = unsupported()
    if missing is not None:
        warn(missing)
        runner.remove()
        return PipelineHandle(runner)
    follow(schedule, stages, runner)
    return PipelineHandle(runner)


def _limits(
    *,
    min_bytes: int,
    fraction: float | None,
    max_host_bytes: int | None,
    max_inflight: int | None,
    memory_budget: int | float | str | None,
    delta_bytes_per_rank: int | None,
) -> Limits:
    """Check the arguments that limit what is offloaded; errors are those of `offload`."""
    check_bytes(min_bytes=min_bytes)
    check_bytes(max_host_bytes=max_host_bytes, delta_bytes_per_rank=delta_bytes_per_rank, optional=True)
    check_whole(max_inflight=max_inflight, optional=True)
    if fraction is not None:
        check_fraction(fraction)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction is {fraction}; expected a part of the groups, from 0.0 to 1.0.")
    if max_inflight is not None and max_inflight < 1:
        raise ValueError(f"max_inflight is {max_inflight}; expected a number of groups, at least 1.")
    budget = None if memory_budget is None else budget_bytes(memory_budget, devices.backend().total_memory())
    return Limits(fraction, max_inflight, delta_bytes_per_rank, budget)
