"""Choose the plan of a model, and those of the ranks of a pipeline: the fastest within a limit of memory.

Without a limit, or if everything fits, nothing is offloaded and nothing recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from .._text import size
from ..schedule.costs import Link, StageCost
from ..schedule.plan import Plan
from ..schedule.run import Pipeline
from ..schedule.simulate import model_stages
from .placement import ROUNDING, Knobs, Placement
from .search import RanksAsRun, StageVariants
from .variants import Variant

WORTH = 0.02  # of the time of a plan, by which one is faster that runs operators more often: the host's time counts too
FREE = 0.002  # of the step, by which a plan of a pipeline without a cost may take longer

LEANEST = "This is about the smallest peak that a plan reaches."
FASTEST = "This is the fastest plan that was found with at most this peak."

Groups = Sequence[Sequence[Variant]]
"""The ways to run each group of a model, in execution order; the first is without recomputation."""


def choose(
    names: Sequence[str],
    groups: Groups,
    link: Link,
    *,
    limit: int | None = None,
    host_seconds: float = 0.0,
    without_bytes: int | None = None,
    excess: int = 0,
    host_limit: int | None = None,
    whole: bool = False,
) -> Plan:
    """Return the fastest plan of a model within a limit of device memory, or with about the smallest peak.

    `host_seconds` are those of the host for each saved tensor of an offloaded group, in forward and again in backward.
    `without_bytes` is the measured peak without offloading, `excess` what a pass takes beyond the sum of the costs,
    `host_limit` the host memory for one step.  With `whole` every group is run in the last of its ways, as activation
    checkpointing runs it.
    """
    models = _models(names, groups, link, host_seconds, Knobs(host_limit=host_limit, whole=whole))
    most = inf if limit is None else limit - excess
    without = models[0].baseline_peaks[0] if without_bytes is None else without_bytes
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
    groups: Groups,
    link: Link,
    *,
    host_seconds: float = 0.0,
    host_limit: int | None = None,
    points: int = 16,
) -> tuple[Plan, ...]:
    """Return plans from the smallest peak to that without offloading, each faster than those before it.

    The planner searches for `points` limits at equal distances.  ``because`` names no limit, as the caller gave none.
    """
    models = _models(names, groups, link, host_seconds, Knobs(host_limit=host_limit))
    leanest, kept = _best(models, 0), _best(models, inf)
    low, high = leanest.peak_bytes or 0, kept.peak_bytes or 0
    limits = [low + (high - low) * k // (points - 1) for k in range(1, points - 1)]
    between = (replace(_best(models, limit), because=FASTEST) for limit in limits)
    plans = [replace(leanest, because=LEANEST), *between, replace(kept, because="This plan offloads nothing.")]
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.seconds)):
        if not found or (plan.seconds or 0.0) < (found[-1].seconds or 0.0):
            found.append(plan)
    return tuple(found)


def _models(names: Sequence[str], groups: Groups, link: Link, host_seconds: float, knobs: Knobs) -> list[_Model]:
    """Return the model with all that is made again held until its last use, and without, if that is not the same."""
    lean = _Model(names, groups, link, host_seconds, knobs, holds=False)
    if not any(way.held for group in groups for way in group):
        return [lean]
    held = [[replace(way, cost=way.held or way.cost) for way in group] for group in groups]
    return [_Model(names, held, link, host_seconds, knobs, holds=True), lean]


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


class _Model(RanksAsRun):
    """The search of plans of a model, which is a pipeline of one rank with a stage for each group."""

    def __init__(
        self, names: Sequence[str], groups: Groups, link: Link, host_seconds: float, knobs: Knobs, *, holds: bool
    ) -> None:
        stages, variants = model_stages([group[0].cost for group in groups]), dict(enumerate([each] for each in groups))
        super().__init__([Plan(len(groups), names=tuple(names))], stages, link, variants, knobs, host_seconds)
        self._holds = holds

    def best(self, limit: float) -> Plan:
        """Return the fastest plan within a limit, or with about the smallest peak."""
        if self.ways:
            self.reset()
        if self.profiles[0].peak_bytes <= limit:
            return self._described(self.profiles[0].place(()))
        limit = self.recompute(0, limit, ROUNDING)
        found = self.profiles[0].within(limit, self.seconds * (1 + ROUNDING))
        return self._described(self.profiles[0].smallest() if found is None else self._leaner(*found))

    def _leaner(self, best: Placement, seconds: float) -> Placement:
        """Return a placement that takes no longer, with about the smallest peak: other passes may need more memory."""
        profile, allowed = self.profiles[0], seconds * (1 + ROUNDING)
        low = profile.leanest()
        while best.peak_bytes - low > max(best.peak_bytes >> 6, 1):
            middle = (low + best.peak_bytes) // 2
            found = profile.within(middle, seconds, allowed, few=1)
            low, best = (middle, best) if found is None else (low, found[0])
        return best

    def _described(self, placement: Placement) -> Plan:
        """Return a plan with what is expected of it, with groups in the ways that are used."""
        pipeline, ways = self.pipeline, self.taken(0)
        stages = model_stages([way.cost for way in ways])
        exact = Pipeline(self.plans, stages, pipeline.link, host_seconds=pipeline.host_seconds, exact=True)
        (run,) = exact.run([placement.steps()])
        backward = (stage.groups[0].backward for stage in self.stages)
        seconds = sum(way.cost.backward - plain for way, plain in zip(ways, backward, strict=True))
        holds = self._holds and any(way.held for way in ways)
        return replace(self.described(0, placement, run, run.compute), recompute_seconds=max(seconds, 0.0), holds=holds)


# Pipelines


def plan_pipeline(
    plans: Sequence[Plan],
    stages: Sequence[StageCost],
    link: Link,
    *,
    fraction: float | None = None,
    delta_bytes_per_rank: int | None = None,
    max_inflight: int | None = None,
    budgets: Sequence[int | None] | None = None,
    variants: StageVariants | None = None,
    whole: bool = False,
) -> tuple[Plan, ...]:
    """Return what each rank of a pipeline offloads, given plans that keep everything; nothing without a limit.

    `fraction` of the bytes of each microbatch is offloaded if there is time to copy them, on rank `r` at least
    ``r * delta_bytes_per_rank`` bytes less.  At most `max_inflight` groups are copied to the host at a time.  With
    `budgets`, bytes of device memory, each rank offloads the least that keeps within its own, at a cost in time if
    there is no other way; then `variants` are used where they cost less.  The plan of a rank that cannot keep within
    its budget has the smallest peak that was found, and says so.  `whole` is as in `choose`.
    """
    budgets = [None] * len(plans) if budgets is None else budgets
    knobs = Knobs(fraction, delta_bytes_per_rank, max_inflight, whole=whole)
    ranks = RanksAsRun(plans, stages, link, variants or {}, knobs)
    limits = [None if budget is None else ranks.recompute(rank, budget, FREE) for rank, budget in enumerate(budgets)]
    by_hand = (fraction, delta_bytes_per_rank, max_inflight) != (None, None, None)
    allowed = ranks.seconds * (1 + FREE)
    found = list[tuple[Placement, str]]()
    for profile, budget, limit in zip(ranks.profiles, budgets, limits, strict=True):
        if budget is None or limit is None:
            found.append((profile.free if by_hand else profile.place(()), ""))
            continue
        within, keeps = profile.within(limit, allowed), f"is within the limit of {size(budget)}"
        if within is None or limit > budget:
            smallest = profile.smallest() if within is None else within[0]
            found.append((smallest, f"No plan of this rank {keeps}; this one has the smallest peak."))
        else:
            because = "" if within[1] <= allowed else f"No plan of this rank without a cost in time {keeps}."
            found.append((within[0], because))
    runs = ranks.pipeline.run([placement.steps() for placement, _ in found])
    seconds = max((run.compute for run in runs), default=0.0)
    return tuple(
        replace(ranks.described(rank, placement, run, seconds), because=because)
        for rank, ((placement, because), run) in enumerate(zip(found, runs, strict=True))
    )
