"""How the forwards of a model are followed by a schedule or a given plan, and in the one that finds the groups."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch.nn import Module

from ..._warnings import warn
from ...engine.passes import ModelPass
from ...engine.statistics import Reason
from ...replay import Policy, names_of, saving
from ...report.build import PassLog, PassStatistics, count_pass
from ...report.report import GroupReport
from ...schedule.execution_order import GroupKey, GroupPlans, Roles, remap
from ...schedule.plan import Plan
from ..discovery import BLOCK, MODULE, choose_groups, coverage_warning, measure
from ..follow import DROPPED, FollowedModule, Mode, PassSettings, Steering
from ..reporting import group_names

__all__ = ["ByPlan", "BySchedule", "Finder", "RolesOfPlan", "recomputing", "scheduled_plan"]


class BySchedule(Steering):
    """Follow each forward as a whole, and offload by a schedule; `because` says why by this one."""

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

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings:
        """Follow the whole forward."""
        return PassSettings(Mode.WHOLE, self._plans.order, self._plans.roles, self._recompute)

    def pass_ends(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Learn the order of the groups."""
        self._plans.learn(sequence)
        if not done.partly:
            self._log.forward_done(done, sequence)

    def plan(self) -> Plan:
        """Return the plan for the order of the latest pass."""
        return scheduled_plan(self._groups, self._plans, self._log, self._because, self._recompute)


def scheduled_plan(
    groups: Sequence[FollowedModule], plans: GroupPlans, log: PassLog, because: str, recompute: Mapping[int, Policy]
) -> Plan:
    """Return the plan of a schedule for the order of the latest pass."""
    order = plans.order
    nbytes, names = log.bytes_of(order), group_names(groups, order)
    return recomputing(replace(plans.roles(order).plan, names=names, nbytes=nbytes, because=because), order, recompute)


def recomputing(plan: Plan, order: Sequence[GroupKey], policies: Mapping[int, Policy]) -> Plan:
    """Return a plan that says which groups of an order are recomputed, and what is saved of them as far as is known."""
    if not policies:
        return plan
    saves = plan.saves or (None,) * len(order)
    found = [
        names_of(policies[key.group]) if key.group in policies else policy
        for key, policy in zip(order, saves, strict=True)
    ]
    return replace(plan, saves=tuple(found))


class RolesOfPlan:
    """What a plan means: `roles` of the groups of any order, and how groups are recomputed.

    `offload_others`: groups that the plan does not know are offloaded.
    """

    def __init__(self, groups: Sequence[FollowedModule], plan: Plan, *, offload_others: bool = False) -> None:
        self.plan = plan
        saves = dict(zip(plan.names, plan.saves, strict=False))
        names = group_names(groups, [GroupKey(k) for k in range(len(groups))])
        self.recompute: Mapping[int, Policy] = {
            k: saving(stays, holds=plan.holds) for k, name in enumerate(names) if (stays := saves.get(name)) is not None
        }

        @lru_cache(maxsize=64)  # of a model whose order changes
        def roles(order: tuple[GroupKey, ...]) -> Roles:
            found = remap(plan, group_names(groups, order), offload_others=offload_others)
            return Roles.of(found, planned=True)

        self.roles = roles


