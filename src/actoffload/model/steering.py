"""How the forwards of a model are followed: the settings of a pass, and what decides them.

`[Note: modes]`  Where the whole forward is followed, saved-tensor hooks are installed once, around the call of the
model, and the calls of its modules only change the group that packs.  Every saved tensor then costs host time, also in
groups that keep everything.  Once a plan is known, no more is needed than the tensors of the groups that it offloads:
there the hooks are installed around these groups alone, and a forward that offloads nothing runs without.  Of a group
that is recomputed and not offloaded they see the inputs only.  Those that all groups have, such as the angles of rotary
embeddings, it keeps until its backward, so a copy of them from another group would free nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..engine.passes import ModelPass
from ..replay.policy import Policy
from ..schedule.plan import Plan
from ..schedule.schedules import GroupSchedule, remap
from ..tune.findings import Findings
from .follow import ModelState
from .replays import OperatorTimes

UNMEASURED = (
    "Nothing is measured of this model: on an accelerator, call offload(model) without num_layers, fraction, "
    "max_inflight and plan, and run steps until handle.settling is False."
)


@dataclass(frozen=True, slots=True)
class PassSettings:
    """How a forward is followed."""

    plan_for: Callable[[tuple[int, ...]], Plan] = lambda order: Plan(max(len(order), 1))
    recompute: Mapping[int, Policy] = field(default_factory=dict)  # by group: what is saved where it is recomputed
    scoped: bool = False  # hooks are installed only in groups that are offloaded or recomputed, see [Note: modes]
    operators: OperatorTimes | None = None  # takes what the first calls of groups show
    begun: Callable[[ModelPass], None] | None = None  # called with the pass before its first group


class Steering:
    """Decides how the forwards of a model are followed, by a schedule or a plan, and sees what they did.

    Nothing is measured here.  `because` says why by a schedule; `recompute` has the groups that are always recomputed.
    """

    measures = False  # passes are measured
    settling = False  # they are, for a plan that is not final
    chosen: Findings | None = None  # whose plan is kept, if it was measured

    def __init__(
        self, state: ModelState, plan: Plan | GroupSchedule, recompute: Mapping[int, Policy], because: str = ""
    ) -> None:
        self.state, self._always, self._because = state, recompute, because
        self._adopts = False  # groups are offloaded with what was saved before them
        self._follow(plan)
        # The first pass shows what is saved between the groups, the second one what groups save that are recomputed.
        self._unseen = 2 if self._settings.recompute else 1  # passes that are still to be followed as a whole

    def _follow(self, plan: Plan | GroupSchedule, *, offload_others: bool = False) -> None:
        """Follow a plan in any order of the groups; with `offload_others` those that it lacks are offloaded, too."""
        state, recompute = self.state, dict(self._always)
        if isinstance(plan, Plan):
            saves = dict(zip(plan.names, plan.saves, strict=False))
            found = ((group.group, saves.get(group.name)) for group in state.groups)
            recompute |= {k: Policy(frozenset(stays), holds=plan.holds) for k, stays in found if stays is not None}

        @lru_cache(maxsize=64)  # of a model whose order changes
        def plan_for(order: tuple[int, ...]) -> Plan:
            if isinstance(plan, GroupSchedule):
                return plan.plan(state.kinds(order))
            return remap(plan, state.names(order), offload_others=offload_others)

        self._plan, self._settings = plan, PassSettings(plan_for, recompute)

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings | None:
        """Return how the forward that begins now is followed; None if it is not.

        `inputs` are the arguments and keyword arguments of the module that is called.  If it is `alone`, that is a
        group and not the model itself; if it is `busy`, another thread runs a forward of the model.
        """
        return self._planned(whole=alone or busy)

    def _planned(self, *, whole: bool) -> PassSettings | None:
        """Return how a forward with the plan is followed; `whole`: also where nothing is offloaded."""
        plan, settings = self._plan, self._settings
        if whole or isinstance(plan, GroupSchedule) or self._unseen or self.state.log.records:
            return settings
        if not (plan.offloaded or settings.recompute):
            self.state.engine.counters.passes += 1
            return None
        return replace(settings, scoped=not self._adopts)

    def forward_ends(self, output: Any) -> None:
        """Note that the model returns `output`."""

    def pass_ends(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Learn the sequence of the groups, and what they saved in a followed forward that has ended."""
        if sequence:
            self.state.order = tuple(sequence)  # [guard: learned execution order]
        if not done.partly:
            self._unseen = max(self._unseen - 1, 0)
            self._adopts = done.adopted > 0
        self.state.log.forward_done(done, sequence)

    def retire(self) -> None:
        """Stop measuring: the model is followed no longer."""

    def plan(self) -> Plan:
        """Return the present plan, for the order of the latest pass."""
        return self._described(self._plan, self._because)

    def _described(self, plan: Plan | GroupSchedule, because: str) -> Plan:
        """Return a plan for the order of the latest pass, with what is saved of the groups as far as is known."""
        state, order, policies = self.state, self.state.order, self._always
        if isinstance(plan, Plan):
            plan = remap(plan, state.names())
        else:
            nbytes = state.log.bytes_of(order)
            plan = replace(plan.plan(state.kinds(order)), names=state.names(), nbytes=nbytes, because=because)
        if not policies:
            return plan
        saves = [
            tuple(sorted(policies[key].names | policies[key].kept)) if key in policies else policy
            for key, policy in zip(order, plan.saves or (None,) * len(order), strict=True)
        ]
        return replace(plan, saves=tuple(saves))

    def costs(self) -> Findings:
        """Return what was measured for the plan; raise a `RuntimeError` if that is not known."""
        if self.chosen is None or not self.chosen.ways:
            yet = " yet: run steps until handle.settling is False" if self.settling else ""
            because = self.plan().because if self.measures else UNMEASURED
            raise RuntimeError(f"What other plans cost is not known{yet}. {because}".rstrip())
        return self.chosen

    @property
    def next_choice(self) -> str:
        """What a smaller peak would cost, in a sentence; empty if that is not known."""
        return "" if self.chosen is None else self.chosen.next_choice
