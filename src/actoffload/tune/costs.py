"""What the planner takes, from what a meter saw: the cost of each group, of its hooks, and the rates of copies."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median, median_low

from torch.nn import Module

from .._text import fold
from ..device.base import Backend, current_stream
from ..planner import OperatorCost, Variant, replay_ways
from ..planner.variants import correct_times
from ..schedule.costs import TEMPORARIES, TIMES, LayerCost, Link, Saved, StageCost, spread_evenly
from ..schedule.orders import Computation, Order
from ..schedule.timeline import Kind, Span
from .meter import PASS, WHOLE, Meter, StepMeter, Visit

HOST_SECONDS = 600e-6
"""Seconds of the host for one tensor that is offloaded.

It is 250 us where an H100 waits for its host, but the host's time varies: Llama 1.1B in a plain loop had steps of 268,
258, 257 and 248 ms with 100, 200, 400 and 800 us, and 267 with checkpointing.
"""
PROBE = 2**20  # bytes of a copy that measures the link
SHARED = 0.05
"""Part of the time of copies for which both directions must have been busy, so that their common rate is known."""


def measured_link(meter: Meter) -> Link | None:
    """Return the link with the rates of the copies in a step, as they ran; None if a direction had none."""
    out, back = meter.copies(Kind.D2H), meter.copies(Kind.H2D)
    beside = list(map(_beside(back), out)), list(map(_beside(out), back))
    first, second = map(_rate, (out, back), beside)
    if first is None or second is None:
        return None
    together = (sum(beside[0]) + sum(beside[1])) / 2
    if together < SHARED * sum(copy.seconds for copy in (*out, *back)):
        return Link(first, second)
    # While both directions are busy: all bytes without those that were copied before and after.
    nbytes = 0.0
    for copies, shared, rate in zip((out, back), beside, (first, second), strict=True):
        pairs = zip(copies, shared, strict=True)
        nbytes += sum(copy.nbytes - rate * (copy.seconds - part) for copy, part in pairs if part)
    return Link(first, second, both=min(max(nbytes / together, first, second), first + second))


def probed_link(backend: Backend, room: int | None) -> Link | None:
    """Return the rates of one copy in each direction; None if the `room` in host memory is less than that, or none."""
    if room is not None and room < PROBE:
        return None
    device, stream = backend.current_device(), backend.new_stream(backend.current_device())
    try:
        host = backend.empty_host(PROBE)
    except RuntimeError:
        return None
    copies = [(host, backend.empty_device((PROBE,), (1,), host.dtype, device))]
    backend.wait_stream(stream, current_stream(backend))
    rates = []
    for copy in (backend.to_host, backend.to_device):
        copy(copies, stream)  # to warm up
        begun = backend.record_timed(stream)
        copy(copies, stream)
        ended = backend.record_timed(stream)
        backend.synchronize(device)
        rates.append(PROBE / max(backend.elapsed(begun, ended), 1e-9))
    return Link(*rates)


def _beside(others: Sequence[Span]) -> Callable[[Span], float]:
    """Return a function: for how many seconds others, of which one ran at a time, ran beside a copy."""
    starts, until = [copy.start for copy in others], [0.0, *accumulate(copy.seconds for copy in others)]

    def before(now: float) -> float:
        count = bisect_right(starts, now)
        return until[count] - max(others[count - 1].end - now, 0.0) if count else 0.0

    return lambda copy: max(before(copy.end) - before(copy.start), 0.0)


def _rate(copies: Sequence[Span], shared: Sequence[float]) -> float | None:
    """Return the bytes per second of copies in one direction, of those that ran alone if there are such."""
    alone = [copy for copy, part in zip(copies, shared, strict=True) if not part] or copies
    seconds = sum(copy.seconds for copy in alone)
    return sum(copy.nbytes for copy in alone) / seconds if seconds > 0 else None


def layer_costs(
    meter: Meter, sizes: Sequence[Sequence[int]], kinds: Sequence[Hashable], compiled: Collection[int], allocated: int
) -> list[LayerCost]:
    """Return what each group of a pass that offloaded everything costs the device.

    By group, `sizes` are the bytes of the storages that it saves, and `kinds` what those have in common that cost the
    same.  The groups in `compiled` save everything at the end of their forward.  A pass may begin with `allocated`
    bytes: as much more other memory is there, if it was less before this one.  A host that waits for the device is late
    for another reason than its work, so groups of one kind have the least of what they took, without the time for the
    tensors that were offloaded.
    """
    more = max(allocated - meter.allocated_before, 0)  # [guard: gradients before some passes only]
    groups = range(len(sizes))
    forwards, backwards = (
        _without_pauses({k: visit for k in groups if (visit := meter.visits.get((PASS, kind, k)))}, kinds)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    costs = []
    for k in groups:
        levels = [each[k].other_bytes for each in (forwards, backwards) if k in each]
        least = min((level for pair in levels for level in pair), default=0)
        forward, backward = (each.get(k, Visit(other_bytes=(least, least))) for each in (forwards, backwards))
        first, second, third, fourth = (more + level for level in (*forward.other_bytes, *backward.other_bytes))
        saved = tuple(Saved(nbytes) for nbytes in sizes[k] if nbytes) if k in compiled else spread_evenly(sizes[k])
        cost = replace(
            _cost(forward, backward, saved),
            other_bytes=(first, second, third, fourth),
            unpacks_at_once=k in compiled,
            host_forward=max(forward.host - HOST_SECONDS * len(saved), 0.0),
            host_backward=max(backward.host - HOST_SECONDS * len(saved), 0.0),
        )
        costs.append(cost)
    return costs


def _cost(forward: Visit, backward: Visit, saved: tuple[Saved, ...]) -> LayerCost:
    """Return the cost of a group by the times and the temporary memory of its visits."""
    return LayerCost(
        forward.seconds,
        backward.seconds,
        saved,
        gap_forward=forward.gap,
        gap_backward=backward.gap,
        forward_temporary=forward.temporary,
        backward_temporary=backward.temporary,
        gap_forward_temporary=forward.gap_temporary,
        gap_backward_temporary=backward.gap_temporary,
    )


def _without_pauses(visits: Mapping[int, Visit], kinds: Sequence[Hashable]) -> dict[int, Visit]:
    """Return visits as if the host had not paused in them and in the gaps, with the least of its times.

    Beside large libraries a collection of garbage takes tenths of a second.  So what the host took longer than is usual
    for groups of a kind is taken from the time of the device, of which at least the usual is left.
    """
    found = {}
    for alike in fold(list(visits), kinds.__getitem__):
        known = [visits[k] for k in alike]
        least, usual = min(visit.host for visit in known), Visit(*map(median_low, zip(*known, strict=True)))
        for k in alike:
            gap, seconds, host_gap, host, *_ = visits[k]
            pause_before, pause = max(host_gap - usual.host_gap, 0.0), max(host - usual.host, 0.0)
            # [guard: groups in which the host pauses]
            gap, seconds = (
                max(gap - pause_before, min(gap, usual.gap)),
                max(seconds - pause, min(seconds, usual.seconds)),
            )
            found[k] = visits[k]._replace(gap=gap, seconds=seconds, host=least)
    return found


def gradient_bytes(meter: Meter, groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the new gradients that were there at the four borders of each group, as in `LayerCost.other_bytes`."""
    backwards = (meter.visits.get((PASS, Kind.BACKWARD, k), Visit()) for k in range(groups))
    return tuple((0, 0, *visit.gradients) for visit in backwards)


