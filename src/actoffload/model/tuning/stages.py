"""How the forwards of each stage of the first steps, and those with a plan, are followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...engine.engine import Engine
from ...planner import GroupPlan
from ...replay import Policy, saving
from ...schedule.execution_order import GroupPlans
from ...schedule.plan import Roles
from ..conduct import Conduct, FollowedModule, Mode
from ..operator_costs import OperatorTimes
from ..reporting import PassLog, group_names
from ..steering import RolesOfPlan, recomputing
from .findings import Findings
from .timed_pass import Stage

__all__ = ["BY_GROUP", "LEAN", "Stages"]

LEAN = (Stage.FIRST, Stage.LEAN, Stage.FIRST_AGAIN, Stage.AGAIN, Stage.WHOLE)  # everything is offloaded
BY_GROUP = (Stage.LEAN, Stage.MEMORY, Stage.BARE, Stage.AGAIN, Stage.WHOLE, Stage.BARE_AGAIN)  # measured by group


class Stages:
    """Makes the conduct of a forward from its stage.

    Parameters
    ----------
    engine, groups, plans, log
        Of the model.
    recompute : mapping of int to Policy
        By group: what is saved of a group that is recomputed in any case.
    policies : mapping of int to Policy
        By group: what is saved of it if it is recomputed because the memory is not enough otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        recompute: Mapping[int, Policy],
        policies: Mapping[int, Policy],
    ) -> None:
        self._engine, self._groups, self._plans, self._log = engine, groups, plans, log
        self._recompute, self._policies = recompute, policies
        self._roles: RolesOfPlan | None = None  # of the latest plan

    def of(self, stage: Stage, found: Findings, operators: OperatorTimes | None = None) -> Conduct:
        """Return how a forward of a stage is followed, with what is known by then."""
        if stage is Stage.PLAN:
            return self.planned(found)
        if stage not in LEAN and stage not in BY_GROUP:
            return self.idle()
        recompute = {**self._recompute, **{group: saving(names) for group, names in found.saves.items()}}
        if stage is Stage.FIRST_AGAIN:
            recompute |= self._policies
        # Other ranks may follow the plan in this pass.
        if stage is Stage.FIRST and found.plan is not None:  # [guard: pass in place of one with the plan]
            recompute |= self._roles_of(found).recompute
        if stage in LEAN:
            return replace(self._lean(recompute), operators=operators)
        return Conduct(Mode.SCOPED, self._plans.order, recompute=recompute)

    def planned(self, found: Findings) -> Conduct:
        """Return how a forward with the plan is followed."""
        roles = self._roles_of(found)
        recompute = {**self._recompute, **roles.recompute}
        if not roles.plan.offloaded and not recompute:
            return self.idle()
        mode = Mode.WHOLE if found.adopts or roles.incremental else Mode.SCOPED
        return Conduct(mode, self._plans.order, roles, recompute)

    def whole(self, found: Findings | None) -> Conduct:
        """Follow the whole forward, by the plan if there is one."""
        order = self._plans.order
        if found is None:
            return Conduct(Mode.WHOLE, order, self._plans.roles, self._recompute)
        roles = self._roles_of(found)
        return Conduct(Mode.WHOLE, order, roles, {**self._recompute, **roles.recompute})

    def leanest(self, found: Findings | None = None) -> Conduct:
        """Offload and recompute everything; given a plan that other ranks follow, recompute what it does."""
        again = self._policies if found is None else self._roles_of(found).recompute
        return self._lean({**again, **self._recompute})

    def idle(self) -> Conduct:
        """Offload nothing."""
        if self._recompute:
            return Conduct(Mode.SCOPED, self._plans.order, recompute=self._recompute)
        self._engine.counters.passes += 1
        return Conduct(Mode.IDLE)

    def plan(self, found: Findings | None, because: str) -> GroupPlan:
        """Return the plan; what is done until there is one, and why."""
        order = self._plans.order
        names = group_names(self._groups, order)
        if found is None or found.plan is None:
            plan = GroupPlan(names, self._plans.roles(order).plan, self._log.bytes_of(order), because=because)
        else:
            plan = found.plan.remapped(names)
        return recomputing(plan, order, self._recompute)

    def _lean(self, recompute: Mapping[int, Policy]) -> Conduct:
        return Conduct(Mode.WHOLE, self._plans.order, lambda order: Roles.leanest(len(order)), recompute)

    def _roles_of(self, found: Findings) -> RolesOfPlan:
        assert found.plan is not None
        if self._roles is None or self._roles.plan is not found.plan:
            # Blocks may be skipped at random: the measured pass may not have had some that come later.
            full = found.limit is not None and found.bare.at(found.size) > found.limit
            self._roles = RolesOfPlan(self._groups, found.plan, offload_others=full)
        return self._roles
