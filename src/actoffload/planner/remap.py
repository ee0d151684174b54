"""Move a plan to another sequence of groups: some were skipped, came twice, or ran in another order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..schedule.plan import Action, Do, Event, Plan, When, leanest_calls

__all__ = ["remap"]

Place = tuple[int, int]  # of the event among those of the new plan; of the action among those of the earlier plan


def remap(
    plan: Plan, names: Sequence[str], others: Sequence[str], *, offload_others: bool = False
) -> tuple[Plan, tuple[int | None, ...]]:
    """Return the plan for other groups than `names`, and the earlier position of each, None for new groups.

    `offload_others`: new groups are offloaded as in `Roles.leanest`, and so is the last one, if others follow it now.
    """
    places: dict[tuple[str, int], int] = {_nth(names, k): k for k in range(len(names))}
    earlier = tuple(places.get(_nth(others, k)) for k in range(len(others)))
    now = {k: position for position, k in enumerate(earlier) if k is not None}
    moved = Plan(len(others))
    events = list(moved.events())
    order = {event: k for k, event in enumerate(events)}
    # For each earlier event, the place of itself or of the next one in time whose group still runs.
    target: dict[Event, int] = {}
    place = len(events)
    for event in reversed(list(plan.events())):
        if event.layer in now:
            place = order[Event(event.when, now[event.layer])]
        target[event] = place
    found: dict[int, list[tuple[int, int, Action]]] = {}
    acts = ((event, act) for event in plan.events() for act in plan.at(event.when, event.layer))
    for number, (event, act) in enumerate(acts):
        if act.layer in now:
            found.setdefault(now[act.layer], []).append((target[event], number, Action(act.do, now[act.layer])))
    calls = [call for layer, mine in found.items() if layer < len(others) - 1 for call in _valid(layer, mine, order)]
    if offload_others:
        new = [k for k, before in enumerate(earlier[:-1]) if before in (None, len(names) - 1) and k not in found]
        # [guard: groups that a plan does not know]
        calls += ((order[event], k, action) for k in new for event, action in leanest_calls(k))
    calls.sort(key=lambda call: call[:2])
    return Plan.of(len(others), ((events[place], action) for place, _, action in calls)), earlier


def _nth(names: Sequence[str], position: int) -> tuple[str, int]:
    """Return a name and how many times it comes before a position."""
    return names[position], names[:position].count(names[position])


def _valid(
    layer: int, actions: Iterable[tuple[int, int, Action]], order: dict[Event, int]
) -> list[tuple[int, int, Action]]:
    """Return the actions of a layer, each moved behind those before it; none if they do not fit before its backward."""
    begins = order[Event(When.BACKWARD_START, layer)]
    earliest = order[Event(When.FORWARD_START, layer)]
    events = list(order)
    valid: list[tuple[int, int, Action]] = []
    for place, number, action in actions:
        if action.do is Do.RELEASE:
            earliest = max(earliest, order[Event(When.FORWARD_END, layer)])  # [guard: moved release]
        if action.do is Do.INCREMENTAL_RELEASE:  # the release does the rest
            moved = place < earliest or place >= begins or events[place].when is not When.FORWARD_START
            if moved or place < order[Event(When.FORWARD_END, layer)]:
                continue
        earliest = max(earliest, place)  # [guard: moved action]
        if action.do is Do.RELOAD:
            earliest = min(earliest, begins)  # [guard: moved reload]
        if earliest > begins or (earliest == begins and action.do is Do.RELEASE):
            return []
        valid.append((earliest, number, action))
    return valid