def scaled_cost(cost: LayerCost, factor: float, fixed: Sequence[int]) -> LayerCost:
    """Return a cost as for inputs with `factor` times as many elements.

    What is saved grows or shrinks as the inputs do, and so do the times of the device.  Other memory above the bytes
    that are `fixed` at each of the four moments, and temporary memory, only grows.
    """
    more = max(factor, 1.0)
    others = zip(cost.other_bytes, fixed, strict=True)
    first, second, third, fourth = (min(now, least) + math.ceil(more * max(now - least, 0)) for now, least in others)
    return replace(
        cost.with_bytes(factor),
        other_bytes=(first, second, third, fourth),
        **{name: factor * getattr(cost, name) for name in TIMES},
        **{name: math.ceil(more * getattr(cost, name)) for name in TEMPORARIES},
    )


# The ways to run groups


def ways_of(
    groups: Sequence[int],
    costs: Sequence[LayerCost],
    among: Collection[int],
    operators: Mapping[int, Sequence[OperatorCost]],
    saved: Mapping[int, Sequence[int]],
    batch: int,
) -> list[tuple[Variant, ...]]:
    """Return the ways to run each group, the first of them without replay; see `script` [Note: the first passes].

    The numbers of the groups, and what each cost, are in the order of the leanest pass; plans may replay those in
    `among`.  By number, `operators` are those of a group with their times, and `saved` the bytes that a compiled one
    saves beside its inputs as it is.  Copies wait until they have `batch` bytes.
    """
    times = Counter(groups)
    found = list[tuple[Variant, ...]]()
    for number, cost in zip(groups, costs, strict=True):
        ways: tuple[Variant, ...] = (Variant(cost),)
        if number in among and saved.get(number):
            ways = Variant(_run_once(cost, saved[number])), Variant(cost, ())
        elif number in among and operators.get(number):
            ways = replay_ways(cost, correct_times(operators[number], cost.forward))
        # One that runs several times would have one way for all of them.
        ways = ways[:1] if times[number] > 1 else ways
        found.append(tuple(way.map(lambda cost: cost.in_batches(batch)) for way in ways))
    return found


