"""Simulation of plans: from bytes, times and a link to a timeline, the peak and the stalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._arguments import check_kind, check_kinds, check_seconds
from .._text import Table, milliseconds, size
from .costs import LayerCost, Link, StageCost
from .orders import Computation, Step
from .plan import Plan, Steps
from .run import Pipeline
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
    A copy starts as soon as its tensor is ready and those before it in the same direction have ended.  Backward uses
    the tensors of a layer in order of `Saved.needed_at`, and frees one when it needs the next.  Compute also waits for
    the host to queue it, which is no stall.

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
    pipeline = Pipeline([plan], model_stages(layers), link, host_seconds=host_seconds, exact=True)
    (rank,) = pipeline.run([plan.steps], record=True)
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
    def slowdown(self) -> float:
        """Step time divided by that without offloading; 1.0 means that offloading costs no time."""
        without = max(rank.step_time for rank in self.baseline)
        return self.step_time / without if without else 1.0

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
    plans: Sequence[Plan | None] | None = None,
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
    no time, and what stages in no order send is there from the start.  What a group saves is copied as one tensor.

    Bytes do not depend on times, because the plan says when.  A release frees all that a group saved for a microbatch,
    and a reload occupies it when the copy is queued.  A full backward frees a group where it ends; a split one frees
    all at the end of the weight backward.  At one event releases come first, then reloads, then the group starts.

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
    check_kinds(Sequence, orders=orders)
    check_kinds(StageCost, stages=stages)
    for number, order in enumerate(orders):
        check_kinds(Step, optional=False, **{f"orders[{number}]": order})
        missing = {step.stage for step in order} - set(range(len(stages)))
        if missing:
            raise ValueError(f"Rank {number} has stage {min(missing)}, but there are costs of {len(stages)} stages.")
        split = {step.stage for step in order if step.computation is Computation.BACKWARD_INPUT} - {0}
        unsplit = [stage for stage in split if stages[stage].groups and not stages[stage].split]
        if unsplit:
            raise ValueError(f"Stage {max(unsplit)} has an input backward, but its cost has no split.")
    check_kind(Link, link=link)
    if plans is not None:
        check_kinds(Plan, optional=True, plans=plans)
    planned: Sequence[Plan | None] = [None] * len(orders) if plans is None else plans
    if len(planned) != len(orders):
        raise ValueError(f"There are {len(planned)} plans for {len(orders)} ranks; give one for each.")
    ranks = rank_plans(orders, stages)
    for plan, rank in zip(planned, ranks, strict=True):
        if plan is not None and (plan.order, plan.stages, plan.splits) != (rank.order, rank.stages, rank.splits):
            raise ValueError(f"The plan of rank {rank.rank} is for another order, or for other groups or splits.")
    pipeline = Pipeline(ranks, stages, link)
    without = pipeline.run([{}] * len(ranks), record=True)
    baseline = tuple(rank.simulation(rank.compute) for rank in without)
    actions: list[Steps] = [{} if plan is None else plan.steps for plan in planned]
    if not any(actions):
        return PipelineSimulation(baseline, baseline)
    pairs = zip(pipeline.run(actions, record=True), without, strict=True)
    return PipelineSimulation(tuple(rank.simulation(alone.compute) for rank, alone in pairs), baseline)


def rank_plans(orders: Sequence[Sequence[Step]], stages: Sequence[StageCost]) -> list[Plan]:
    """Return the plans of the ranks of a pipeline that keep everything; groups have their numbers as names."""
    names = {stage: [str(k) for k in range(len(cost.groups))] for stage, cost in enumerate(stages)}
    splits = [stage for stage, cost in enumerate(stages) if cost.split]
    return [Plan.of_rank(rank, order, names, splits) for rank, order in enumerate(orders)]


def model_stages(layers: Sequence[LayerCost]) -> list[StageCost]:
    """Return the stages of a model, one for each layer."""
    known = {id(cost): StageCost((cost,)) for cost in layers}  # some are equal
    return [known[id(cost)] for cost in layers]
