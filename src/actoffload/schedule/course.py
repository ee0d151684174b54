"""The order in which the groups of a model run: expected from the pass before, corrected by what comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["Course"]

Key = TypeVar("Key")


class Course(Generic[Key]):
    """One pass through the groups of a model.

    A group that was skipped is taken out of what is expected; one that comes unexpectedly, because it is called a
    second time or was skipped before, is put in.  So what is expected is right once a pass runs as the one before.

    Parameters
    ----------
    expected : sequence
        The groups in the order in which they are expected.

    Examples
    --------
    >>> from actoffload.schedule.course import Course
    >>> course = Course("abcd")
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
        if k < len(expected):
            self._next = k + 1
        return False

    @property
    def complete(self) -> bool:
        """Whether nothing more is expected."""
        return self._next >= len(self._expected)

    @property
    def sequence(self) -> tuple[Key, ...]:
        """What has come, and what is expected to follow."""
        return (*self.arrived, *self._expected[self._next :])
