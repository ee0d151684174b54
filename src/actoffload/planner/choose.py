"""Choose the plan of a model: the fastest within a limit of memory.

Without a limit, or if everything fits, nothing is offloaded and nothing recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from .._arguments import check_bytes, check_fits, check_kind, check_kinds, check_limit, check_seconds, check_whole
from .._text import size
from ..schedule.costs import Link
from ..schedule.plan import Plan
from ..schedule.simulate import model_order, model_plan, model_stages, simulate
from .placement import Placement
from .search import ROUNDING, Knobs, Ranks
from .variants import Variant

NEAR = 0.002  # of the smallest peak, without what is always allocated: plans that differ by less have about the same
WORTH = 0.02  # of the time of a plan, by which one is faster that runs operators more often: the host's time counts too

LEANEST = "This is about the smallest peak that a plan reaches."
FASTEST = "This is the fastest plan that was found with at most this peak."


def choose(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    *,
    limit: int | None = None,
    host_seconds: float = 0.0,
    without_bytes: int | None = None,
    excess: int = 0,
    host_limit: int | None = None,
    whole: bool = False,
) -> Plan:
    """Return the fastest plan within a limit, in which groups are kept, offloaded, recomputed, or both of the latter.

    If no plan is within the limit, it is the fastest with about the smallest peak.

    Parameters
    ----------
    names : sequence of str
        The groups, in execution order.
    groups : sequence of sequence of Variant
        The ways to run each group; the first is without recomputation.
    link : Link
        How fast copies are.
    limit : int, optional
        Bytes of device memory in forward and backward; None for no limit.
    host_seconds : float
        Seconds that the host spends on each saved tensor of an offloaded group, in forward and again in backward.
    without_bytes : int, optional
        Peak of device memory without offloading as it was measured, for the reason; None to take what the costs add up
        to.
    excess : int
        Bytes by which a pass may take more device memory than the costs add up to; the plan leaves room for them
        within the limit.
    host_limit : int, optional
        Bytes of host memory for what is offloaded in one step; None for no limit.
    whole : bool
        Whether every group is run in the last of its ways, as activation checkpointing runs it.

    Returns
    -------
    Plan
        The plan, with its expected time and peak, and the reason in ``because``.

    Raises
    ------
    ValueError
        If there are not as many names as groups, or none.

    Examples
    --------
    >>> from actoffload.planner import Variant, choose
    >>> from actoffload.schedule import LayerCost, Link
    >>> plain = LayerCost.even(2**30, forward=0.010, backward=0.020)
    >>> recomputed = LayerCost.even(2**28, forward=0.010, backward=0.024)
    >>> group = (Variant(plain), Variant(recomputed, saves=("aten.mm.default#0",)))
    >>> plan = choose("abcdefgh", [group] * 8, Link(d2h=5e10, h2d=5e10), limit=3 * 2**30)
    >>> plan.peak_bytes <= 3 * 2**30, len(plan.recomputed) > 0, plan.seconds < 0.30
    (True, True, True)
    """
    models = _models(names, groups, link, host_seconds, host_limit, whole=whole)
    check_limit(limit=limit)
    if without_bytes is not None:
        check_bytes(without_bytes=without_bytes)
    check_fits("a number of bytes", isfinite, excess=excess)
    most = inf if limit is None else limit - excess
    without = models[0].ranks.baseline_peaks[0] if without_bytes is None else without_bytes
    plan = _best(models, most)
    because = ""
    if (plan.peak_bytes or 0) > most:
        because = f"No plan is within the limit of {size(limit or 0)}; this one has the smallest peak."
    elif without > most and (plan.recomputed or plan.offloaded):
        action = "offloading and recomputing" if plan.recomputed else "offloading"
        because = f"Without {action} the peak would be {size(without)}, above the limit of {size(limit or 0)}."
    return replace(plan, because=because, baseline_peak_bytes=without)


def frontier(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    *,
    host_seconds: float = 0.0,
    host_limit: int | None = None,
    points: int = 16,
) -> tuple[Plan, ...]:
    """Return plans from the smallest peak to that without offloading, each faster than those before it.

    ``because`` says what each plan is among them, and names no limit, because none was given.

    Parameters
    ----------
    names, groups, link, host_seconds, host_limit
        As in `choose`.
    points : int
        Number of limits of device memory, at equal distances, for which a plan is searched.

    Examples
    --------
    >>> from actoffload.planner import Variant, frontier
    >>> from actoffload.schedule import LayerCost, Link
    >>> group = (Variant(LayerCost.even(2**30, forward=0.010, backward=0.020)),)
    >>> for plan in frontier(["a", "b", "c", "d"], [group] * 4, Link(d2h=5e10, h2d=5e10), points=4):
    ...     print(f"{plan.peak_bytes / 2**30:.2f} GiB {plan.seconds * 1e3:.0f} ms")
    1.00 GiB 170 ms
    2.00 GiB 134 ms
    3.00 GiB 120 ms
    """
    models = _models(names, groups, link, host_seconds, host_limit)
    check_whole(points=points, least=1)
    leanest, kept = _best(models, 0), _best(models, inf)
    low, high = leanest.peak_bytes or 0, kept.peak_bytes or 0
    limits = [low + (high - low) * k // max(points - 1, 1) for k in range(1, points - 1)]
    between = (replace(_best(models, limit), because=FASTEST) for limit in limits)
    plans = [replace(leanest, because=LEANEST), *between, replace(kept, because="This plan offloads nothing.")]
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.seconds)):
        if not found or (plan.seconds or 0.0) < (found[-1].seconds or 0.0):
            found.append(plan)
    return tuple(found)


def _models(
    names: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    link: Link,
    host_seconds: float,
    host_limit: int | None,
    *,
    whole: bool = False,
) -> list[_Model]:
    """Return the model with all that is made again held until its last use, and without, if that is not the same."""
    check_kinds(str, names=names)
    check_kind(Link, link=link)
    check_seconds(host_seconds=host_seconds)
    check_limit(host_limit=host_limit)
    check_kinds(Sequence, groups=groups)
    for number, group in enumerate(groups):
        check_kinds(Variant, optional=False, **{f"groups[{number}]": group})
    if not names or len(names) != len(groups) or not all(groups):
        raise ValueError(
            f"There are {len(names)} names and {len(groups)} groups; give one name and at least one Variant for each."
        )
    given = link, host_seconds, Knobs(host_limit=host_limit, whole=whole)
    lean = _Model(names, groups, *given)
    if not any(way.held for group in groups for way in group):
        return [lean]
    held = [[replace(way, cost=way.held or way.cost) for way in group] for group in groups]
    return [_Model(names, held, *given, holds=True), lean]


def _best(models: Sequence[_Model], limit: float) -> Plan:
    """Return the fastest plan within a limit, or with about the smallest peak; its reason is not known yet.

    Held values need memory in which other values could stay.  So both ways are searched where holding costs time.
    """
    plan = models[0].best(limit)
    fits, worth = (plan.peak_bytes or 0) <= limit, (plan.seconds or 0.0) * (1 - WORTH)
    if len(models) == 1 or (fits and worth <= (plan.baseline_seconds or 0.0)):
        return plan
    lean = models[1].best(limit)
    return lean if not fits or (lean.seconds or 0.0) < worth else plan


@dataclass
class _Model:
    """The search of plans of a model, which is a pipeline of one rank with a stage for each group."""

    names: Sequence[str]
    groups: Sequence[Sequence[Variant]]
    link: Link
    host_seconds: float
    knobs: Knobs
    holds: bool = False

    def __post_init__(self) -> None:
        stages, order = model_stages([group[0].cost for group in self.groups]), model_order(len(self.groups))
        variants = {k: [group] for k, group in enumerate(self.groups)}
        how = {"host_seconds": self.host_seconds, "model": True}
        self.ranks = Ranks([order], stages, self.link, variants, self.knobs, **how)

    def best(self, limit: float) -> Plan:
        """Return the fastest plan within a limit, or with about the smallest peak."""
        ranks = self.ranks
        ranks.reset()
        if ranks.choices[0].profile.peak_bytes <= limit:
            return self._described(ranks.choices[0].nothing)
        ranks.recompute(0, limit, ROUNDING)
        least = ranks.choices[0].leanest()
        if least > limit:
            # Of the plans with about the smallest peak the fastest is taken.
            always = min(level for group in self.groups for level in group[0].cost.other_bytes)
            limit = math.ceil(least + NEAR * (least - always))
            ranks.recompute(0, limit, ROUNDING)
        found = ranks.choices[0].within(limit, ranks.seconds * (1 + ROUNDING))
        return self._described(ranks.choices[0].smallest() if found is None else found[0])

    def _described(self, placement: Placement) -> Plan:
        """Return a plan with what is expected of it, with groups in the ways that are used."""
        ways = self.ranks.ways
        taken = [group[ways.get((k, 0), 0)] for k, group in enumerate(self.groups)]
        found = model_plan(len(taken), placement.actions())
        expected = simulate(found, [way.cost for way in taken], self.link, host_seconds=self.host_seconds)
        pairs = [(way.cost, group[0].cost) for way, group in zip(taken, self.groups, strict=True)]
        return replace(
            found,
            names=tuple(self.names),
            nbytes=tuple(way.cost.nbytes for way in taken),
            seconds=expected.step_time,
            baseline_seconds=self.ranks.baseline_seconds,
            peak_bytes=expected.device_peak_bytes,
            recomputed_nbytes=tuple(max(plain.nbytes - cost.nbytes, 0) for cost, plain in pairs) if ways else (),
            recompute_seconds=max(sum(cost.backward - plain.backward for cost, plain in pairs), 0.0),
            saves=tuple(way.saves for way in taken) if ways else (),
            holds=self.holds and any(way.held for way in taken),
        )
