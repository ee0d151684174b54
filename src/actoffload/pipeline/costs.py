"""What a microbatch costs on the stages of a rank, from what was saved and, on an accelerator, measured."""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule.costs import LayerCost, Saved
from ..schedule.pipeline import SplitCost, StageCost
from .conductor import Learned

__all__ = ["even_costs"]

FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0
"""Seconds of each group where nothing is measured."""


def even_costs(stage: int, sizes: Sequence[Sequence[int]], learned: Learned) -> StageCost:
    """Return the cost of a stage whose groups save storages of these sizes, with the same times for all groups."""
    groups, splits = [], []
    for k, of_group in enumerate(sizes):
        groups.append(LayerCost(FORWARD, INPUT + WEIGHT, _evenly(of_group)))
        used = learned.used.get((stage, k), frozenset())
        kept = sum(nbytes for place, nbytes in enumerate(of_group) if place in used)
        splits.append(SplitCost(INPUT, WEIGHT, kept))
    split = learned.split.get(stage, False)
    return StageCost(tuple(groups), tuple(splits) if split else (), learned.boundary.get(stage, 0))


def _evenly(sizes: Sequence[int]) -> tuple[Saved, ...]:
    """Return storages that are saved at equal distances, and needed in reverse order."""
    count = len(sizes)
    return tuple(Saved(nbytes, (k + 1) / count, (count - 1 - k) / count) for k, nbytes in enumerate(sizes) if nbytes)
