"""Simulation of a pipeline: from orders, costs and plans to the memory, the stalls and the bubbles of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf

from tabulate import tabulate

from .._arguments import check_fits, check_kind, check_kinds, check_seconds
from .costs import Link
from .pipeline import Computation, StageCost, Step
from .pipeline_plan import Actions, PipelinePlan
from .pipeline_run import NEVER, Compiled, GroupTimes, RankRun, StageTimes
from .timeline import Timeline, mebibytes, milliseconds

__all__ = ["Pipeline", "PipelineSimulation", "RankSimulation", "check_pipeline", "simulate_pipeline"]


@dataclass(frozen=True)
class RankSimulation:
    """What `simulate_pipeline` predicts for one rank.

    Parameters
    ----------
    end : float
        Seconds until its last computation has ended.
    bubble_seconds : float
        Seconds for which compute waited for what other ranks send, before its last computation.
    stall_seconds : float
        Seconds for which compute waited for copies.
    peak_bytes : int
        Largest number of bytes of saved activations on the device at one time.
    device_peak_bytes : int
        The same with all that the costs name beside them.
    bytes_offloaded, bytes_reloaded : int
        Bytes copied to the host and back.
    starts : tuple of float
        When each computation of the order starts.
    record : callable
        Returns the run again, with its timeline and its levels of memory.
    """

    end: float
    bubble_seconds: float
    stall_seconds: float
    peak_bytes: int
    device_peak_bytes: int
    bytes_offloaded: int
    bytes_reloaded: int
    starts: tuple[float, ...]
    record: Callable[[], RankRun] = field(repr=False, compare=False)

    @cached_property
    def timeline(self) -> Timeline:
        """Spans of compute by group, copies and stalls, whose `layer` is the microbatch; and the resident bytes."""
        return self.record().timeline()


@dataclass(frozen=True)
class PipelineSimulation:
    """What `simulate_pipeline` predicts for one step of a schedule; ``print`` gives a table by rank.

    Parameters
    ----------
    ranks : tuple of RankSimulation
        One for each rank.
    baseline : tuple of RankSimulation
        The same without offloading.
    """

    ranks: tuple[RankSimulation, ...]
    baseline: tuple[RankSimulation, ...]

    @property
    def step_time(self) -> float:
        """Seconds until the last rank has ended."""
        return max(rank.end for rank in self.ranks)

    @property
    def baseline_time(self) -> float:
        """The same without offloading."""
        return max(rank.end for rank in self.baseline)

    @property
    def slowdown(self) -> float:
        """Step time divided by that without offloading; 1.0 means that offloading costs no time."""
        return self.step_time / self.baseline_time if self.baseline_time else 1.0

    def __str__(self) -> str:
        rows = [
            [
                str(number),
                mebibytes(without.device_peak_bytes),
                mebibytes(rank.device_peak_bytes),
                mebibytes(rank.bytes_offloaded),
                milliseconds(rank.stall_seconds),
                milliseconds(rank.bubble_seconds),
            ]
            for number, (rank, without) in enumerate(zip(self.ranks, self.baseline, strict=True))
        ]
        header = ["rank", "peak without", "peak", "offloaded", "stalled", "bubbles"]
        table = tabulate(rows, header, disable_numparse=True, colalign=("right",) * len(header))
        return f"step {milliseconds(self.step_time)}, {self.slowdown:.3f} x no offload\n\n{table}"


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
    Gradients of weights are there from the first backward of their group in the step.

    Examples
    --------
    >>> from actoffload.schedule import LayerCost, Link, StageCost, one_f_one_b, simulate_pipeline
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
    _check_plans(steps, stages, planned)
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


def _check_plans(orders: list[tuple[Step, ...]], stages: Sequence[StageCost], plans: list[PipelinePlan | None]) -> None:
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
        self.link, self.times = link, _stage_times(stages, link)
        self.latency, self.bandwidth = send_latency, send_bandwidth
        self.rank_of = {step.stage: rank for rank, order in enumerate(orders) for step in order}
        self.microbatches = 1 + max((step.microbatch for order in orders for step in order), default=0)
        self.split = {
            (step.stage, step.microbatch)
            for order in orders
            for step in order
            if step.computation is Computation.BACKWARD_INPUT and stages[step.stage].splits
        }
        self.compiled = [[self._compile(rank, step) for step in order] for rank, order in enumerate(orders)]

    def _compile(self, rank: int, step: Step) -> Compiled:
        times, forward = self.times[step.stage], step.computation is Computation.FORWARD
        if step.computation is Computation.BACKWARD_WEIGHT:
            return Compiled(-1, -1, 0.0, times, step)
        before, behind = (step.stage - 1, step.stage + 1) if forward else (step.stage + 1, step.stage - 1)

        def message(stage: int) -> int:
            return (2 * stage + forward) * self.microbatches + step.microbatch

        nbytes = times.cost.sent_forward if forward else times.cost.sent_backward
        far = self.rank_of.get(behind, rank) != rank
        delay = self.latency + nbytes / self.bandwidth if far else 0.0
        return Compiled(message(before) if before in self.rank_of else -1, message(step.stage), delay, times, step)

    def run(self, actions: Sequence[Actions]) -> tuple[RankSimulation, ...]:
        """Run every rank with its actions as far as it comes, until all have ended."""
        arrivals = [NEVER] * (2 * len(self.times) * self.microbatches)
        ranks = [self._rank(number, acts) for number, acts in enumerate(actions)]
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

    def _rank(self, number: int, actions: Actions, record: bool = False) -> RankRun:
        steps = self.compiled[number]
        other = {step.step.stage: step.times.cost.other_bytes for step in steps}
        return RankRun(steps, self.times, self.link, sum(other.values()), actions, self.split, record)

    def _record(self, number: int, actions: Actions, arrivals: list[float]) -> RankRun:
        """Run one rank again, with what the others sent."""
        rank = self._rank(number, actions, record=True)
        rank.advance(list(arrivals), {}, [])
        return rank


def _stage_times(stages: Sequence[StageCost], link: Link) -> list[StageTimes]:
    """Return the times of all stages; equal ones are worked out once."""
    known: dict[int, StageTimes] = {}
    for cost in stages:
        if id(cost) not in known:
            splits = cost.splits or (None,) * len(cost.groups)
            groups = [GroupTimes.of(group, split, link) for group, split in zip(cost.groups, splits, strict=True)]
            known[id(cost)] = StageTimes(cost, groups)
    return [known[id(cost)] for cost in stages]
