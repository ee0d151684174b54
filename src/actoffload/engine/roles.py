"""What a plan means for the layers of a pass: who leaves, who stays, and behind whom nothing leaves any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..schedule.plan import Action, Do, Plan

__all__ = ["OUTSIDE", "Roles"]

OUTSIDE = 1 << 30
"""Stands, as the index of a layer, for whatever is saved in no layer; behind every real one."""


@dataclass(frozen=True, slots=True)
class Roles:
    """A plan, and what the engine asks of it for every saved tensor.

    Parameters
    ----------
    plan : Plan
        What to do at which event.
    stay : frozenset of int
        Layers that do not leave.
    last_leaving : int
        The last layer that leaves; the number of layers if none does.
    giving_way : frozenset of int
        Layers that leave tensor by tensor.
    planned : bool
        Whether the plan says anything; otherwise the program calls for each transfer itself.
    actions : mapping
        What `Plan.at` says, by the name of the event and the layer.
    """

    plan: Plan
    stay: frozenset[int]
    last_leaving: int
    giving_way: frozenset[int]
    planned: bool
    actions: Mapping[tuple[str, int], tuple[Action, ...]]

    @staticmethod
    def of(plan: Plan, *, planned: bool | None = None) -> Roles:
        """Read the roles off a plan; one without steps is taken for that of a program which calls by itself."""
        leaving = plan.offloaded
        said = bool(plan.steps) if planned is None else planned
        stay = frozenset((*range(plan.model_layers), OUTSIDE)) - set(leaving)
        steps = (action for actions in plan.steps.values() for action in actions)
        giving_way = frozenset(action.layer for action in steps if action.do is Do.GIVE_WAY)
        last = leaving[-1] if leaving else plan.model_layers
        actions = {(event.when.name, event.layer): actions for event, actions in plan.steps.items()}
        return Roles(plan, stay, last, giving_way, said, actions)
