"""Which groups of the stages of a pipeline are recomputed, and what the stages cost then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..schedule.costs import LayerCost
from ..schedule.pipeline import SplitCost, StageCost
from ..schedule.pipeline_plan import PipelinePlan
from .variants import Variant

__all__ = ["StageVariants", "Ways", "recomputed", "saved_by", "upgrades", "ways_of"]

StageVariants: TypeAlias = Mapping[int, Sequence[Sequence[Variant]]]
"""For some stages the ways to run each group, as `variants` returns them: the first without recomputation."""

Ways: TypeAlias = Mapping[tuple[int, int], int]
"""By stage and group the position of the way that is taken; others are run without recomputation."""


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """From one way of a group to one that saves less."""

    price: float  # seconds for each byte
    stage: int
    group: int
    way: int


def upgrades(variants: StageVariants, stages: Iterable[int]) -> list[dict[tuple[int, int], int]]:
    """Return ways to run the groups of some stages, from no recomputation to the most, the cheapest bytes first."""
    steps: list[_Upgrade] = []
    for stage in sorted(set(stages) & set(variants)):
        for group, ways in enumerate(variants[stage]):
            steps += _worthwhile(stage, group, [way.cost for way in ways])
    found: list[dict[tuple[int, int], int]] = [{}]
    for step in sorted(steps, key=lambda of: (of.price, of.stage, of.group, of.way)):
        found.append({**found[-1], (step.stage, step.group): step.way})
    return found


def _worthwhile(stage: int, group: int, costs: Sequence[LayerCost]) -> list[_Upgrade]:
    """Return the ways of one group such that each further byte costs more than those before it."""
    found: list[_Upgrade] = []
    for way in range(1, len(costs)):
        while True:
            before = found[-1].way if found else 0
            less = costs[before].nbytes - costs[way].nbytes
            if less <= 0:
                break
            price = (_seconds(costs[way]) - _seconds(costs[before])) / less
            if not found or price >= found[-1].price:
                found.append(_Upgrade(price, stage, group, way))
                break
            found.pop()
    return found


def _seconds(cost: LayerCost) -> float:
    return cost.forward + cost.backward


def recomputed(stages: Sequence[StageCost], variants: StageVariants, ways: Ways) -> tuple[StageCost, ...]:
    """Return what the stages cost if their groups are run in some ways."""
    found = list(stages)
    for stage in sorted({stage for stage, _ in ways}):
        cost = stages[stage]
        groups, splits = list(cost.groups), list(cost.splits)
        for group, of in enumerate(cost.groups):
            way = ways.get((stage, group))
            if way is None:
                continue
            taken = variants[stage][group][way]
            groups[group] = taken.cost
            if splits:
                splits[group] = _split(splits[group], of, taken)
        found[stage] = replace(cost, groups=tuple(groups), splits=tuple(splits))
    return tuple(found)


def _split(split: SplitCost, plain: LayerCost, way: Variant) -> SplitCost:
    """Return the split of a recomputed group: it is recomputed once, in the input backward.

    What the weight backward reads and the group does not save is recomputed, and stays until then.
    """
    seconds = max(split.input_seconds + way.cost.backward - plain.backward, 0.0)
    kept = min(split.kept if way.read_again is None else way.read_again, way.cost.nbytes)
    return replace(split, input_seconds=seconds, kept=kept, recomputed=max(split.kept - kept, 0))


def ways_of(plans: Iterable[PipelinePlan], variants: StageVariants) -> dict[tuple[int, int], int]:
    """Return the ways in which plans recompute groups."""
    return {
        (stage, group): next(way for way, of in enumerate(variants[stage][group]) if of.saves == names)
        for plan in plans
        for stage, saves in plan.saves.items()
        for group, names in enumerate(saves)
        if names is not None
    }


def saved_by(
    stages: Sequence[StageCost], variants: StageVariants, ways: Ways
) -> dict[int, tuple[tuple[str, ...] | None, ...]]:
    """Return for each stage with recomputation what its groups save: see `PipelinePlan.saves`."""
    found = {}
    for stage in sorted({stage for stage, _ in ways}):
        groups = range(len(stages[stage].groups))
        found[stage] = tuple(
            variants[stage][group][ways[stage, group]].saves if (stage, group) in ways else None for group in groups
        )
    return found
