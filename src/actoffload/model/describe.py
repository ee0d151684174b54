"""What a handle prints: the groups that were chosen, and which of them leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..report.tables import fold_names
from ..schedule.execution_order import Planner
from ..schedule.plan import Do
from .tracker import KEPT, Place

__all__ = ["describe", "group_names"]


def group_names(groups: Sequence[Place], sequence: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Return a readable name for each group of a sequence."""
    names = []
    for group, part in sequence:
        name = groups[group].name or "(the whole model)"
        names.append(f"{name} (part {part + 1})" if part else name)
    return tuple(names)


def describe(places: Sequence[Place], planner: Planner, state: str = "") -> str:
    """Return the description of a handle.

    Parameters
    ----------
    places : sequence of Place
        The model, its groups, and what is kept.
    planner : Planner
        What is expected, and the plan for it.
    state : str
        What the reader should know first: that offloading is paused, or has ended.
    """
    groups = [place for place in places if place.group >= 0]
    sequence = planner.expected
    names, kinds, plan = group_names(groups, sequence), planner.kinds(sequence), planner.plan(sequence)
    leaving = plan.offloaded
    shown = f" ({state})" if state else ""
    lines = [f"offload of {places[0].name}{shown}: {len(leaving)} of {len(sequence)} groups leave the device"]
    for kind in dict.fromkeys(kinds):
        of_kind = [k for k, other in enumerate(kinds) if other == kind]
        out = [names[k] for k in of_kind if k in leaving]
        stay = [names[k] for k in of_kind if k not in leaving]
        lines.append(f"  {kind}: {len(out)} of {len(of_kind)} leave")
        lines += [f"    leave  {fold_names(out, most=6)}"] if out else []
        lines += [f"    stay   {fold_names(stay, most=6)}"] if stay else []
    kept = [place.name for place in places if place.role is KEPT]
    if kept:
        lines.append(f"  kept: {fold_names(kept, most=6)}")
    if leaving:
        first = leaving[0]
        release = plan.find(Do.RELEASE, first)
        assert release is not None
        far = release.layer - first
        lines.append(f"  each leaves while the group {far} place{'s' * (far > 1)} behind it computes")
    return "\n".join(lines)
