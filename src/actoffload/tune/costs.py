"""What the planner takes, from what a meter saw: the cost of each group, of its hooks, and the rates of copies."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median, median_low
from typing import Any

from torch.nn import Module

from .._text import fold
from ..device.base import Backend, current_stream
from ..planner import OperatorCost, Variant, replay_ways
from ..planner.variants import correct_times
from ..schedule.costs import TEMPORARIES, TIMES, LayerCost, Link, Saved, StageCost, spread_evenly
from ..schedule.orders import Computation, Order, Step
from ..schedule.timeline import Kind
from .meter import PASS, WHOLE, Copy, Meter, Span, StepMeter, Times, spans
from .meter import kind_of as kind_of_computation

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


def _beside(others: Sequence[Copy]) -> Callable[[Copy], float]:
    """Return a function: for how many seconds others, of which one ran at a time, ran beside a copy."""
    starts, until = [copy.begun for copy in others], [0.0, *accumulate(copy.seconds for copy in others)]

    def before(now: float) -> float:
        count = bisect_right(starts, now)
        return until[count] - max(others[count - 1].ended - now, 0.0) if count else 0.0

    return lambda copy: max(before(copy.ended) - before(copy.begun), 0.0)


def _rate(copies: Sequence[Copy], shared: Sequence[float]) -> float | None:
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
    times = meter.times[PASS]
    more = max(allocated - meter.allocated_before, 0)  # [guard: gradients before some passes only]
    groups = range(len(sizes))
    alike = fold(groups, kinds.__getitem__)
    turned = max((seconds for (kind, *_), seconds in times.items() if kind is Kind.FORWARD), default=0.0)
    runs = (Kind.FORWARD, groups, 0.0), (Kind.BACKWARD, groups[::-1], turned)
    hosts = [meter.host_spans(kind, order) for kind, order, _ in runs]
    devices = [spans(times, *run) for run in runs]
    forwards, backwards = (_without_pauses(*both, alike) for both in zip(devices, hosts, strict=True))
    least_host = [
        {k: min((host[each].seconds for each in same if each in host), default=0.0) for same in alike for k in same}
        for host in hosts
    ]
    costs, temporaries = [], meter.temporaries()
    for k in groups:
        borders = meter.around(k)
        least = min((border.other_bytes for border in borders if border is not None), default=0)
        first, second, third, fourth = (more + (least if border is None else border.other_bytes) for border in borders)
        saved = tuple(Saved(nbytes) for nbytes in sizes[k] if nbytes) if k in compiled else spread_evenly(sizes[k])
        host_forward, host_backward = (max(each[k] - HOST_SECONDS * len(saved), 0.0) for each in least_host)
        cost = replace(
            _cost(forwards[k], backwards[k], saved, temporaries[k]),
            other_bytes=(first, second, third, fourth),
            unpacks_at_once=k in compiled,
            host_forward=host_forward,
            host_backward=host_backward,
        )
        costs.append(cost)
    return costs


def _cost(forward: Span, backward: Span, saved: Sequence[Saved], temporaries: Sequence[int]) -> LayerCost:
    """Return the cost of a group by its times, and the memory that it takes for a time at its four borders."""
    known: dict[str, Any] = dict(zip(TEMPORARIES, temporaries, strict=True))
    known |= {"gap_forward": forward.gap, "gap_backward": backward.gap}
    return LayerCost(forward.seconds, backward.seconds, tuple(saved), **known)


def _without_pauses(
    device: Mapping[int, Span], host: Mapping[int, Span], alike: Iterable[Sequence[int]]
) -> dict[int, Span]:
    """Return the times of the device in groups and in the gaps before them, as if the host had not paused in them.

    Beside large libraries a collection of garbage takes tenths of a second.  So what the host took longer than is usual
    for groups that are `alike` is taken from the time of the device, of which at least the usual is left.
    """
    found = {k: list(span) for k, span in device.items()}
    for groups in alike:
        known = [k for k in groups if k in host]
        for part in range(len(Span._fields) if known else 0):
            usual, usual_of_host = (median_low(each[k][part] for k in known) for each in (device, host))
            for k in known:
                taken, pause = device[k][part], max(host[k][part] - usual_of_host, 0.0)
                # [guard: groups in which the host pauses]
                found[k][part] = max(taken - pause, min(taken, usual))
    return {k: Span(*parts) for k, parts in found.items()}


def gradient_bytes(meter: Meter, groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the new gradients that were there at the four borders of each group, as in `LayerCost.other_bytes`."""
    around = map(meter.around, range(groups))
    return tuple(tuple(0 if border is None else border.gradients for border in borders) for borders in around)


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
        # One that runs several times would have one way for all of them.
        once = number in among and times[number] == 1
        if once and saved.get(number):
            ways = Variant(_run_once(cost, saved[number])), Variant(cost, ())
        elif once and operators.get(number):
            ways = replay_ways(cost, correct_times(operators[number], cost.forward))
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
    temporaries = {} if meter is None else meter.temporaries(stage)
    groups, known = [], len(gradients) == len(sizes)
    for k, (forward, backward, weights) in enumerate(_group_times(stage, len(sizes), meter, split=split)):
        cost = _cost(forward, backward, spread_evenly(sizes[k]), temporaries.get(k, [0] * 4))
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


