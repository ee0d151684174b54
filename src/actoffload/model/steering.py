"""How the forwards of a model are followed when a schedule or a plan says what is offloaded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..engine.passes import ModelPass
from ..planner import GroupPlan
from ..replay import Policy, names_of, saving
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.plan import Do, Roles
from .conduct import Conduct, FollowedModule, Mode
from .reporting import PassLog, group_names

__all__ = ["ByPlan", "BySchedule", "RolesOfPlan", "recomputing"]


class BySchedule:
    """Follow each forward as a whole, and offload by a schedule; `because` says why by this one."""

    settling = False

    def __init__(
        self,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        because: str = "",
        recompute: Mapping[int, Policy] | None = None,
    ) -> None:
        self._groups, self._plans, self._log, self._because = groups, plans, log, because
        self._recompute = recompute or {}

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> Conduct:
        """Follow the whole forward."""
        return Conduct(Mode.WHOLE, self._plans.order, self._plans.roles, self._recompute)

    def forward_ends(self, output: Any) -> None:
        """Do nothing: times do not matter."""

    def pass_ends(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> tuple[Any, Any] | None:
        """Learn the order of the groups."""
        self._plans.learn(sequence)
        if not done.partly:
            self._log.forward_done(done, sequence)
        return None

    def retire(self) -> None:
        """Do nothing: nothing is measured."""

    def facts(self) -> dict[str, Any]:
        """Return what is known of whole steps, as fields of `Report`: nothing."""
        return {}

    def frontier(self) -> Sequence[GroupPlan]:
        """Refuse: nothing is measured."""
        raise RuntimeError(
            "What other plans cost is not known, because nothing is measured: on an accelerator, call offload(model) "
            "without num_layers, fraction, max_inflight and plan, and run steps until handle.settling is False."
        )

    def plan(self) -> GroupPlan:
        """Return the plan for the order of the latest pass."""
        order = self._plans.order
        names = group_names(self._groups, order)
        plan = GroupPlan(names, self._plans.roles(order).plan, self._log.bytes_of(order), because=self._because)
        return recomputing(plan, order, self._recompute)


def recomputing(plan: GroupPlan, order: Sequence[GroupKey], policies: Mapping[int, Policy]) -> GroupPlan:
    """Return a plan that says which groups of an order are recomputed, and what is saved of them as far as is known."""
    if not policies:
        return plan
    saves = plan.saves or (None,) * len(order)
    found = [
        names_of(policies[key.group]) if key.group in policies else of for key, of in zip(order, saves, strict=True)
    ]
    return replace(plan, saves=tuple(found))


class RolesOfPlan:
    """What a plan for the groups of one order means for others, made once for each; and how groups are recomputed.

    `offload_others`: groups that the plan does not know are offloaded.
    """

    def __init__(self, groups: Sequence[FollowedModule], plan: GroupPlan, *, offload_others: bool = False) -> None:
        self._groups, self.plan, self._offload_others = groups, plan, offload_others
        saves = dict(zip(plan.names, plan.saves, strict=False))
        names = group_names(groups, [GroupKey(k) for k in range(len(groups))])
        self.recompute: Mapping[int, Policy] = {
            k: saving(of) for k, name in enumerate(names) if (of := saves.get(name)) is not None
        }
        # What a later group saves drives an incremental release, so that has to be seen too.
        self.incremental = any(
            action.do is Do.INCREMENTAL_RELEASE for actions in plan.plan.steps.values() for action in actions
        )
        self._known: dict[tuple[GroupKey, ...], Roles] = {}

    def __call__(self, order: tuple[GroupKey, ...]) -> Roles:
        """Return the roles of the groups of an order."""
        found = self._known.get(order)
        if found is None:
            if len(self._known) >= 64:  # a model whose order changes all the time
                self._known.clear()
            plan = self.plan.remapped(group_names(self._groups, order), offload_others=self._offload_others).plan
            found = self._known[order] = Roles.of(plan, planned=True)
        return found


class ByPlan(BySchedule):
    """Offload and recompute by a plan that was given; `recompute` has the groups that may be recomputed."""

    def __init__(
        self,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        plan: GroupPlan,
        recompute: Mapping[int, Policy] | None = None,
    ) -> None:
        self._roles = RolesOfPlan(groups, plan)
        again = {k: of for k, of in self._roles.recompute.items() if k in (recompute or ())}
        super().__init__(groups, plans, log, recompute=again)
        self._mode = Mode.WHOLE  # until a forward has shown whether something is saved between the groups
        self._ways: dict[GroupKey, Hashable] = {}  # in which the groups ran: `Layer.recomputed`

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> Conduct:
        """Follow the forward, or the groups that are offloaded if that is enough."""
        mode = Mode.WHOLE if alone or busy or self._log.records else self._mode
        return Conduct(mode, self._plans.order, self._roles, self._recompute)

    def pass_ends(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> tuple[Any, Any] | None:
        """Learn the order of the groups."""
        if not done.partly:
            self._mode = Mode.WHOLE if done.adopted or self._roles.incremental else Mode.SCOPED
        ways = self._ways | dict(zip(sequence, (layer.recomputed for layer in done.layers), strict=False))
        if done.partly and ways != self._ways:  # the first calls of a group are not recomputed as later ones are
            self._log.forward_done(done, sequence)
        self._ways = ways
        return super().pass_ends(done, sequence)

    def plan(self) -> GroupPlan:
        """Return the plan that was given, for the order of the latest pass."""
        return self._roles.plan.remapped(group_names(self._groups, self._plans.order))
