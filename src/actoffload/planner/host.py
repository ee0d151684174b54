"""Costs as they are for a faster or a slower host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .variants import Variant

__all__ = ["with_host"]


def with_host(groups: Sequence[Sequence[Variant]], factor: float) -> list[tuple[Variant, ...]]:
    """Return the ways to run groups with the times of the host multiplied by a factor.

    Where steps are short, the host decides what a plan takes: a group of which outputs of operators are saved is much
    work for it.  On a machine that others use it may be twice as slow in one step as in the next, so what one step
    showed of it says little.

    Examples
    --------
    >>> from actoffload.planner import Variant
    >>> from actoffload.planner.host import with_host
    >>> from actoffload.schedule import LayerCost
    >>> group = (Variant(LayerCost(0.010, 0.020, host_forward=0.004, host_backward=0.001)),)
    >>> [[way]] = with_host([group], 2.0)
    >>> way.cost.host_forward, way.cost.host_backward
    (0.008, 0.002)
    """

    def scaled(way: Variant) -> Variant:
        cost = way.cost
        forward, backward = factor * cost.host_forward, factor * cost.host_backward
        return replace(way, cost=replace(cost, host_forward=forward, host_backward=backward))

    return [tuple(map(scaled, group)) for group in groups]
