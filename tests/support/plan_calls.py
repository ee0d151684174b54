"""Plans by what they do with each group that they offload."""

from collections.abc import Mapping

from actoffload.schedule import Action, Do, Event, When


def copied(groups: Mapping[int, tuple[int, int]]) -> list[tuple[Event, Action]]:
    """Return the calls of a plan: by group, behind which forward it is released, and before which backward reloaded."""
    found = []
    for group, (released, reloaded) in groups.items():
        found += [
            (Event(When.FORWARD_START, group), Action(Do.OFFLOAD, group)),
            (Event(When.FORWARD_END, released), Action(Do.RELEASE, group)),
            (Event(When.BACKWARD_START, reloaded), Action(Do.RELOAD, group)),
        ]
    return found


def transfer(layer: int, microbatch: int, release: Event, reload: Event) -> list[tuple[Event, Action]]:
    """Return the calls of the plan of a rank for what a layer saves for a microbatch."""
    events = Event(When.FORWARD_START, layer, microbatch), release, reload
    return [(event, Action(do, layer, microbatch)) for event, do in zip(events, Do, strict=True)]