def _run_once(again: LayerCost, sizes: Sequence[int]) -> LayerCost:
    """Return what a compiled group costs as it is, by what it costs if it is run again, and the bytes that it saves."""
    return replace(
        again,
        saved=(*again.saved, *map(Saved, sizes)),
        backward=max(again.backward - again.forward, again.forward),
        host_backward=max(again.host_backward - again.host_forward, 0.0),
        # What was dropped was there for a time, in both directions.
        forward_temporary=max(again.forward_temporary - sum(sizes), 0),
        backward_temporary=max(again.backward_temporary - sum(sizes), 0),
    )


def kind_of(module: Module) -> Hashable:
    """Return what groups that cost the same have in common; only a flag or a text tells kinds of attention apart."""
    attributes = (value for inner in module.modules() for value in vars(inner).values())
    flags = tuple(value for value in attributes if value is None or type(value) in (bool, str))
    return type(module), tuple(weight.shape for weight in module.parameters()), flags


def larger_operator(operator: OperatorCost, factor: float) -> OperatorCost:
    """Return what an operator costs for inputs with `factor` times as many elements."""
    return replace(
        operator,
        seconds=factor * operator.seconds,
        sizes=tuple(math.ceil(factor * nbytes) for nbytes in operator.sizes),
        returned=math.ceil(factor * operator.returned),
        gradient=math.ceil(factor * operator.gradient),
    )


# Pipelines


@dataclass(eq=False)
class StageFacts:
    """What the steps so far showed of a stage."""

    split: bool = False  # the backward of its inputs used what it saved
    boundary: int = 0  # bytes of its output that are not saved
    returns: bool = False  # its outputs are kept until the step ends


def stage_cost(
    stage: int,
    sizes: Sequence[Sequence[int]],
    facts: StageFacts,
    order: Order,
    outside: int = 0,
    other_bytes: int = 0,
    gradients: Sequence[int] = (),
    meter: StepMeter | None = None,
) -> StageCost:
    """Return the cost of a stage in a step, of which each group saves storages of some sizes.

    A microbatch saves bytes `outside` of the groups, and `other_bytes` are always on the device.  `gradients` are the
    bytes that each group allocates for them.  Without the `meter` of a step all groups take the same time.
    """
    # The first stage has no inputs of which to compute gradients.  Another may have run nothing in the latest step.
    late = {step.stage for step in order if step.computation is Computation.BACKWARD_INPUT}
    split = facts.split or (stage > 0 and stage in late)
    groups, known = [], len(gradients) == len(sizes)
    for k, (forward, backward, weights) in enumerate(_visits(stage, len(sizes), meter, split=split)):
        cost = _cost(forward, backward, spread_evenly(sizes[k]))
        groups.append(replace(cost, weight_backward=weights, gradient_bytes=gradients[k] if known else 0))
    boundary, output = (0, facts.boundary) if facts.returns else (facts.boundary, 0)
    return StageCost(
        tuple(groups),
        boundary + outside,
        other_bytes,
        output,
        between_bytes=0 if meter is None or not split else meter.between_bytes.get(stage, 0),
        split=split,
    )


def _visits(stage: int, count: int, meter: StepMeter | None, *, split: bool) -> list[tuple[Visit, Visit, float]]:
    """Return the usual forward and backward of each group, and the seconds for its weights; even if not known."""
    seen = defaultdict[tuple[Computation, int], list[Visit]](list)
    for (step, _, group), visit in ({} if meter is None else meter.visits).items():
        if step.stage == stage:
            seen[step.computation, group].append(visit)

    def usual(computation: Computation) -> list[Visit]:
        """Return the visits of all groups, equal parts of the computation if none was seen, none if that was not."""
        whole, each = seen[computation, WHOLE], [seen[computation, k] for k in range(count)]
        if whole and not any(each):
            return [Visit(seconds=median(visit.seconds for visit in whole) / count)] * count
        return [_usual(visits) for visits in each] if whole else []

    forward, inputs, backward = map(usual, (Computation.FORWARD, Computation.BACKWARD_INPUT, Computation.BACKWARD))
    if not backward and not split:  # the weight backward is the full one
        backward = usual(Computation.BACKWARD_WEIGHT)
    if not forward or not (backward or inputs):
        return [(Visit(seconds=1.0), Visit(seconds=2.0), 1.0)] * count
    weights = [visit.seconds / 2 for visit in backward] or [1.0] * count
    late = [visit.seconds for visit in seen[Computation.BACKWARD_WEIGHT, WHOLE]]
    if inputs and late:
        whole = sum(visit.seconds for visit in inputs)
        weights = [median(late) * (visit.seconds / whole if whole else 1 / count) for visit in inputs]
    if not backward:
        pairs = zip(inputs, weights, strict=True)
        backward = [visit._replace(seconds=visit.seconds + seconds) for visit, seconds in pairs]
    return list(zip(forward, backward, weights, strict=True))


def _usual(visits: Sequence[Visit]) -> Visit:
    """Return the median times of some visits of a group, and the most memory."""
    if not visits:
        return Visit()
    gaps, seconds, *_, gap_temporary, temporary, _, _ = zip(*visits, strict=True)
    return Visit(median(gaps), median(seconds), gap_temporary=max(gap_temporary), temporary=max(temporary))
