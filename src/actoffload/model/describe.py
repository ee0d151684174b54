"""What a handle prints: the groups that were chosen, and which of them leave."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..schedule.execution_order import Planner
from ..schedule.plan import Do
from .tracker import KEPT, Place

__all__ = ["describe", "fold", "group_names"]


def group_names(groups: Sequence[Place], sequence: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Return a readable name for each group of a sequence."""
    names = []
    for group, part in sequence:
        name = groups[group].name or "(the whole model)"
        names.append(f"{name} (part {part + 1})" if part else name)
    return tuple(names)


def fold(names: Sequence[str]) -> list[str]:
    """Fold names that differ in one number, which counts up by one, into ranges, and equal ones into one.

    Examples
    --------
    >>> from actoffload.model.describe import fold
    >>> fold(["layers.0", "layers.1", "layers.2", "head"])
    ['layers.0 ... layers.2', 'head']
    >>> fold(["layer", "layer", "layer"])
    ['layer (3 times)']
    """
    return [_folded(part) for part in _parts(names)]


def _parts(names: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for name in names:
        last = found[-1] if found else []
        equal = set(last) == {name}
        if equal or (last and (len(last) == 1 or last[0] != last[-1]) and _follows(last[-1], name)):
            last.append(name)
        else:
            found.append([name])
    return found


def _folded(part: Sequence[str]) -> str:
    if len(part) == 1:
        return part[0]
    return f"{part[0]} ... {part[-1]}" if part[0] != part[-1] else f"{part[0]} ({len(part)} times)"


def _follows(before: str, name: str) -> bool:
    """Whether two names differ in one number only, which is one more in the second."""
    old, new = re.split(r"(\d+)", before), re.split(r"(\d+)", name)
    differ = [k for k in range(len(old)) if old[k] != new[k]] if len(old) == len(new) else []
    return len(differ) == 1 and differ[0] % 2 == 1 and int(new[differ[0]]) == int(old[differ[0]]) + 1


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
        lines += [f"    leave  {_shown(out)}"] if out else []
        lines += [f"    stay   {_shown(stay)}"] if stay else []
    kept = [place.name for place in places if place.role is KEPT]
    if kept:
        lines.append(f"  kept: {_shown(kept)}")
    if leaving:
        first = leaving[0]
        release = plan.find(Do.RELEASE, first)
        assert release is not None
        far = release.layer - first
        lines.append(f"  each leaves while the group {far} place{'s' * (far > 1)} behind it computes")
    return "\n".join(lines)


def _shown(names: Sequence[str], most: int = 6) -> str:
    parts = _parts(names)
    more = sum(map(len, parts[most:]))
    return ", ".join(map(_folded, parts[:most])) + (f", and {more} more" if more else "")
