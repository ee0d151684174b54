"""Simulation of plans: from bytes, times and a link to a timeline, the peak and the stalls.

A forward and a backward of a model is a pipeline of one rank and one microbatch, with a stage for each layer, because a
plan of a model can act where each layer starts and where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from .._arguments import check_kind, check_kinds, check_seconds
from .._text import Table, milliseconds, size
from .costs import LayerCost, Link, StageCost, StageTimes
from .pipeline import Actions, Chunk, ChunkAction, Computation, PipelinePlan, Step
from .plan import Action, Plan
from .run import CompiledStep, Message, RankRun
from .timeline import Simulation


def simulate(plan: Plan, layers: Sequence[LayerCost], link: Link, *, host_seconds: float = 0.0) -> Simulation:
    """Predict one step: a forward of all layers, then their backward in reverse order.

    Parameters
    ----------
    plan : Plan
        What is done when.
    layers : sequence of LayerCost
        One per layer of the plan, in order of the forward.
    link : Link
        How fast copies are.
    host_seconds : float
        Seconds that the host spends on each saved tensor of an offloaded layer, in forward and again in backward.

    Returns
    -------
    Simulation
        Times in seconds, sizes in bytes.

    Raises
    ------
    ValueError
        If there are more or fewer costs than layers in the plan.

    Notes
    -----
    The host runs ahead of the device: a copy starts as soon as its tensor is ready and its queue is free, however late
    it is queued.  Copies in one direction run one after the other.  Backward uses the tensors of a layer in order of
    their `Saved.needed_at`, and a tensor is freed when the next one is needed.  Compute of which the host has not yet
    queued the work waits for it, which is no stall.

    Examples
    --------
    Two of five layers are offloaded, their copies are as fast as forward, and compute never waits:

    >>> from actoffload.schedule import DefaultSchedule, LayerCost, Link, simulate
    >>> layers = [LayerCost.even(256 * 2**20, forward=0.010, backward=0.020)] * 5
    >>> link = Link(d2h=25.6 * 2**30, h2d=25.6 * 2**30)
    >>> print(simulate(DefaultSchedule(num_layers=2, model_layers=5).plan(), layers, link))
    step      150.000 ms  1.000 x no offload
    forward    50.000 ms  0.000 ms stalled
    backward  100.000 ms  0.000 ms stalled
    peak       768.0 MiB  saved activations on the device
    offloaded  512.0 MiB  device to host
    reloaded   512.0 MiB  host to device, 0 tensors on demand
    """
    check_kind(Plan, plan=plan)
    check_kinds(LayerCost, layers=layers)
    check_kind(Link, link=link)
    check_seconds(host_seconds=host_seconds)
    if len(layers) != plan.model_layers:
        raise ValueError(
            f"The plan has {plan.model_layers} layers but {len(layers)} costs were given; "
            "give one LayerCost per layer, in order of the forward."
        )
    order = model_order(len(layers))
    stages = model_stages(layers)
    pipeline = Pipeline([order], stages, link, host_seconds=host_seconds, exact=True)
    actions = {
        divmod(place, 2): tuple(ChunkAction(action.do, Chunk(action.layer, 0, 0)) for action in plan.steps[event])
        for place, event in enumerate(plan.events())
        if plan.steps.get(event)
    }
    (rank,) = pipeline.run([actions], record=True)
    (without,) = pipeline.run([{}])
    return rank.simulation(without.compute)


@dataclass(frozen=True)
class PipelineSimulation:
    """What `simulate_pipeline` predicts for one step of a schedule; ``print`` gives a table by rank.

    Parameters
    ----------
    ranks : tuple of Simulation
        One for each rank.
    baseline : tuple of Simulation
        The same without offloading.
    """

    ranks: tuple[Simulation, ...]
    baseline: tuple[Simulation, ...]

    @property
    def step_time(self) -> float:
        """Seconds until the last rank has ended."""
        return max(rank.step_time for rank in self.ranks)

    @property
    def baseline_time(self) -> float:
        """The same without offloading."""
        return max(rank.step_time for rank in self.baseline)

    @property
    def slowdown(self) -> float:
        """Step time divided by that without offloading; 1.0 means that offloading costs no time."""
        return self.step_time / self.baseline_time if self.baseline_time else 1.0

    def __str__(self) -> str:
        rows = tuple(
            (
                str(number),
                size(without.device_peak_bytes),
                size(rank.device_peak_bytes),
                size(rank.bytes_offloaded),
                milliseconds(rank.stall_seconds),
                milliseconds(rank.bubble_seconds),
            )
            for number, (rank, without) in enumerate(zip(self.ranks, self.baseline, strict=True))
        )
        table = Table(("rank", "peak without", "peak", "offloaded", "stalled", "bubbles"), rows, left=0)
        return f"step {milliseconds(self.step_time)}, {self.slowdown:.3f} x no offload\n\n{table}"


def simulate_pipeline(
    orders: Sequence[Sequence[Step]],
    stages: Sequence[StageCost],
    link: Link,
    plans: Sequence[PipelinePlan | None] | None = None,
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
    A forward starts when that of the previous stage has ended, a backward when that of the next stage has.  Sends take
    no time.  What stages send that are in no order is there from the start.  Copies of a chunk to the
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
      rank    peak without      peak    offloaded    stalled    bubbles
    ------  --------------  --------  -----------  ---------  ---------
         0        2.00 GiB  2.00 GiB      0 bytes    0.00 ms   30.00 ms
         1        1.00 GiB  1.00 GiB      0 bytes    0.00 ms   10.00 ms
    """
    check_pipeline(orders, stages, link)
    if plans is not None:
        check_kinds(PipelinePlan, optional=True, plans=plans)
    steps = [tuple(order) for order in orders]
    planned: Sequence[PipelinePlan | None] = [None] * len(steps) if plans is None else plans
    if len(planned) != len(steps):
        raise ValueError(f"There are {len(planned)} plans for {len(steps)} ranks; give one for each.")
    for rank, (order, plan) in enumerate(zip(steps, planned, strict=True)):
        if plan is None:
            continue
        if plan.order != order:
            raise ValueError(f"The plan of rank {rank} is for another order than that of this rank.")
        for stage, names in plan.names.items():
            if len(names) != len(stages[stage].groups) or plan.splits[stage] != stages[stage].split:
                raise ValueError(f"The plan of rank {rank} is for other groups or splits of stage {stage}.")
    pipeline = Pipeline(steps, stages, link)
    without = pipeline.run([{}] * len(steps), record=True)
    baseline = tuple(rank.simulation(rank.compute) for rank in without)
    actions: list[Actions] = [{} if plan is None else plan.actions for plan in planned]
    if not any(actions):
        return PipelineSimulation(baseline, baseline)
    pairs = zip(pipeline.run(actions, record=True), without, strict=True)
    return PipelineSimulation(tuple(rank.simulation(alone.compute) for rank, alone in pairs), baseline)


