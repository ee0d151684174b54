"""Temporary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..schedule.plan import Plan


@dataclass(frozen=True)
class GroupPlan:
    names: tuple[str, ...]
    plan: Plan
    nbytes: tuple[int, ...] = ()
    seconds: float | None = None
    baseline_seconds: float | None = None
    peak_bytes: int | None = None
    because: str = ""

    @property
    def offloaded(self) -> tuple[int, ...]:
        return self.plan.offloaded

    @property
    def offloaded_bytes(self) -> int:
        return sum(self.nbytes[k] for k in self.offloaded)

    def remapped(self, names):
        return self if tuple(names) == self.names else replace(self, names=tuple(names), plan=Plan(max(len(names), 1)), nbytes=(0,) * len(names))


def choose(names, layers, link, *, limit=None, host_seconds=0.0, tolerance=0.002):
    return GroupPlan(tuple(names), Plan(len(names)), (0,) * len(names))
