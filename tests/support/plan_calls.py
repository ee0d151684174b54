"""Plans of a model by what they do with each group that they offload."""

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