def check_pipeline(orders: Sequence[Sequence[Step]], stages: Sequence[StageCost], link: Link) -> None:
    """Raise a `TypeError` or `ValueError` for the first argument of `simulate_pipeline` that cannot be."""
    check_kinds(Sequence, orders=orders)
    check_kinds(StageCost, stages=stages)
    for rank, order in enumerate(orders):
        check_kinds(Step, optional=False, **{f"orders[{rank}]": order})
        missing = {step.stage for step in order} - set(range(len(stages)))
        if missing:
            raise ValueError(f"Rank {rank} has stage {min(missing)}, but there are costs of {len(stages)} stages.")
        split = {step.stage for step in order if step.computation is Computation.BACKWARD_INPUT} - {0}
        without = [stage for stage in split if stages[stage].groups and not stages[stage].split]
        if without:
            raise ValueError(f"Stage {max(without)} has an input backward, but its cost has no split.")
    check_kind(Link, link=link)


class Pipeline:
    """The orders and costs of all ranks, which can be run with any plans.

    If it is `exact`, as of a model, each saved tensor is copied and freed alone, and spans name the stage.  Otherwise
    those of a group are one piece, which takes as long, and spans name the microbatch.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Step]],
        stages: Sequence[StageCost],
        link: Link,
        *,
        host_seconds: float = 0.0,
        exact: bool = False,
    ) -> None:
        self.link, self._exact, self._host_seconds = link, exact, host_seconds
        known = {id(cost): self.stage_times(cost) for cost in {id(cost): cost for cost in stages}.values()}
        self.times = [known[id(cost)] for cost in stages]
        self.stages = {step.stage for order in orders for step in order}
        self.other = [sum(stages[stage].other_bytes for stage in {step.stage for step in order}) for order in orders]
        self.compiled = [[self._compile(step) for step in order] for order in orders]

    def stage_times(self, cost: StageCost) -> StageTimes:
        """Return the times of a stage."""
        return StageTimes(cost, self.link, exact=self._exact)

    def _compile(self, step: Step) -> CompiledStep:
        if step.computation is Computation.BACKWARD_WEIGHT:
            return CompiledStep(None, None, step)
        forward = step.computation is Computation.FORWARD
        before = step.stage - 1 if forward else step.stage + 1
        needs = (before, forward, step.microbatch) if before in self.stages else None
        return CompiledStep(needs, (step.stage, forward, step.microbatch), step)

    def run(
        self, actions: Sequence[Actions], *, record: bool = False, note: bool = False, allowed: float = inf
    ) -> list[RankRun]:
        """Run every rank with its actions as far as it comes, until all have ended or one took longer than allowed.

        `record` and `note` are as in `RankRun`.
        """
        arrivals = dict[Message, float]()
        how: dict[str, Any] = {"host_seconds": self._host_seconds, "label": 0 if self._exact else 1}
        how |= {"record": record, "note": note, "allowed": allowed}
        ranks = [
            RankRun(steps, self.times, self.link, other, acts, **how)
            for steps, other, acts in zip(self.compiled, self.other, actions, strict=True)
        ]
        while sum(rank.advance(arrivals) for rank in ranks):
            if any(rank.compute > allowed for rank in ranks):
                return ranks
        for number, rank in enumerate(ranks):
            if len(rank.starts) < len(rank.steps):
                step = rank.steps[len(rank.starts)].step
                raise ValueError(f"Rank {number} waits forever at its step {step}: no rank sends what that needs.")
        return ranks


# A model as a pipeline


def model_order(layers: int) -> tuple[Step, ...]:
    """Return the steps of a model: the forward of each layer, then the backward of each."""
    forward = [Step(layer, Computation.FORWARD, 0) for layer in range(layers)]
    return (*forward, *(step._replace(computation=Computation.BACKWARD) for step in reversed(forward)))


def model_stages(layers: Sequence[LayerCost]) -> list[StageCost]:
    """Return the stages of a model, one for each layer."""
    known = {id(cost): StageCost((cost,)) for cost in layers}  # some are equal
    return [known[id(cost)] for cost in layers]


def model_plan(layers: int, actions: Actions) -> Plan:
    """Return the plan of a model with some actions by moment."""
    events = list(Plan(layers).events())
    steps = {
        events[2 * step + position]: tuple(Action(action.do, action.chunk.stage) for action in at_moment)
        for (step, position), at_moment in actions.items()
    }
    return Plan(layers, steps)
