"""What a microbatch costs on the stages of a rank, from what was saved and, on an accelerator, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedule.costs import LayerCost, Saved
from ..schedule.pipeline import Computation, SplitCost, StageCost
from .conductor import Learned
from .metering import StepMeter

__all__ = ["even_costs", "measured_costs"]

FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0
"""Seconds of each group where nothing is measured."""


def even_costs(
    stage: int, saved: Sequence[Sequence[tuple[int, int]]], learned: Learned, outside: int = 0, other_bytes: int = 0
) -> StageCost:
    """Return the cost of a stage, with the same times for all groups.

    Parameters
    ----------
    stage : int
        Its index.
    saved : sequence
        For each group the place and the bytes of each storage that it saves.
    learned : Learned
        What the steps showed.
    outside : int
        Bytes that a microbatch saves outside of the groups.
    other_bytes : int
        Bytes that are always on the device.
    """
    groups, splits = [], []
    for k, of_group in enumerate(saved):
        groups.append(LayerCost(FORWARD, INPUT + WEIGHT, _evenly([nbytes for _, nbytes in of_group])))
        used = learned.used.get((stage, k), frozenset())
        kept = sum(nbytes for place, nbytes in of_group if place in used)
        splits.append(SplitCost(INPUT, WEIGHT, kept))
    # The first stage has no inputs of which to compute gradients.  Another may have run nothing in the latest step.
    late = {step.stage for step in learned.order if step.computation is Computation.BACKWARD_INPUT}
    split = learned.split.get(stage, False) or (stage > 0 and stage in late)
    sent = learned.sent.get(stage, 0)
    return StageCost(
        tuple(groups),
        tuple(splits) if split else (),
        learned.boundary.get(stage, 0) + outside,
        sent_forward=sent,
        sent_backward=learned.sent.get(stage - 1, sent),
        other_bytes=other_bytes,
    )


def measured_costs(stage: int, even: StageCost, meter: StepMeter) -> StageCost:
    """Return the cost of a stage with the times of a step; what the step did not show stays as in `even`."""
    count = len(even.groups)
    forward = meter.groups(stage, Computation.FORWARD, count)
    halves = meter.groups(stage, Computation.BACKWARD_INPUT, count)
    backward = meter.groups(stage, Computation.BACKWARD, count)
    weight = meter.computations(stage, Computation.BACKWARD_WEIGHT)
    if backward is None and not even.splits:  # the weight backward is the full one
        backward = meter.groups(stage, Computation.BACKWARD_WEIGHT, count)
    if forward is None or (backward is None and halves is None):
        return even
    whole = sum(of.seconds for of in halves) if halves else 0.0
    splits = []
    for k, split in enumerate(even.splits):
        if halves is not None and weight is not None:
            part = halves[k].seconds / whole if whole else 1 / count
            split = replace(split, input_seconds=halves[k].seconds, weight_seconds=weight * part)
        elif backward is not None:
            split = replace(split, input_seconds=backward[k].seconds / 2, weight_seconds=backward[k].seconds / 2)
        splits.append(split)
    groups = []
    for k, group in enumerate(even.groups):
        seconds = backward[k].seconds if backward else splits[k].input_seconds + splits[k].weight_seconds
        gap = (backward or halves or forward)[k].gap
        groups.append(
            replace(
                group,
                forward=forward[k].seconds,
                gap_forward=forward[k].gap,
                backward=seconds,
                gap_backward=gap,
            )
        )
    return replace(even, groups=tuple(groups), splits=tuple(splits))


def _evenly(sizes: Sequence[int]) -> tuple[Saved, ...]:
    """Return storages that are saved at equal distances, and needed in reverse order."""
    count = len(sizes)
    return tuple(Saved(nbytes, (k + 1) / count, (count - 1 - k) / count) for k, nbytes in enumerate(sizes) if nbytes)
