"""Simulation of a pipeline: from orders, costs and plans to the memory, the stalls and the bubbles of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from .costs import Link
from .pipeline import Chunk, ChunkAction, Computation, StageCost, Step, Transfer
from .pipeline_clocks import Part, RankClock, StageTimes, stage_times
from .pipeline_plan import PipelinePlan
from .pipeline_results import PipelineSimulation, RankSimulation
from .plan import Do
from .timeline import Kind

__all__ = ["simulate_pipeline"]

KINDS = dict.fromkeys(Computation, Kind.BACKWARD) | {Computation.FORWARD: Kind.FORWARD}


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
        What each rank computes, in order.
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
    A forward starts when that of the previous stage is sent, a backward when that of the next stage is.  Sends do not
    take time of compute.  Copies of a chunk to the host start as its tensors are saved, those back at the moment of the
    plan, and in one direction they run one after the other.  Bytes are counted as `PipelinePlan` says; since the plan
    says when, they do not depend on times.

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
    steps = [tuple(order) for order in orders]
    nothing: list[PipelinePlan | None] = [None] * len(steps)
    planned = nothing if plans is None else list(plans)
    _check(steps, stages, planned)
    times = stage_times(tuple(stages), link)
    sends = [tuple(send_latency + of / send_bandwidth for of in (c.sent_forward, c.sent_backward)) for c in stages]
    baseline = ranks = _Pipeline(steps, times, link, nothing, sends).run()
    if any(plan is not None and plan.transfers for plan in planned):
        ranks = _Pipeline(steps, times, link, planned, sends).run()
    return PipelineSimulation(ranks, baseline)


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


@dataclass(slots=True)
class _Rank:
    """A rank that runs."""

    number: int
    order: tuple[Step, ...]
    clock: RankClock
    transfers: dict[Chunk, Transfer]
    actions: dict[int, dict[int, tuple[ChunkAction, ...]]]  # by step and position
    starts: list[float]
    copied: dict[Chunk, float]
    needs: dict[Chunk, float]  # when the compute of a reloaded chunk can start without a stall
    reloading: dict[tuple[int, int], int]  # chunks of each stage and microbatch that are reloaded


class _Pipeline:
    """All ranks, and what they have sent."""

    def __init__(
        self,
        orders: list[tuple[Step, ...]],
        times: list[StageTimes],
        link: Link,
        plans: Sequence[PipelinePlan | None],
        sends: Sequence[tuple[float, ...]],
    ) -> None:
        self.times, self.sends = times, sends
        self.rank_of = {step.stage: rank for rank, order in enumerate(orders) for step in order}
        self.arrivals: dict[tuple[int, bool, int], float] = {}  # by stage, whether a forward, and microbatch
        self.ranks = [
            self._rank(number, order, link, plan)
            for number, (order, plan) in enumerate(zip(orders, plans, strict=True))
        ]

    def _rank(self, number: int, order: tuple[Step, ...], link: Link, plan: PipelinePlan | None) -> _Rank:
        stages = {step.stage for step in order}
        clock = RankClock(link, sum(self.times[stage].cost.other_bytes for stage in stages))
        actions: dict[int, dict[int, tuple[ChunkAction, ...]]] = {}
        for moment, of in plan.moments() if plan is not None else ():
            actions.setdefault(moment.step, {})[moment.position] = of
        transfers = dict(plan.transfers) if plan is not None else {}
        return _Rank(number, order, clock, transfers, actions, [], {}, {}, {})

    def run(self) -> tuple[RankSimulation, ...]:
        """Run every rank as far as it comes, until all have ended."""
        waiting: dict[tuple[int, bool, int], _Rank] = {}
        ready = list(reversed(self.ranks))
        while ready:
            rank = ready.pop()
            while len(rank.starts) < len(rank.order):
                step = rank.order[len(rank.starts)]
                needed, arrival = self._arrival(step)
                if needed is not None and arrival is None:
                    waiting[needed] = rank
                    break
                rank.clock.begin(arrival or 0.0)
                rank.starts.append(rank.clock.compute)
                self._step(rank, step)
                sent = self._send(rank, step)
                if sent in waiting:
                    ready.append(waiting.pop(sent))
        for rank in waiting.values():
            step = rank.order[len(rank.starts)]
            raise ValueError(f"Rank {rank.number} waits for ever at its step {step}: no rank sends what it needs.")
        return tuple(map(_result, self.ranks))

    def _arrival(self, step: Step) -> tuple[tuple[int, bool, int] | None, float | None]:
        """Return what a step needs of another stage, and when that arrives if it is known; None if it needs nothing."""
        forward = step.computation is Computation.FORWARD
        other = step.stage - 1 if forward else step.stage + 1
        if step.computation is Computation.BACKWARD_WEIGHT or not 0 <= other < len(self.times):
            return None, None
        needed = other, forward, step.microbatch
        return needed, self.arrivals.get(needed)

    def _send(self, rank: _Rank, step: Step) -> tuple[int, bool, int]:
        """Note when what a step computes is with the stage that needs it."""
        forward = step.computation is Computation.FORWARD
        key = step.stage, forward, step.microbatch
        if step.computation is not Computation.BACKWARD_WEIGHT:
            to = step.stage + 1 if forward else step.stage - 1
            far = self.rank_of.get(to, rank.number) != rank.number
            self.arrivals[key] = rank.clock.compute + (self.sends[step.stage][not forward] if far else 0.0)
        return key

    def _step(self, rank: _Rank, step: Step) -> None:
        times, kind = self.times[step.stage], KINDS[step.computation]
        actions = rank.actions.get(len(rank.starts) - 1)
        if actions is None and not rank.reloading.get((step.stage, step.microbatch)):
            rank.clock.whole(times.whole[step.computation], kind, step.microbatch)
            return
        self._parts(rank, step, times, kind, actions or {})

    def _parts(
        self, rank: _Rank, step: Step, times: StageTimes, kind: Kind, actions: dict[int, tuple[ChunkAction, ...]]
    ) -> None:
        """Run a step group by group."""
        stage, computation, microbatch = step
        clock, forward = rank.clock, computation is Computation.FORWARD
        if forward:
            clock.other += times.cost.boundary_bytes
        count = len(times.groups)
        parts: list[Part] = times.parts(computation)
        for position in range(count):
            offload = self._act(rank, actions[position]) if position in actions else None
            if position >= len(parts):
                continue  # an input backward without a split computes nothing
            chunk = Chunk(stage, microbatch, position if forward else count - 1 - position)
            need = 0.0
            if not forward and chunk in rank.needs:
                need = rank.needs.pop(chunk)
                rank.reloading[stage, microbatch] -= 1
            start = clock.run(parts[position], kind, microbatch, need)
            if offload is not None:
                rank.copied[chunk] = clock.copy_out(times.groups[chunk.group], start, microbatch)
        self._end(clock, computation, times)
        if count in actions:
            self._act(rank, actions[count])

    @staticmethod
    def _end(clock: RankClock, computation: Computation, times: StageTimes) -> None:
        """Free what a step frees at its end."""
        boundary = times.cost.boundary_bytes
        if computation is Computation.BACKWARD:
            clock.other -= boundary
        elif computation is Computation.BACKWARD_INPUT:
            clock.occupy(times.after_input)
        elif computation is Computation.BACKWARD_WEIGHT:
            clock.other -= boundary + (times.kept_other if times.cost.splits else 0)
            clock.occupy(-times.kept)

    def _act(self, rank: _Rank, actions: tuple[ChunkAction, ...]) -> Chunk | None:
        """Carry out the actions of a moment; return the chunk of which the offload begins."""
        clock, offload = rank.clock, None
        for do, chunk in actions:
            group = self.times[chunk.stage].groups[chunk.group]
            if do is Do.OFFLOAD:
                offload = chunk
                continue
            again = chunk not in rank.copied
            if do is Do.RELEASE:
                clock.wait(rank.copied.get(chunk, 0.0), chunk.microbatch)
                clock.occupy(-group.again_bytes if again else -group.nbytes)
                continue
            seconds, ahead, nbytes = group.back, group.back_ahead, group.nbytes
            if again:
                seconds = ahead = group.again
                nbytes = group.again_bytes
            clock.occupy(nbytes)
            rank.needs[chunk] = clock.copy_back(seconds, ahead, nbytes, chunk.microbatch)
            of = chunk.stage, chunk.microbatch
            rank.reloading[of] = rank.reloading.get(of, 0) + 1
            rank.copied.pop(chunk, None)
        return offload


def _result(rank: _Rank) -> RankSimulation:
    clock = rank.clock
    copied = {kind: sum(span[4] for span in clock.spans if span[0] is kind) for kind in (Kind.D2H, Kind.H2D)}
    return RankSimulation(
        clock.compute,
        clock.bubble,
        clock.stalled,
        clock.saved_peak,
        clock.peak,
        copied[Kind.D2H],
        copied[Kind.H2D],
        tuple(rank.starts),
        clock.spans,
        clock.resident,
    )
