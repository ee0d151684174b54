"""What the operators of replayed groups cost, from the times of their proof."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median
from typing import Any

from ..device.base import Backend
from ..planner import OperatorCost
from ..replay import Program, Weight

__all__ = ["OperatorTimes"]


class OperatorTimes:
    """The operators of groups, as they were timed when their programs were proven."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[int, tuple[Program, Mapping[int, tuple[Any, Any]]]] = {}

    @property
    def groups(self) -> frozenset[int]:
        """The groups whose operators were timed."""
        return frozenset(self._known)

    def add(self, group: int, program: Program, times: Mapping[int, tuple[Any, Any]]) -> None:
        """Take the events around the operators of a program."""
        self._known.setdefault(group, (program, times))

    def costs(self) -> dict[int, list[OperatorCost]]:
        """Return the operators of each group in the order in which they run.

        Groups with the same operators and sizes take the same time: the median.
        """
        elapsed = self._backend.elapsed
        found: dict[int, list[OperatorCost]] = {}
        alike: dict[Hashable, list[int]] = {}
        for group, (program, times) in self._known.items():
            values = program.trace.values
            key = tuple(
                (step.node.name, *(values[value].nbytes for _, value in step.made)) for step in program.steps.values()
            )
            alike.setdefault((key, *times), []).append(group)
        for groups in alike.values():
            program, _ = self._known[groups[0]]
            place = {number: k for k, number in enumerate(program.steps)}
            saved = {entry.value for entry in program.trace.entries}
            costs = []
            for number, step in program.steps.items():
                seconds = median(elapsed(*self._known[group][1][number]) for group in groups)
                sizes = tuple(
                    program.trace.values[value].nbytes
                    for _, value in step.made
                    if value in saved and program.trace.values[value].nbytes >= program.min_bytes
                )
                makers = {program.trace.values[value].maker for value in step.reads if value not in program.sources}
                unsaved = {
                    program.trace.values[value].maker
                    for value in step.reads
                    if value not in program.sources and value not in saved
                }
                kept = 0
                if step.reads and all(isinstance(program.sources.get(value), Weight) for value in step.reads):
                    kept, sizes = sum(sizes), ()
                returned = [value for _, value in step.made if value in program.trace.returned]
                costs.append(
                    OperatorCost(
                        step.node.name,
                        max(seconds, 0.0),
                        sizes,
                        reads=tuple(sorted(place[maker] for maker in makers if maker in place)),
                        needed=any(value in program.dropped for _, value in step.made),
                        returned=sum(program.trace.values[value].nbytes for value in returned),
                        unsaved=tuple(sorted(place[maker] for maker in unsaved if maker in place)),
                        segment=step.node.segment,
                        kept=kept,
                    )
                )
            found.update(dict.fromkeys(groups, costs))
        return found
