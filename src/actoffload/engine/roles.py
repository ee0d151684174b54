"""What a plan means for the layers of a pass: who leaves, who stays, and behind whom nothing leaves any more."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule.plan import Do, Plan

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
    """

    plan: Plan
    stay: frozenset[int]
    last_leaving: int
    giving_way: frozenset[int]
    planned: bool

    @staticmethod
    def of(plan: Plan, *, planned: bool | None = None) -> Roles:
        """Read the roles off a plan; one without steps is taken for that of a program which calls by itself."""
        leaving = plan.offloaded
        said = bool(plan.steps) if planned is None else planned
        stay = frozenset((*range(plan.model_layers), OUTSIDE)) - set(leaving)
        steps = (action for actions in plan.steps.values() for action in actions)
        giving_way = frozenset(action.layer for action in steps if action.do is Do.GIVE_WAY)
        return Roles(plan, stay, leaving[-1] if leaving else plan.model_layers, giving_way, said)
