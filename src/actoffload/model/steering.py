"""How the forwards of a model are followed: the settings of a pass, and what decides them.

`[Note: modes]`  Where the whole forward is followed, saved-tensor hooks are installed once, around the call of the
model, and the calls of its modules only change the group that packs.  Every saved tensor then costs host time, also in
groups that keep everything.  A plan that was chosen from measurements needs no more than the tensors of the groups that
it offloads: there the hooks are installed around these groups alone, and a forward that offloads nothing runs without.
Of a group that is recomputed and not offloaded they see the inputs only.  Those that all groups have, such as the
angles of rotary embeddings, it keeps until its backward, so a copy of them from another group would free nothing.
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
from .follow import ModelState
from .replays import OperatorTimes


@dataclass(frozen=True, slots=True)
class PassSettings:
    """How a forward is followed."""

    plan_for: Callable[[tuple[int, ...]], Plan] = lambda order: Plan(max(len(order), 1))
    recompute: Mapping[int, Policy] = field(default_factory=dict)  # by group: what is saved where it is recomputed
    scoped: bool = False  # hooks are installed only in groups that are offloaded or recomputed, see [Note: modes]
    operators: OperatorTimes | None = None  # takes what the first calls of groups show
    begun: Callable[[ModelPass], None] | None = None  # called with the pass before its first group


class Steering:
    """Decides how the forwards of a model are followed, and sees what they did; by default nothing is measured."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings | None:
        """Return how the forward that begins now is followed; None if it is not.

        `inputs` are the arguments and keyword arguments of the module that is called.  If it is `alone`, that is a
        group and not the model itself; if it is `busy`, another thread runs a forward of the model.
        """
        raise NotImplementedError

    def forward_ends(self, output: Any) -> None:
        """Note that the model returns `output`."""

    def pass_ends(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Learn the sequence of the groups, and what they saved in a followed forward that has ended."""
        if sequence:
            self.state.order = tuple(sequence)  # [guard: learned execution order]
        self.state.log.forward_done(done, sequence)

    @property
    def settling(self) -> bool:
        """Whether passes are measured for a plan that is not final."""
        return False

    def retire(self) -> None:
        """Stop measuring: the model is followed no longer."""

    def plan(self) -> Plan:
        """Return the present plan."""
        raise NotImplementedError

    def costs(self) -> Any:
        """Return the `Findings` of the plan; raise a `RuntimeError` if nothing was measured."""
        raise RuntimeError(
            "What other plans cost is not known, because nothing is measured of this model alone: on an accelerator, "
            "call offload(model) without num_layers, fraction, max_inflight and plan, and run steps until "
            "handle.settling is False."
        )

    def next_choice(self) -> str:
        """Return what a smaller peak would cost, in a sentence; empty if that is not known."""
        return ""


def scheduled_plan(state: ModelState, schedule: GroupSchedule, because: str, recompute: Mapping[int, Policy]) -> Plan:
    """Return the plan of a schedule for the order of the latest pass."""
    order = state.order
    plan = replace(schedule.plan(state.kinds(order)), names=state.names(), nbytes=state.log.bytes_of(order))
    return recomputing(replace(plan, because=because), order, recompute)


def recomputing(plan: Plan, order: Sequence[int], policies: Mapping[int, Policy]) -> Plan:
    """Return a plan that says which groups of an order are recomputed, and what is saved of them as far as is known."""
    if not policies:
        return plan
    saves = plan.saves or (None,) * len(order)
    found = [
        tuple(sorted(policies[key].names | policies[key].kept)) if key in policies else policy
        for key, policy in zip(order, saves, strict=True)
    ]
    return replace(plan, saves=tuple(found))


class FollowedPlan:
    """A plan or a schedule as it is `plan_for` any order of the groups, and how groups are recomputed.

    Some of them `always` are.  `offload_others`: groups that the plan does not know are offloaded.
    """

    def __init__(
        self,
        state: ModelState,
        plan: Plan | GroupSchedule,
        always: Mapping[int, Policy],
        *,
        offload_others: bool = False,
    ) -> None:
        self.plan = plan
        self.recompute = dict(always)
        if isinstance(plan, Plan):
            saves = dict(zip(plan.names, plan.saves, strict=False))
            found = ((group.group, saves.get(group.name)) for group in state.groups)
            self.recompute |= {k: Policy(frozenset(stays), holds=plan.holds) for k, stays in found if stays is not None}

        @lru_cache(maxsize=64)  # of a model whose order changes
        def plan_for(order: tuple[int, ...]) -> Plan:
            if isinstance(plan, GroupSchedule):
                return plan.plan(state.kinds(order))
            return remap(plan, state.names(order), offload_others=offload_others)

        self.plan_for = plan_for


class Fixed(Steering):
    """Offload and recompute by a schedule, or by a plan that was given; nothing is measured.

    `because` says why by a schedule; `recompute` has the groups that are always recomputed.
    """

    def __init__(
        self, state: ModelState, plan: Plan | GroupSchedule, recompute: Mapping[int, Policy], because: str = ""
    ) -> None:
        super().__init__(state)
        self._because, self._recompute = because, recompute
        self._followed = FollowedPlan(state, plan, recompute)
        self._seen = 0  # passes that were followed as a whole
        self._adopts = False  # groups are offloaded with what was saved before them

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings:
        """Follow the forward, or with a plan the groups that it offloads if that is enough."""
        followed = self._followed
        # The first pass shows what is saved between the groups, the second one what groups save that are recomputed.
        unseen = self._seen < (2 if followed.recompute else 1)
        whole = isinstance(followed.plan, GroupSchedule) or unseen or alone or busy
        whole = whole or self.state.log.records or self._adopts
        return PassSettings(followed.plan_for, followed.recompute, scoped=not whole)

    def pass_ends(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Learn whether a forward has to be followed as a whole."""
        if not done.partly:
            self._seen += 1
            self._adopts = done.adopted > 0
        super().pass_ends(done, sequence)

    def plan(self) -> Plan:
        """Return the plan for the order of the latest pass."""
        given = self._followed.plan
        if isinstance(given, Plan):
            return remap(given, self.state.names())
        return scheduled_plan(self.state, given, self._because, self._recompute)