def _group_times(stage: int, count: int, meter: StepMeter | None, *, split: bool) -> list[tuple[Span, Span, float]]:
    """Return the times of each group in forward and backward, and the seconds for its weights; even if not known."""
    even = [(Span(0.0, 1.0), Span(0.0, 2.0), 1.0)] * count
    if meter is None:
        return even
    ran = {computation: _ran(meter, stage, computation) for computation in Computation}
    forward, inputs, backward, both = (
        _median_spans(ran[computation], kind_of_computation(computation), count)
        for computation in (
            Computation.FORWARD,
            Computation.BACKWARD_INPUT,
            Computation.BACKWARD,
            Computation.BACKWARD_WEIGHT,
        )
    )
    if backward is None and not split:  # the weight backward is the full one
        backward = both
    if forward is None or (backward is None and inputs is None):
        return even
    weights = [1.0] * count
    if inputs is not None and both is not None:
        whole, late = sum(each.seconds for each in inputs), _seconds(ran[Computation.BACKWARD_WEIGHT], Kind.BACKWARD)
        weights = [late * (each.seconds / whole if whole else 1 / count) for each in inputs]
    elif backward is not None:
        weights = [each.seconds / 2 for each in backward]
    if backward is None:
        backward = [Span(each.gap, each.seconds + late) for each, late in zip(inputs or (), weights, strict=True)]
    return list(zip(forward, backward, weights, strict=True))


def _ran(meter: StepMeter, stage: int, computation: Computation) -> list[Times]:
    """Return when each microbatch of a computation of a stage came to its borders, and its groups to theirs."""
    ends = kind_of_computation(computation), WHOLE, True
    found = [(step, times) for step, times in meter.times.items() if isinstance(step, Step) and ends in times]
    return [times for step, times in found if (step.stage, step.computation) == (stage, computation)]


def _seconds(ran: Sequence[Times], kind: Kind) -> float:
    """Return the median seconds of a computation, without stalls."""
    return median(times[kind, WHOLE, True] - times[kind, WHOLE, False] for times in ran)


def _median_spans(ran: Sequence[Times], kind: Kind, count: int) -> list[Span] | None:
    """Return the median times of each group in a computation, equal parts if no group was seen; None without any."""
    if not ran:
        return None
    order = range(count) if kind is Kind.FORWARD else range(count - 1, -1, -1)
    found = [spans(times, kind, order, times[kind, WHOLE, False]) for times in ran if len(times) > 2]
    if not found:
        return [Span(0.0, _seconds(ran, kind) / count)] * count
    return [Span(*map(median, zip(*(each[k] for each in found), strict=True))) for k in range(count)]
