"""The ways to run each group, from the passes in which groups were recomputed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import log2

from ...planner import OperatorCost, Variant, variants
from ...planner.variants import within
from ...replay import Policy
from ...schedule.costs import LayerCost
from ..conduct import FollowedModule
from .group_costs import at_the_pace_of, beside, for_inputs, layer_costs, steady, without_hooks
from .timed_pass import TimedPass

__all__ = ["HOST_SECONDS", "Ways", "timed_operators"]

HOST_SECONDS = 60e-6  # of the host for one tensor that is offloaded, unless measured


class Ways:
    """Finds the ways to run the groups of a model, of which those with a policy may be recomputed."""

    def __init__(self, groups: Sequence[FollowedModule], policies: Mapping[int, Policy]) -> None:
        self._groups, self._policies = groups, policies

    def operators(
        self, costs: Mapping[int, list[OperatorCost]], layers: Mapping[int, LayerCost]
    ) -> dict[int, tuple[OperatorCost, ...]]:
        """Return the operators of each group that are known, with times that add up to that of its forward.

        `layers` has the costs without recomputation.  The first call of a structure is watched and not recomputed; then
        those of a group of the same kind are taken.
        """
        found = {group: within(of, layers[group].forward) for group, of in costs.items() if group in layers}
        kinds = {group: (self._type(group), of.nbytes) for group, of in layers.items()}
        alike = {kinds[group]: of for group, of in reversed(found.items())}
        return {group: alike[kind] for group, kind in kinds.items() if kind in alike} | found

    def of(
        self,
        operators: Mapping[int, tuple[OperatorCost, ...]],
        layers: Sequence[LayerCost],
        again: TimedPass,
        timed: TimedPass,
        whole: TimedPass | None,
        elements: int,
        allocated: int,
    ) -> list[tuple[Variant, ...]]:
        """Return the variants of each group.

        Parameters
        ----------
        operators : mapping of int to tuple of OperatorCost
            As `operators` returns them.
        layers : sequence of LayerCost
            The groups without recomputation.
        again : TimedPass
            A pass in which all groups were recomputed, but for outputs that are worth saving, and offloaded.
        timed : TimedPass
            The same without offloading, or `again`.
        whole : TimedPass, optional
            A pass in which all groups were recomputed as a whole and offloaded.
        elements : int
            Of the inputs that the variants are for, as `layers` are; those of these passes may have had more or fewer.
        allocated : int
            Bytes that may be allocated before a pass.
        """
        # Blocks of one type may be of several sizes, as in a ResNet; in a kind they differ by less than half.
        sizes = [round(2 * log2(of.nbytes + 1)) for of in layers]
        kinds = [(self._type(key.group), size) for key, size in zip(again.sequence, sizes, strict=True)]
        costs = _alone(again, timed, kinds, elements, allocated)
        wholes: Sequence[LayerCost | None] = [None] * len(costs)
        if whole is not None and whole.sequence == again.sequence:
            wholes = _alone(whole, whole, kinds, elements, allocated)
        owns = beside(costs, at_the_pace_of(costs, steady(layers, kinds)))
        times = Counter(key.group for key in again.sequence)
        found = list[tuple[Variant, ...]]()
        for key, own, cost, least in zip(again.sequence, owns, costs, wholes, strict=True):
            # One that saves as much was not recomputed; one that runs several times would have one way for all of them.
            if key.group not in self._policies or times[key.group] > 1:
                found.append((Variant(own),))
            elif cost.nbytes < own.nbytes:
                found.append(variants(own, cost, operators.get(key.group, ()), least))
            elif least is not None and least.nbytes < own.nbytes:
                found.append(variants(own, least))
            else:
                found.append((Variant(own),))
        return found

    def _type(self, group: int) -> type:
        return type(self._groups[group].module)


def timed_operators(timed: TimedPass, elements: int) -> dict[int, list[OperatorCost]]:
    """Return the operators of groups that a pass timed, with outputs as for inputs with as many elements."""
    assert timed.operators is not None
    larger = timed.larger(elements)

    def scaled(of: OperatorCost) -> OperatorCost:
        sizes = tuple(math.ceil(larger * nbytes) for nbytes in of.sizes)
        return replace(of, sizes=sizes, returned=math.ceil(larger * of.returned))

    costs = timed.operators.costs()
    if larger != 1.0:  # [guard: operators of inputs of another size]
        costs = {group: list(map(scaled, each)) for group, each in costs.items()}
    return costs


def _alone(
    lean: TimedPass, timed: TimedPass, kinds: Sequence[Hashable], elements: int, allocated: int
) -> list[LayerCost]:
    """Return the costs of a pass that offloaded everything, without the time of the host for that; see `Ways.of`."""
    assert lean.meter is not None
    costs = steady(layer_costs(lean, timed, allocated=allocated), kinds)
    found = without_hooks(costs, lean.meter, kinds, HOST_SECONDS)
    larger = timed.larger(elements)
    return for_inputs(found, larger) if larger != 1.0 else found  # [guard: inputs of another size]
