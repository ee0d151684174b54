"""What the ranks of a pipeline exchange: their arguments before the first step, and what was measured before they plan.

`[Note: collectives]`  Each rank of the pipeline calls the same collectives: one when its first step begins, one when
the step after the measured ones begins, and one behind each trial of a plan.  Steps with backward are counted, and all
ranks run the same number.  If a rank has not measured a whole step, all ranks see that, and try again when the next
step begins.  A rank that later
runs another order plans anew alone, with what the others sent before, because they do not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..planner import Variant
from ..schedule.costs import Link
from ..schedule.pipeline import StageCost, Step

__all__ = ["Measured", "Settings", "Tried", "disagreement", "gather"]

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The arguments of one rank, and what is wrong with them."""

    rank: int
    arguments: Mapping[str, Any]  # those that have to be the same on all ranks
    problem: str = ""


@dataclass(frozen=True)
class Measured:
    """What one rank knows before all of them plan."""

    rank: int
    order: tuple[Step, ...]
    names: Mapping[int, tuple[str, ...]]  # by stage
    costs: Mapping[int, StageCost]  # by stage
    link: Link
    limit: int | None = None  # bytes of device memory
    again: Mapping[int, Sequence[tuple[Variant, ...]]] | None = None  # by stage and group: the ways to run it
    bare: bool = False  # a step without offloading fits into its memory


@dataclass(frozen=True)
class Tried:
    """What one rank knows of a plan that all of them have tried."""

    seconds: float  # of a step with the plan
    without: float | None  # of a step without offloading, where all ranks have room for it


def gather(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks of a pipeline, in every rank, in the order of their ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def disagreement(settings: Sequence[Settings]) -> str:
    """Return what is wrong with the arguments of the ranks, in words that are the same on each; empty if nothing is.

    >>> from actoffload.pipeline.exchange import Settings, disagreement
    >>> wrong = disagreement([Settings(0, {"fraction": 0.5}), Settings(1, {"fraction": None})])
    >>> wrong.endswith("fraction is 0.5 on rank 0 and None on rank 1. Pass the same on every rank.")
    True
    """
    for each in settings:
        if each.problem:
            return f"Rank {each.rank} of the pipeline: {each.problem}"
    first = settings[0]
    for other in settings[1:]:
        for name, value in first.arguments.items():
            if other.arguments.get(name) != value:
                theirs = f"{other.arguments.get(name)} on rank {other.rank}"
                return (
                    f"The ranks of the pipeline called offload with different arguments: {name} is {value} on rank "
                    f"{first.rank} and {theirs}. Pass the same on every rank."
                )
    return ""