class ByPlan(BySchedule):
    """Offload and recompute by a plan that was given; `recompute` has the groups that may be recomputed."""

    def __init__(
        self,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        plan: Plan,
        recompute: Mapping[int, Policy] | None = None,
    ) -> None:
        self._roles = RolesOfPlan(groups, plan)
        again = {k: policy for k, policy in self._roles.recompute.items() if k in (recompute or ())}
        super().__init__(groups, plans, log, recompute=again)
        self._mode = Mode.WHOLE  # until a forward has shown whether something is saved between the groups
        self._ways: dict[GroupKey, Hashable] = {}  # in which the groups ran: `Layer.recomputed`

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings:
        """Follow the forward, or the groups that are offloaded if that is enough."""
        mode = Mode.WHOLE if alone or busy or self._log.records else self._mode
        return PassSettings(mode, self._plans.order, self._roles.roles, self._recompute)

    def pass_ends(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Learn the order of the groups."""
        if not done.partly:
            self._mode = Mode.WHOLE if done.adopted else Mode.SCOPED
        ways = self._ways | dict(zip(sequence, (layer.recomputed for layer in done.layers), strict=False))
        if done.partly and ways != self._ways:  # the first calls of a group are not recomputed as later ones are
            self._log.forward_done(done, sequence)
        self._ways = ways
        super().pass_ends(done, sequence)

    def plan(self) -> Plan:
        """Return the plan that was given, for the order of the latest pass."""
        return remap(self._roles.plan, group_names(self._groups, self._plans.order))


SEARCH = "This first pass offloads all groups: it shows what each module saves, from which the groups are chosen."


class Stretch(NamedTuple):
    """A part of a call of a followed module, between the calls of those inside of it."""

    call: int
    around: tuple[int, ...]  # the calls in progress, outermost first


class Run(NamedTuple):
    """What a stretch belongs to if only the groups are followed."""

    key: GroupKey
    call: int  # of the group


class Finder:
    """Follow every module that may be a group in one forward, and choose the groups.

    Groups of another kind than those that were found by default were named by the program, and stay groups.

    Attributes
    ----------
    guesses : bool
        Whether no blocks are known, so that all modules may be groups.
    """

    def __init__(
        self,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        root: weakref.ref[Module],
        *,
        guesses: bool = False,
    ) -> None:
        self._groups, self._plans, self._log, self._root, self.guesses = groups, plans, log, root, guesses
        # Where blocks are all that there is, their schedule is known.
        self._searches = any(followed.kind == MODULE for followed in groups)

    def settings(self, settings: PassSettings) -> PassSettings:
        """Return how a forward of the model is followed in which the groups are found."""
        if not self._searches:
            return settings
        roles = Roles.offload_all()
        return replace(settings, order=(), roles_of=lambda order: roles)

    def found(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> list[FollowedModule]:
        """Choose the groups by what the modules saved; return the modules that are none."""
        called = {key.group for key in sequence}
        # [guard: group that was replaced before the first forward]
        skipped = [
            followed.name
            for followed in self._groups
            if followed.group not in called and followed.kind == BLOCK and followed.ref() is not None
        ]
        stretches = list(_stretches(sequence))
        latest = count_pass(done, sequence)
        chosen = self._choose(sequence, stretches, latest, skipped)
        dropped = [followed for followed in self._groups if followed.name not in chosen]
        for followed in dropped:
            followed.role = DROPPED
        groups = {k for k, followed in enumerate(self._groups) if followed.name in chosen}
        runs = list(_runs(sequence, stretches, groups))
        self._plans.learn([run.key for run in dict.fromkeys(runs) if run is not None])
        because = SEARCH if self._searches else ""
        self._log.take(replace(_regrouped(latest, runs), because=because), sequence)
        return dropped

    def _choose(
        self,
        sequence: Sequence[GroupKey],
        stretches: Sequence[Stretch],
        latest: PassStatistics,
        skipped: Sequence[str],
    ) -> set[str]:
        groups = [self._groups[key.group] for key in sequence]
        rows = latest.groups
        of_call = {stretch.call: group.name for stretch, group in zip(stretches, groups, strict=True)}
        modules = measure(
            (group, [of_call[call] for call in around], row.activation_bytes + layer.remade_bytes)
            for group, (_, around), (layer, row) in zip(groups, stretches, rows, strict=True)
        )
        others: dict[Reason, tuple[int, int]] = {
            reason: amount for reason, amount in (latest.outside or {}).items() if reason is not Reason.KEPT
        }
        outside = GroupReport("outside", kept=others).activation_bytes
        named = {group.name for group in self._groups if group.kind not in (BLOCK, MODULE)}
        chosen = {*choose_groups(modules, outside, named)}
        blocks = {group.name for group in self._groups if group.kind == BLOCK}
        if chosen & blocks:  # a block that was skipped, or dropped its path, saves something another time
            ran = {group.name for group, (layer, _) in zip(groups, rows, strict=True) if layer.no_graph}
            chosen |= blocks - ran
        root = self._root()
        title = "model" if root is None else type(root).__name__
        warning = coverage_warning(title, modules, chosen, outside, skipped)
        if warning is not None:
            warn(warning)
        return chosen


def _stretches(sequence: Sequence[GroupKey]) -> Iterator[Stretch]:
    """Yield where each part of a sequence belongs: a call that goes on was around all since its part before."""
    found: list[Stretch] = []
    calls: list[tuple[int, GroupKey]] = []  # in progress, seen from the end
    for number, key in enumerate(reversed(sequence)):
        if not calls or calls[-1][1] != GroupKey(key.group, key.part + 1):
            calls.append((number, key))
        calls[-1] = calls[-1][0], key
        found.append(Stretch(calls[-1][0], tuple(call for call, _ in calls[:-1])))
        if not key.part:
            calls.pop()
    return reversed(found)


def _runs(sequence: Sequence[GroupKey], stretches: Sequence[Stretch], groups: set[int]) -> Iterator[Run | None]:
    """Yield what each stretch belongs to if only these groups are followed; None outside of them."""
    group_of = {stretch.call: key.group for stretch, key in zip(stretches, sequence, strict=True)}
    parts: dict[int, int] = {}
    before: int | None = None
    for call, around in stretches:
        inner = next((each for each in (call, *reversed(around)) if group_of[each] in groups), None)
        if inner is not None and inner != before:
            parts[inner] = parts.get(inner, -1) + 1
        before = inner
        yield None if inner is None else Run(GroupKey(group_of[inner], parts[inner]), inner)


def _regrouped(latest: PassStatistics, runs: Sequence[Run | None]) -> PassStatistics:
    """Return what a pass did as if only some of its groups had been followed."""
    outside = dict(latest.outside or {})
    places = [k for k, run in enumerate(runs) if run is not None]
    rows, before = [], None
    for run, (layer, row) in zip(runs, latest.groups, strict=True):
        if run is not None:
            rows.append((layer, replace(row, calls=int(run != before))))
        elif row.activation_bytes:
            count, nbytes = outside.get(Reason.OUTSIDE, (0, 0))
            outside[Reason.OUTSIDE] = count + row.storages, nbytes + row.activation_bytes
        before = run
    held = [each._replace(place=places.index(each.place)) for each in latest.held if each.place in places]
    sequence = tuple(run.key for run in runs if run is not None)
    return replace(latest, groups=tuple(rows), held=tuple(held), outside=outside, sequence=sequence)
