"""`offload` of a model: checks its arguments, chooses modules and returns the handle."""

from __future__ import annotations

import weakref
from os import PathLike
from pathlib import Path
from typing import Any

from torch.nn import Module

from .. import device as devices
from .._arguments import check_num_layers, check_whole, checked_limits
from .._text import fold_names
from .._torch import unsupported
from .._warnings import warn
from ..engine.engine import Engine
from ..replay.policy import everything, policy_for
from ..schedule.plan import Plan
from ..schedule.schedules import GroupSchedule
from ..tune.exchange import ModelRanks
from .follow import KEPT, ModelState, handle_of, refuse_scripted
from .handle import OffloadHandle
from .select import Names, check_entries, find_modules, planned_modules, split_default
from .steering import Fixed, Steering
from .tuner import Tuner

ON_REFERENCE = (
    "Nothing is measured on a machine without an accelerator: all groups are offloaded but the last two and the "
    "last of each kind."
)
NO_BUDGET = "The memory budget is not kept there."


def offload_model(
    module: Module, *, layers: Any, num_layers: int | None, keep: Any, recompute: Any, plan: Any, **limits: Any
) -> OffloadHandle:
    """Offload the activations of a model; `actoffload.offload` describes the arguments."""
    if not isinstance(module, Module):
        raise TypeError(f"offload got a {type(module).__name__}; expected a torch.nn.Module, such as the whole model.")
    refuse_scripted(module, type(module).__name__)
    backend = devices.backend()
    given = checked_limits(backend.total_memory(), **limits)
    fraction, max_inflight, budget = given["fraction"], given["max_inflight"], given["memory_budget"]
    check_whole(num_layers=num_layers, optional=True)
    schedule = GroupSchedule(num_layers, 1.0 if fraction is None else fraction, max_inflight)
    check_entries(layers, keep)
    by_hand = (num_layers, fraction, max_inflight) != (None, None, None)
    if limits["memory_budget"] is not None and (by_hand or plan is not None):
        raise ValueError(
            "memory_budget is kept by measuring: leave out num_layers, fraction, max_inflight and plan, which say by "
            "hand what is offloaded."
        )
    if plan is not None and (by_hand or layers is not None):
        raise ValueError("plan says what is offloaded: leave out layers, num_layers, fraction and max_inflight.")
    if plan is not None and not isinstance(plan, (Plan, str, PathLike)):
        raise TypeError(f"plan is {plan!r}; expected a Plan, such as handle.plan, or the path of a saved one.")
    if handle_of(module) is not None:
        raise ValueError(
            "This model is offloaded already: call remove() of its handle first; OffloadHandle.of(model) returns it."
        )
    names = Names(module)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        layers = planned_modules(names, plan.names)
    by_choice = by_hand or not split_default(layers)[0]
    engine = Engine(Plan(1), backend, given["max_host_bytes"], min_bytes=given["min_bytes"])
    state = ModelState(find_modules(names, layers, keep), schedule, engine)
    check_num_layers(num_layers, [group.kind for group in state.groups])

    # With "auto" the planner chooses the operators that run again, from measured times.
    policy = everything if recompute == "auto" else policy_for(recompute) if recompute is not False else None
    policies = {} if policy is None else dict.fromkeys(range(len(state.groups)), policy)
    always = {} if recompute == "auto" else policies

    compared = {
        "layers": fold_names(state.names()),
        "num_layers": num_layers,
        "keep": fold_names(module.name for module in state.modules if module.role == KEPT),
        **limits,
        "recompute": recompute if isinstance(recompute, bool | str) else "a policy",
        "plan": None if plan is None else "a plan",
    }
    ranks = ModelRanks(weakref.ref(module), {name: repr(value) for name, value in compared.items()})

    steering: Steering
    if isinstance(plan, Plan):
        steering = Fixed(state, plan, policies)
    elif by_hand or not backend.times:
        because = "" if by_hand else ON_REFERENCE if limits["memory_budget"] is None else f"{ON_REFERENCE} {NO_BUDGET}"
        steering = Fixed(state, None, always, because)
    else:
        steering = Tuner(state, budget, policies, ranks, always=bool(always))
    handle = OffloadHandle(state, steering, meet=ranks.meet, checks_coverage=not by_choice)
    problem = unsupported()
    if problem is not None:
        warn(problem)
    return handle
