"""What a handle prints: the choice of groups, and the report of the latest pass and of the recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from .._text import fold_names
from ..device.base import Backend
from ..engine.passes import ModelPass
from ..engine.statistics import Reason
from ..report.build import PassStatistics, on_device
from ..report.memory import Memory, add_note
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.plan import Plan
from .follow import GROUP, KEPT, FollowedModule, Steering, group_name

__all__ = ["add_planned_bytes", "describe", "explain", "group_names"]


def group_names(groups: Sequence[FollowedModule], sequence: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Return a readable name for each group of a sequence."""
    return tuple(group_name(groups[group].name, part) for group, part in sequence)


def describe(modules: Sequence[FollowedModule], plans: GroupPlans, plan: Plan, state: str) -> str:
    """Return which groups were chosen and which of them are offloaded; `state` is "paused", "removed" or empty."""
    groups = [module for module in modules if module.group >= 0]
    names, kinds = group_names(groups, plans.order), plans.kinds(plans.order)
    shown = f" ({state})" if state else ""
    lines = [f"offload of {modules[0].name}{shown}: {len(plan.offloaded)} of {len(names)} groups are offloaded"]
    for kind in dict.fromkeys(kinds):
        of_kind = [k for k, other in enumerate(kinds) if other == kind]
        offloaded = [names[k] for k in of_kind if k in plan.offloaded]
        kept = [names[k] for k in of_kind if k not in plan.offloaded]
        lines.append(f"  {kind}: {len(offloaded)} of {len(of_kind)} offloaded")
        lines += [f"    offloaded  {fold_names(offloaded, most=6)}"] if offloaded else []
        lines += [f"    kept       {fold_names(kept, most=6)}"] if kept else []
    if plan.recomputed:
        lines.append(f"  {len(plan.recomputed)} of {len(names)} groups are recomputed")
    if excluded := [module.name for module in modules if module.role is KEPT]:
        lines.append(f"  keep: {fold_names(excluded, most=6)}")
    if plan.because:
        lines.append(f"  {plan.because}")
    return "\n".join(lines)


def add_planned_bytes(latest: PassStatistics, plan: Plan, names: Sequence[str]) -> PassStatistics:
    """Return statistics with the bytes that a plan has of groups that are recomputed, or were not followed."""
    less = dict(zip(plan.names, plan.recomputed_nbytes, strict=False))
    saved, groups = dict(zip(plan.names, plan.nbytes, strict=False)), []
    for name, (layer, row) in zip(names, latest.groups, strict=True):
        unseen = latest.partly and not row.offloaded and not row.recomputed
        nbytes = max(row.bytes_saved, saved.get(name, 0) * unseen)
        again = less.get(name, 0) * row.recomputed
        groups.append((layer, replace(row, bytes_saved=nbytes, bytes_recomputed=again)))
    return replace(latest, groups=tuple(groups))


# Errors


def explain(
    error: BaseException,
    modules: Sequence[FollowedModule],
    backend: Backend,
    done: ModelPass[GroupKey] | None,
    calls: Sequence[FollowedModule],
    steering: Steering,
) -> None:
    """Add a note to an out-of-memory error: what holds the memory, and what would help.

    `done` is the pass, None in a forward that is not followed; `calls` are those in progress in this thread.
    """
    with suppress(Exception):  # the error matters more than the note
        plan, groups = steering.plan(), [module for module in modules if module.group >= 0]
        memory = Memory(modules[0].module, backend, plan, steering.facts().get("next_choice", ""))
        again = {plan.names[k] for k in (*plan.offloaded, *plan.recomputed)}
        kept = {name: nbytes for name, nbytes in zip(plan.names, plan.nbytes, strict=False) if name not in again}
        if done is None:
            memory.saved.update(kept)
        else:
            with done.lock:
                for name, layer in zip(group_names(groups, done.order.started), done.layers, strict=False):
                    own = kept.get(name, 0) if done.partly else 0  # kept groups are not followed
                    memory.saved[name] = max(on_device(layer), own)
                    memory.refused += sum(storage.nbytes for storage in layer.living() if storage.refused)
                memory.outside = done.kept_outside.get(Reason.OUTSIDE, [0, 0])[1]
        if calls:
            memory.where = f"in the forward of {group_name(calls[-1].name)}"
            memory.is_outside = done is not None and calls[-1].role is not GROUP
        add_note(error, memory)
