"""The function `offload`: checks its arguments, chooses modules and returns the handle."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch.nn import Module

from .. import device as devices
from .._arguments import budget_bytes, check_num_layers, check_whole, checked_limits
from .._torch import unsupported
from .._warnings import warn
from ..engine.engine import Engine
from ..replay import PolicyArgument, everything, policy_for
from ..schedule.execution_order import GroupPlans
from ..schedule.plan import Plan
from ..schedule.schedules import GroupSchedule
from .follow import ModelState, handle_of, refuse_scripted
from .handle import OffloadHandle
from .select import Names, check_entries, find_groups, followed_modules, planned_modules, split_default, written
from .steering import ByPlan, BySchedule, Steering
from .tuning.ranks import Ranks
from .tuning.tuner import Tuner

ON_REFERENCE = (
    "Nothing is measured on a machine without an accelerator: all groups are offloaded but the last two and the "
    "last of each kind."
)
NO_BUDGET = "The memory budget is not kept there."


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
) -> OffloadHandle:
    """Offload the activations of a model; `actoffload.offload` describes the arguments."""
    if not isinstance(module, Module):
        raise TypeError(f"offload got a {type(module).__name__}; expected a torch.nn.Module, such as the whole model.")
    refuse_scripted(module, type(module).__name__)
    limits = check_arguments(
        layers=layers,
        num_layers=num_layers,
        keep=keep,
        plan=plan,
        min_bytes=min_bytes,
        fraction=fraction,
        max_host_bytes=max_host_bytes,
        max_inflight=max_inflight,
        memory_budget=memory_budget,
    )
    by_hand = not (num_layers is None and fraction is None and max_inflight is None)
    if handle_of(module) is not None:
        raise ValueError(
            "This model is offloaded already: call remove() of its handle first; OffloadHandle.of(model) returns it."
        )
    names = Names(module)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        layers = planned_modules(names, plan.names)
    chosen, kept = find_groups(names, layers, keep)
    by_choice = by_hand or not split_default(layers)[0]
    kinds = [group.kind for group in chosen]
    plans = GroupPlans(GroupSchedule(num_layers, 1.0 if fraction is None else fraction, max_inflight), kinds)
    check_num_layers(num_layers, kinds)
    engine = Engine(Plan(1), devices.backend(), limits["max_host_bytes"], min_bytes=limits["min_bytes"])
    state = ModelState(followed_modules(module, chosen, kept), plans, engine)
    budget = None if memory_budget is None else budget_bytes(memory_budget, engine.backend.total_memory())

    # With "auto" the planner chooses the operators that run again, from measured times.
    policy = everything if recompute == "auto" else policy_for(recompute) if recompute is not False else None
    policies = {} if policy is None else dict.fromkeys(range(len(chosen)), policy)
    always = {} if recompute == "auto" else policies

    compared = {
        "layers": written(names, layers),
        "num_layers": num_layers,
        "keep": written(names, keep),
        **limits,
        "recompute": recompute if isinstance(recompute, bool | str) else "a policy",
        "plan": None if plan is None else "a plan",
    }
    ranks = Ranks(weakref.ref(module), {name: repr(value) for name, value in compared.items()})

    steering: Steering
    if isinstance(plan, Plan):
        steering = ByPlan(state, plan, policies)
    elif by_hand or not engine.backend.times:
        because = "" if by_hand else ON_REFERENCE if memory_budget is None else f"{ON_REFERENCE} {NO_BUDGET}"
        steering = BySchedule(state, because, always, checks=not always and by_choice)
    else:
        steering = Tuner(state, budget, policies, ranks, always=bool(always))
    handle = OffloadHandle(state, steering, meet=ranks.meet, checks_coverage=not by_choice)
    problem = unsupported()
    if problem is not None:
        warn(problem)
    return handle


def check_arguments(*, layers: Any, num_layers: int | None, keep: Any, plan: Any, **limits: Any) -> dict[str, Any]:
    """Check the arguments of `offload` as far as that is possible without a model; return the limits in bytes.

    `limits` are the arguments of `checked_limits`.
    """
    check_whole(num_layers=num_layers, optional=True)
    checked = checked_limits(**limits)
    GroupSchedule(num_layers)
    if layers is not None:
        check_entries("layers", layers)
    check_entries("keep", keep)
    by_hand = not (num_layers is None and limits["fraction"] is None and limits["max_inflight"] is None)
    if limits["memory_budget"] is not None and (by_hand or plan is not None):
        raise ValueError(
            "memory_budget is kept by measuring: leave out num_layers, fraction, max_inflight and plan, which say by "
            "hand what is offloaded."
        )
    if plan is not None:
        if by_hand or layers is not None:
            raise ValueError("plan says what is offloaded: leave out layers, num_layers, fraction and max_inflight.")
        if not isinstance(plan, (Plan, str, PathLike)):
            raise TypeError(f"plan is {plan!r}; expected a Plan, such as handle.plan, or the path of a saved one.")
    return checked
