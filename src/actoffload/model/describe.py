"""What a handle prints: the groups that were chosen, and which of them are offloaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..report.tables import fold_names
from ..schedule.execution_order import GroupPlans
from ..schedule.plan import Do
from .tracker import KEPT, FollowedModule

__all__ = ["describe", "group_names"]


def group_names(groups: Sequence[FollowedModule], sequence: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Return a readable name for each group of a sequence."""
    names = []
    for group, part in sequence:
        name = groups[group].name or "(the whole model)"
        names.append(f"{name} (part {part + 1})" if part else name)
    return tuple(names)


def describe(modules: Sequence[FollowedModule], plans: GroupPlans, state: str = "") -> str:
    """Return the description of a handle.

    Parameters
    ----------
    modules : sequence of FollowedModule
        The model, its groups and the kept modules.
    plans : GroupPlans
        The expected execution order, and the plan for it.
    state : str
        "paused", "removed", or empty.
    """
    groups = [of for of in modules if of.group >= 0]
    sequence = plans.order
    names, kinds, plan = group_names(groups, sequence), plans.kinds(sequence), plans.plan(sequence)
    leaving = plan.offloaded
    shown = f" ({state})" if state else ""
    lines = [f"offload of {modules[0].name}{shown}: {len(leaving)} of {len(sequence)} groups are offloaded"]
    for kind in dict.fromkeys(kinds):
        of_kind = [k for k, other in enumerate(kinds) if other == kind]
        out = [names[k] for k in of_kind if k in leaving]
        stay = [names[k] for k in of_kind if k not in leaving]
        lines.append(f"  {kind}: {len(out)} of {len(of_kind)} offloaded")
        lines += [f"    offloaded  {fold_names(out, most=6)}"] if out else []
        lines += [f"    kept       {fold_names(stay, most=6)}"] if stay else []
    kept = [of.name for of in modules if of.role is KEPT]
    if kept:
        lines.append(f"  keep: {fold_names(kept, most=6)}")
    if leaving:
        first = leaving[0]
        release = plan.find(Do.RELEASE, first)
        assert release is not None
        far = release.layer - first
        lines.append(f"  each is freed while the group {far} place{'s' * (far > 1)} after it computes")
    return "\n".join(lines)
