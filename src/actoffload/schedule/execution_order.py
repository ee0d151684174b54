"""The order in which the groups of a model run, and the plans for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from .plan import Plan, Roles
from .schedules import GroupSchedule

__all__ = ["ExecutionOrder", "GroupKey", "GroupPlans"]

Key = TypeVar("Key")


class ExecutionOrder(Generic[Key]):
    """The order of the groups in one pass: as in an earlier pass, and corrected as groups run.

    A group that is skipped is removed.  A group that runs out of order, because it is called a second time or was
    skipped before, is inserted.

    >>> from actoffload.schedule.execution_order import ExecutionOrder
    >>> order = ExecutionOrder("abcd")
    >>> order.start("a"), order.start("c")
    (True, False)
    >>> order.sequence
    ('a', 'c', 'd')
    """

    def __init__(self, earlier: Sequence[Key]) -> None:
        self._earlier = earlier
        self._next = 0
        self.started: list[Key] = []

    def start(self, key: Key) -> bool:
        """Note that a group starts; return whether it is the next one in the order."""
        self.started.append(key)
        earlier, k = self._earlier, self._next
        if k < len(earlier) and earlier[k] == key:
            self._next += 1
            return True
        while k < len(earlier) and earlier[k] != key:
            k += 1
        if k < len(earlier):  # [guard: skipped groups]
            self._next = k + 1
        return False

    @property
    def complete(self) -> bool:
        """Whether the last group of the order has started."""
        return self._next >= len(self._earlier)  # [guard: complete execution order -> False]

    @property
    def sequence(self) -> tuple[Key, ...]:
        """The groups that have started, and those that follow in the order."""
        return (*self.started, *self._earlier[self._next :])


class GroupKey(NamedTuple):
    """One stretch of the forward of a chosen module; `part` counts the times it went on after another one inside it."""

    group: int
    part: int = 0


class GroupPlans:
    """The plans of a schedule for sequences of groups, given the kind of each chosen module."""

    def __init__(self, schedule: GroupSchedule, kinds: Sequence[str]) -> None:
        self.schedule = schedule
        self._kinds = tuple(kinds)
        # Of the latest pass; before the first one, the order in which modules are registered.
        self.order: tuple[GroupKey, ...] = tuple(GroupKey(k) for k in range(len(kinds)))
        self._known: dict[tuple[GroupKey, ...], Roles] = {}

    def kinds(self, sequence: Sequence[GroupKey]) -> list[str]:
        """Return the kinds of the groups of a sequence."""
        return [self._kinds[key.group] + (f" (part {key.part + 1})" if key.part else "") for key in sequence]

    def plan(self, sequence: Sequence[GroupKey]) -> Plan:
        """Return the plan for a sequence."""
        return self.schedule.plan(self.kinds(sequence))

    def roles(self, sequence: tuple[GroupKey, ...]) -> Roles:
        """Return the roles of the layers in the plan for a sequence; made once."""
        found = self._known.get(sequence)
        if found is None:
            # [guard: number of cached plans]
            if len(self._known) >= 64:  # a model whose order changes all the time
                self._known.clear()
            found = self._known[sequence] = Roles.of(self.plan(sequence), planned=True)
        return found

    def learn(self, sequence: Sequence[GroupKey]) -> None:
        """Set the execution order of the latest pass."""
        if sequence:
            self.order = tuple(sequence)  # [guard: learned execution order]
