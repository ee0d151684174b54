"""The order in which the groups of a model run: expected from the pass before, corrected by what comes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Generic, NamedTuple, TypeVar

from .plan import Plan, Roles
from .schedules import GroupSchedule

__all__ = ["ExecutionOrder", "GroupKey", "Planner", "check_number", "check_types"]

Key = TypeVar("Key")


class ExecutionOrder(Generic[Key]):
    """One pass through the groups of a model.

    A group that was skipped is taken out of what is expected; one that comes unexpectedly, because it is called a
    second time or was skipped before, is put in.  So what is expected is right once a pass runs as the one before.

    Parameters
    ----------
    expected : sequence
        The groups in the order in which they are expected.

    Examples
    --------
    >>> from actoffload.schedule.execution_order import ExecutionOrder
    >>> course = ExecutionOrder("abcd")
    >>> course.arrive("a"), course.arrive("c")
    (True, False)
    >>> course.sequence
    ('a', 'c', 'd')
    """

    def __init__(self, expected: Sequence[Key]) -> None:
        self._expected = expected
        self._next = 0
        self.arrived: list[Key] = []

    def arrive(self, key: Key) -> bool:
        """Note that a group starts; return whether it was the one expected."""
        self.arrived.append(key)
        expected, k = self._expected, self._next
        if k < len(expected) and expected[k] == key:
            self._next += 1
            return True
        while k < len(expected) and expected[k] != key:
            k += 1
        if k < len(expected):  # [guard: skipped groups]
            self._next = k + 1
        return False

    @property
    def complete(self) -> bool:
        """Whether nothing more is expected."""
        return self._next >= len(self._expected)  # [guard: complete execution order -> False]

    @property
    def sequence(self) -> tuple[Key, ...]:
        """What has come, and what is expected to follow."""
        return (*self.arrived, *self._expected[self._next :])


class GroupKey(NamedTuple):
    """One stretch of the forward of a chosen module.

    Parameters
    ----------
    group : int
        Which of the chosen modules.
    part : int
        0, and more where the module goes on after another chosen one inside it has run.
    """

    group: int
    part: int = 0


class Planner:
    """Makes plans for sequences of groups, and expects of each pass the sequence of the one before.

    Parameters
    ----------
    schedule : GroupSchedule
        Which groups leave, and when.
    kinds : sequence of str
        The kind of each chosen module.
    """

    def __init__(self, schedule: GroupSchedule, kinds: Sequence[str]) -> None:
        self.schedule = schedule
        self._kinds = tuple(kinds)
        # Until the model has run, its modules are expected in the order in which they were registered.
        self.expected: tuple[GroupKey, ...] = tuple(GroupKey(k) for k in range(len(kinds)))
        self._known: dict[tuple[GroupKey, ...], Roles] = {}

    def reschedule(self, schedule: GroupSchedule) -> None:
        """Plan by another schedule from the next pass on."""
        self.schedule = schedule
        self._known.clear()  # [guard: plans of an earlier schedule]

    def kinds(self, sequence: Sequence[GroupKey]) -> list[str]:
        """Return the kinds of the groups of a sequence."""
        return [self._kinds[key.group] + (f" (part {key.part + 1})" if key.part else "") for key in sequence]

    def plan(self, sequence: Sequence[GroupKey]) -> Plan:
        """Return the plan for a sequence."""
        return self.schedule.plan(self.kinds(sequence))

    def roles(self, sequence: tuple[GroupKey, ...]) -> Roles:
        """Return what the plan for a sequence means; made once."""
        found = self._known.get(sequence)
        if found is None:
            # [guard: number of cached plans]
            if len(self._known) >= 64:  # a model whose order changes all the time
                self._known.clear()
            found = self._known[sequence] = Roles.of(self.plan(sequence), planned=True)
        return found

    def learn(self, sequence: Sequence[GroupKey]) -> None:
        """Expect this sequence from now on."""
        if sequence:
            self.expected = tuple(sequence)  # [guard: learned execution order]


def check_types(**arguments: object) -> None:
    """Refuse arguments of `offload`, given by their names, that are no numbers, or not whole ones.

    Raises
    ------
    TypeError
        With the name and the value of the first such argument.
    """
    for name, value in arguments.items():
        if name == "fraction":
            fine, expected = isinstance(value, Real), "a part of the groups, from 0.0 to 1.0"
        elif name == "min_bytes":
            fine, expected = isinstance(value, Integral), "a whole number of bytes"
        else:
            fine, expected = value is None or isinstance(value, Integral), "a whole number, or None"
        if not fine or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; expected {expected}.")


def check_number(num_layers: int | None, *sequences: Sequence[str]) -> None:
    """Refuse to offload every group of all kinds.

    Parameters
    ----------
    num_layers : int or None
        How many of each kind are to leave.
    *sequences : sequence of str
        The kinds of the groups: as they were chosen and, once that is known, as they run.  One that is called several
        times cannot be judged before.

    Raises
    ------
    ValueError
        If there are not so many in any of the sequences.
    """
    largest = max(kinds.count(kind) for kinds in sequences for kind in set(kinds))
    if num_layers is not None and num_layers >= largest > 1:
        raise ValueError(
            f"num_layers is {num_layers}, but there are {largest} groups of a kind, and the last has to stay: backward "
            f"begins with it. Give at most {largest - 1}."
        )
