"""Simulation of a pipeline: from orders, costs and plans to the memory, the stalls and the bubbles of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from .._arguments import check_fits, check_kind, check_kinds, check_seconds
from .costs import Link
from .pipeline import Computation, StageCost, Step
from .pipeline_plan import PipelinePlan
from .pipeline_rank import NEVER, Compiled, RankRun, Steps
from .pipeline_results import PipelineSimulation, RankSimulation
from .pipeline_times import StageTimes, Whole, stage_times
from .timeline import Timeline

__all__ = ["Pipeline", "simulate_pipeline"]


def simulate_pipeline(
    orders: Sequence[Sequence[Step]],
    stages: Sequence[StageCost],
    link: Link,
    plans: Sequence[PipelinePlan | None] | None = None,
    *,
    send_latency: float = 0.0,
    send_bandwidth: float = inf,
) -> PipelineSimulation:
    """Predict one step of a pipeline schedule on all ranks.

    Parameters
    ----------
    orders : sequence of sequences of Step
        What each rank computes, in order.  Of a schedule of PyTorch with several stages a rank they are
        ``[read_order(schedule.pipeline_order[rank]) for rank in range(ranks)]``.
    stages : sequence of StageCost
        What one microbatch costs on each stage.
    link : Link
        How fast copies between a device and its host are while all ranks copy.
    plans : sequence, optional
        What each rank offloads; None for a rank that offloads nothing, and by default for all.
    send_latency, send_bandwidth : float
        Seconds and bytes per second for sending the output of a stage, or its gradient, to another rank.

    Returns
    -------
    PipelineSimulation
        Times in seconds, sizes in bytes.

    Raises
    ------
    ValueError
        If the orders name a stage without a cost or cannot be executed, or a plan is for another order.

    Notes
    -----
    A forward starts when that of the previous stage is sent, a backward when that of the next stage is.  What stages
    send that are in no order is there from the start.  Sends do not take time of compute.  Copies of a chunk to the
    host start as its tensors are saved, those back at the moment of the plan, and in one direction they run one after
    the other.  Bytes are counted as `PipelinePlan` says; since the plan says when, they do not depend on times.

    Examples
    --------
    >>> from actoffload.schedule import LayerCost, Link, StageCost, simulate_pipeline
    >>> from actoffload.schedule.pipeline_orders import one_f_one_b
    >>> stage = StageCost((LayerCost.even(2**30, forward=0.010, backward=0.020),))
    >>> print(simulate_pipeline(one_f_one_b(ranks=2, microbatches=4), [stage] * 2, Link(d2h=50e9, h2d=50e9)))
    step 150.00 ms, 1.000 x no offload
    <BLANKLINE>
      rank    peak without        peak    offloaded    stalled    bubbles
    ------  --------------  ----------  -----------  ---------  ---------
         0      2048.0 MiB  2048.0 MiB      0.0 MiB    0.00 ms   30.00 ms
         1      1024.0 MiB  1024.0 MiB      0.0 MiB    0.00 ms   10.00 ms
    """
    check_pipeline(orders, stages, link, send_latency, send_bandwidth)
    if plans is not None:
        check_kinds(PipelinePlan, optional=True, plans=plans)
    steps = [tuple(order) for order in orders]
    nothing: list[PipelinePlan | None] = [None] * len(steps)
    planned = nothing if plans is None else list(plans)
    _check(steps, stages, planned)
    pipeline = Pipeline(steps, stages, link, send_latency, send_bandwidth)
    baseline = ranks = pipeline.run([{}] * len(steps))
    if any(plan is not None and plan.transfers for plan in planned):
        ranks = pipeline.run([{} if plan is None else plan.actions for plan in planned])
    return PipelineSimulation(ranks, baseline)


def check_pipeline(
    orders: Sequence[Sequence[Step]],
    stages: Sequence[StageCost],
    link: Link,
    send_latency: float,
    send_bandwidth: float,
) -> None:
    """Raise a `TypeError` or `ValueError` for the first argument of `simulate_pipeline` that is of another type."""
    check_kinds(Sequence, orders=orders)
    for rank, order in enumerate(orders):
        check_kinds(Step, optional=False, **{f"orders[{rank}]": order})
    check_kinds(StageCost, stages=stages)
    check_kind(Link, link=link)
    check_seconds(send_latency=send_latency)
    check_fits("bytes per second, more than 0", lambda value: value > 0, send_bandwidth=send_bandwidth)


def _check(orders: list[tuple[Step, ...]], stages: Sequence[StageCost], plans: list[PipelinePlan | None]) -> None:
    if len(plans) != len(orders):
        raise ValueError(f"There are {len(plans)} plans for {len(orders)} ranks; give one for each.")
    for rank, (order, plan) in enumerate(zip(orders, plans, strict=True)):
        missing = {step.stage for step in order} - set(range(len(stages)))
        if missing:
            raise ValueError(f"Rank {rank} has stage {min(missing)}, but there are costs of {len(stages)} stages.")
        late = {s.stage for s in order if s.computation is Computation.BACKWARD_INPUT and not stages[s.stage].splits}
        if late - {0}:
            raise ValueError(f"Stage {max(late)} has an input backward, but its cost has no splits.")
        if plan is None:
            continue
        if plan.order != order:
            raise ValueError(f"The plan of rank {rank} is for another order than that of this rank.")
        for stage, names in plan.names.items():
            if len(names) != len(stages[stage].groups) or plan.splits[stage] != bool(stages[stage].splits):
                raise ValueError(f"The plan of rank {rank} is for other groups or splits of stage {stage}.")


class Pipeline:
    """The orders and costs of all ranks, which can be run with any plans.

    Parameters
    ----------
    orders, stages, link, send_latency, send_bandwidth
        As in `simulate_pipeline`.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Step]],
        stages: Sequence[StageCost],
        link: Link,
        send_latency: float = 0.0,
        send_bandwidth: float = inf,
    ) -> None:
        self.link, self.times = link, stage_times(stages, link)
        self.latency, self.bandwidth = send_latency, send_bandwidth
        self.rank_of = {step.stage: rank for rank, order in enumerate(orders) for step in order}
        self.microbatches = 1 + max((step.microbatch for order in orders for step in order), default=0)
        self.split = {
            (step.stage, step.microbatch)
            for order in orders
            for step in order
            if step.computation is Computation.BACKWARD_INPUT and stages[step.stage].splits
        }
        self.compiled = [self._compile(rank, order) for rank, order in enumerate(orders)]

    def _compile(self, rank: int, order: Sequence[Step]) -> list[Compiled]:
        """Return the steps of a rank with all that is looked up for them."""
        first = {(step.stage, step.computation): Compiled(-1, -1, 0.0, *self._costs(step)) for step in order}
        number = self.microbatches
        compiled = []
        for (stage, computation), of in first.items():
            if computation is Computation.BACKWARD_WEIGHT:
                continue
            forward = computation is Computation.FORWARD
            before, behind = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            needs = (2 * before + forward) * number if before in self.rank_of else -1
            cost = of.times.cost
            nbytes = cost.sent_forward if forward else cost.sent_backward
            far = self.rank_of.get(behind, rank) != rank
            delay = self.latency + nbytes / self.bandwidth if far else 0.0
            first[stage, computation] = of._replace(needs=needs, sends=(2 * stage + forward) * number, delay=delay)
        for step in order:
            needs, sends, delay, whole, times, _ = first[step.stage, step.computation]
            at = step.microbatch
            compiled.append(
                Compiled(needs + at if needs >= 0 else -1, sends + at if sends >= 0 else -1, delay, whole, times, step)
            )
        return compiled

    def run(self, actions: Sequence[Steps]) -> tuple[RankSimulation, ...]:
        """Run every rank with its actions as far as it comes, until all have ended."""
        arrivals = [NEVER] * (2 * len(self.times) * self.microbatches)
        ranks = [self._rank(number, of) for number, of in enumerate(actions)]
        waiting: dict[int, int] = {}
        ready = list(reversed(range(len(ranks))))
        while ready:
            number = ready.pop()
            needed = ranks[number].advance(arrivals, waiting, ready)
            if needed >= 0:
                waiting[needed] = number
        for number in waiting.values():
            step = ranks[number].steps[len(ranks[number].starts)].step
            raise ValueError(f"Rank {number} waits forever at its step {step}: no rank sends what that needs.")
        return tuple(
            RankSimulation(
                end=rank.compute,
                bubble_seconds=rank.bubble,
                stall_seconds=rank.stalled,
                peak_bytes=rank.saved_peak,
                device_peak_bytes=rank.peak,
                bytes_offloaded=rank.bytes_out,
                bytes_reloaded=rank.bytes_back,
                starts=tuple(rank.starts),
                record=partial(self._record, number, actions[number], arrivals),
            )
            for number, rank in enumerate(ranks)
        )

    def _rank(self, number: int, actions: Steps, record: bool = False) -> RankRun:
        steps = self.compiled[number]
        other = {step.step.stage: step.times.cost.other_bytes for step in steps}
        return RankRun(steps, self.times, self.link, sum(other.values()), actions, self.split, record)

    def _record(self, number: int, actions: Steps, arrivals: list[float]) -> Timeline:
        """Run one rank again, with what the others sent."""
        rank = self._rank(number, actions, record=True)
        rank.advance(list(arrivals), {}, [])
        return rank.timeline()

    def _costs(self, step: Step) -> tuple[Whole, StageTimes, Step]:
        times = self.times[step.stage]
        return times.whole[step.computation], times, step
