"""The run of a pipeline: of each rank the clocks, the memory and the copies of what its layers save.

Each rank has four clocks: compute, host, and one copy queue for each direction.  An operation begins when its queue is
free and what it waits for is done.  The engine on the reference device performs the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from .costs import LayerCost, Link, Saved, StageCost
from .orders import BORDERS, Computation, Step
from .plan import Action, Do, Plan, Steps
from .timeline import Kind, Simulation, Span, Timeline

Message = tuple[int, bool, int]
"""What a stage sends: its number, whether it is of a forward, and the microbatch."""

WEIGHTS = Computation.BACKWARD, Computation.BACKWARD_WEIGHT
"""What computes gradients of weights."""

Key = tuple[int, int]
"""Layer of the rank, and microbatch."""


# Layers as they are run


class Part(NamedTuple):
    """The compute of one layer in one computation."""

    gap: float
    seconds: float
    host: float
    temporary: int  # bytes allocated for a time
    gap_temporary: int
    levels: tuple[int, int]  # bytes beside those of the rank, where it starts and where it ends
    uses: tuple[tuple[int, float], ...]  # positions of the tensors that it saves or needs, and when, as fractions
    at_once: bool  # it writes all before it saves any, and frees all when it ends
    kept: int  # bytes that it keeps, or frees if negative, beside the saved ones
    frees: bool  # what it uses


class LayerRun:
    """The tensors that a layer saves, and its part in each computation; none in an input backward without a split."""

    def __init__(self, cost: LayerCost, saved: tuple[Saved, ...], link: Link, *, split: bool) -> None:
        self.cost, self.saved, self.nbytes = cost, saved, cost.nbytes
        # The copies, if there is one tensor: seconds to the host, from the start of the forward until that can start,
        # back to the device, and by how much that must start before the backward does.
        self.out = self.ready = self.back = self.ahead = 0.0
        if len(saved) == 1:
            self.out, self.ready = self.nbytes / link.d2h, saved[0].saved_at * cost.forward
            self.back = self.nbytes / link.h2d
            self.ahead = self.back - saved[0].needed_at * (cost.input_backward if split else cost.backward)
        computations = (each for each in Computation if split or each is not Computation.BACKWARD_INPUT)
        self.parts = {each: self._part(each, split and each is not Computation.BACKWARD) for each in computations}

    def _part(self, computation: Computation, half: bool) -> Part:
        """Return the part in a computation; `half` says whether it is one of a split backward, which frees nothing."""
        cost, saved, at_once = self.cost, self.saved, self.cost.unpacks_at_once
        if computation is Computation.FORWARD:
            times = cost.gap_forward, cost.forward, cost.host_forward
            temporaries = cost.forward_temporary, cost.gap_forward_temporary
            uses = tuple((k, each.saved_at) for k, each in enumerate(saved))
            return Part(*times, *temporaries, cost.other_bytes[:2], uses, at_once, cost.kept_bytes, frees=False)
        times = cost.gap_backward, cost.backward, cost.host_backward
        temporaries = cost.backward_temporary, cost.gap_backward_temporary
        if half:
            host = cost.host_backward * (cost.input_backward / cost.backward if cost.backward else 1.0)
            times = cost.gap_backward, cost.input_backward, host
            if computation is Computation.BACKWARD_WEIGHT:
                times = 0.0, cost.weight_backward, cost.host_backward - host
        order = range(len(saved)) if at_once else sorted(range(len(saved)), key=lambda k: (saved[k].needed_at, -k))
        uses = tuple((k, 0.0 if at_once else saved[k].needed_at) for k in order)
        kept = 0 if half else -cost.kept_bytes
        return Part(*times, *temporaries, cost.other_bytes[2:], uses, at_once, kept, frees=not half)


def merged(cost: LayerCost, link: Link, *, split: bool) -> tuple[Saved, ...]:
    """Return one tensor in place of those of a layer: with a free queue its copies end, and are needed, as late."""
    if not cost.saved:
        return ()
    out = copied = back = 0.0
    backward = cost.input_backward if split else cost.backward
    needed = inf  # seconds from the start of the backward
    for each in cost.saved:
        seconds = each.nbytes / link.d2h
        out, copied = out + seconds, max(copied, each.saved_at * cost.forward) + seconds
        # Those that were saved before are copied back later.
        needed = min(needed, back + (0.0 if cost.unpacks_at_once else each.needed_at * backward))
        back += each.nbytes / link.h2d
    saved_at = min(max(copied - out, 0.0) / cost.forward, 1.0) if cost.forward else 1.0
    needed_at = min(needed / backward, 1.0) if backward else 0.0
    return (Saved(cost.nbytes, saved_at, needed_at, sum(each.tensors for each in cost.saved)),)


class Pipeline:
    """The ranks, given by plans of which only what they compute counts, and the costs of all stages.

    If it is `exact`, each saved tensor is copied and freed alone.  Otherwise those of a layer are one.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        stages: Sequence[StageCost],
        link: Link,
        *,
        host_seconds: float = 0.0,
        exact: bool = False,
    ) -> None:
        self.plans, self.stages, self.link = plans, stages, link
        self.host_seconds = host_seconds  # of the host for each tensor of an offloaded layer, in both directions
        self._exact = exact
        self._known = dict[tuple[int, bool], LayerRun]()  # some costs are equal
        ran = [{step.stage for step in plan.computed} for plan in plans]
        self.other = [sum(stages[stage].other_bytes for stage in mine) for mine in ran]
        every = set[int]().union(*ran)
        self.compiled = [[_compile(step, plan, every) for step in plan.computed] for plan in plans]
        self.use([[cost for stage in plan.layers for cost in stages[stage].groups] for plan in plans])

    def use(self, costs: Sequence[Sequence[LayerCost]]) -> None:
        """Run the layers of each rank with some costs from now on."""
        self.layers, self._left = list[list[LayerRun]](), dict[int, list[float]]()
        for mine, plan in zip(costs, self.plans, strict=True):
            splits = [self.stages[stage].split for stage, layers in plan.layers.items() for _ in layers]
            self.layers.append([self.layer(cost, split) for cost, split in zip(mine, splits, strict=True)])

    def left(self, rank: int) -> list[float]:
        """Return the seconds of compute of a rank from each step on, without any waiting."""
        if rank not in self._left:
            layers = self.layers[rank]
            parts = ([layers[k].parts.get(each.step.computation) for k in each.layers] for each in self.compiled[rank])
            seconds = [sum(part.gap + part.seconds for part in each if part is not None) for each in parts]
            self._left[rank] = [*accumulate(reversed(seconds), initial=0.0)][::-1]
        return self._left[rank]

    def layer(self, cost: LayerCost, split: bool) -> LayerRun:
        """Return a layer with some cost as it is run."""
        key = id(cost), split
        if key not in self._known:
            saved = cost.saved if self._exact else merged(cost, self.link, split=split)
            self._known[key] = LayerRun(cost, saved, self.link, split=split)
        return self._known[key]

    def run(
        self, actions: Sequence[Steps], *, record: bool = False, note: bool = False, allowed: float = inf
    ) -> list[RankRun]:
        """Run every rank with its actions as far as it comes, until all have ended or one took longer than allowed.

        `record` and `note` are as in `RankRun`.
        """
        arrivals = dict[Message, float]()
        ranks = [
            RankRun(self, rank, acts, record=record, note=note, allowed=allowed) for rank, acts in enumerate(actions)
        ]
        while sum(rank.advance(arrivals) for rank in ranks):
            if any(rank.compute > allowed for rank in ranks):
                return ranks
        for number, rank in enumerate(ranks):
            if len(rank.starts) < len(rank.steps):
                step = rank.steps[len(rank.starts)].step
                raise ValueError(f"Rank {number} waits forever at its step {step}: no rank sends what that needs.")
        return ranks


class CompiledStep(NamedTuple):
    """A step with what is looked up for it."""

    needs: Message | None
    sends: Message | None
    step: Step
    layers: Sequence[int]  # as they are computed


def _compile(step: Step, plan: Plan, stages: set[int]) -> CompiledStep:
    forward, layers = step.computation is Computation.FORWARD, plan.layers.get(step.stage, range(0))
    found = step, layers if forward else layers[::-1]
    if step.computation is Computation.BACKWARD_WEIGHT:
        return CompiledStep(None, None, *found)
    before = step.stage - 1 if forward else step.stage + 1
    needs = (before, forward, step.microbatch) if before in stages else None
    return CompiledStep(needs, (step.stage, forward, step.microbatch), *found)


# Ranks that run


@dataclass(slots=True)
class _Copy:
    """A saved tensor in the run."""

    saved: Saved
    ready: float  # compute has written it
    copied: float = 0.0  # its copy on the host is complete
    on_device: bool = True
    arrival: float = 0.0  # its copy back is complete


class RankRun:
    """One rank that runs, with the actions of a plan.  The clocks are seconds since the step of the schedule began.

    With `record` it records a timeline, which takes about as long as the run; with `note`, when each event comes and
    the bytes that are needed at most until the next one.  A run that would take longer than `allowed` is stopped.
    """

    def __init__(
        self, pipeline: Pipeline, rank: int, actions: Steps, *, record: bool, note: bool, allowed: float
    ) -> None:
        self._pipeline, self._link, self._host_seconds = pipeline, pipeline.link, pipeline.host_seconds
        self.steps, self._layers, self._stages = pipeline.compiled[rank], pipeline.layers[rank], pipeline.stages
        self._actions: Mapping[Any, tuple[Action, ...]] = actions
        self._record, self._notes = record, note
        self._allowed, self._left = allowed, None if allowed == inf else pipeline.left(rank)
        self._label = 0 if pipeline.plans[rank].rank is None else 1  # spans name the layer, or the microbatch
        self.compute = self._host = self._d2h = self._h2d = 0.0
        self._bubble = self._stalled = 0.0
        self.starts: list[float] = []
        self._turn: tuple[float, float] | None = None  # the first backward starts, and seconds of stalls before it
        self._on_demand = 0  # tensors that were reloaded only when backward used them
        self._other = self.peak = pipeline.other[rank]  # bytes beside saved tensors, without those of `Part.levels`
        self._saved = self.saved_peak = 0  # bytes of saved tensors
        self._spans: list[Span] = []
        self._resident: list[tuple[float, int]] = []
        self.when: list[float] = []
        self.needs: list[int] = []
        # Memory since the latest border, which is where compute starts or ends and where something was done.
        self._at_border = self._highest = 0  # saved bytes there, and at most since then
        self._other_there = self._other
        if self.steps and self.steps[0].layers:
            first = self._layers[self.steps[0].layers[0]].parts.get(self.steps[0].step.computation)
            self._other_there += first.levels[0] if first is not None else 0
        self._held: dict[Key, list[_Copy]] = {}
        self._offloading: set[Key] = set()
        self._released: set[Key] = set()
        self._with_gradients: set[int] = set()  # stages

    def advance(self, arrivals: dict[Message, float]) -> bool:
        """Run until a step needs what is not sent yet, or takes longer than it may; return whether one has run."""
        begun = len(self.starts)
        for number in range(begun, len(self.steps)):
            needs, sends, step, layers = self.steps[number]
            if needs is not None:
                arrival = arrivals.get(needs)
                if arrival is None:
                    break
                if arrival > self.compute:
                    self._bubble += arrival - self.compute
                    self.compute = arrival
            self.starts.append(self.compute)
            self._step(step, layers)
            if self._left is not None and self.compute + self._left[number + 1] > self._allowed:
                self.compute = inf
                break
            if sends is not None:
                arrivals[sends] = self.compute
        return len(self.starts) > begun

    def _step(self, step: Step, layers: Sequence[int]) -> None:
        """Run a step layer by layer."""
        actions, (stage, computation, microbatch), cost = self._actions, step, self._stages[step.stage]
        forward, (start, end) = computation is Computation.FORWARD, BORDERS[computation]
        level, gradients = 0, computation in WEIGHTS and stage not in self._with_gradients
        if forward:
            self._other += cost.boundary_bytes + cost.output_bytes
        elif self._turn is None:
            self._turn = self.compute, self._stalled
        if gradients:
            self._with_gradients.add(stage)
        for position, layer in enumerate(layers):
            run = self._layers[layer]
            part = run.parts.get(computation)
            if part is not None:
                self.compute += part.gap
                level = part.levels[0]
                if part.gap_temporary or self._other + level != self._other_there:
                    self._border(level, part.gap_temporary)
            if actions and (found := actions.get((start, layer, microbatch))):
                self._act(found, level)
            if self._notes and (not position or computation is not Computation.BACKWARD_WEIGHT or not cost.split):
                self._note(level)
            if part is None:
                continue
            if forward:
                self._forward(part, (layer, microbatch), run.saved)
            else:
                self._backward(part, (layer, microbatch), run.saved)
            self._other += part.kept
            if gradients:
                self._other += run.cost.gradient_bytes
            level = part.levels[1]
            self._border(level, part.temporary)
        if not forward and (cost.boundary_bytes or cost.split):
            self._end_backward(computation, cost, layers)
            self._at_border = self._highest = self._saved
            self._other_there = self._other + level
            self._border(level)
        if layers:
            if actions and (found := actions.get((end, layers[-1], microbatch))):
                self._act(found, level)
            if self._notes:
                self._note(level)

    def _end_backward(self, computation: Computation, cost: StageCost, layers: Sequence[int]) -> None:
        """Free what a backward frees where it ends."""
        if computation is Computation.BACKWARD_INPUT:
            self._other += cost.between_bytes if cost.split else 0
            return
        self._other -= cost.boundary_bytes
        if cost.split and computation is Computation.BACKWARD_WEIGHT:  # a full backward frees layer by layer
            ran = [self._layers[layer] for layer in layers]
            self._other -= cost.between_bytes + sum(each.cost.kept_bytes for each in ran)
            self._occupy(-sum(each.nbytes for each in ran))

    # Compute

    def _reach(self, start: tuple[float, float, float], seconds: float, host_seconds: float) -> None:
        """Let compute run until a time since its start, without stalls, and never back.

        The host needs `host_seconds` to queue this compute; compute waits for it, which is no stall.
        """
        host, compute = start[1] + host_seconds, start[0] + seconds + self._stalled - start[2]
        if host > self._host:
            self._host = host
        if self._host > compute:
            compute = self._host
        if compute > self.compute:
            self.compute = compute

    def _forward(self, part: Part, key: Key, saved: tuple[Saved, ...]) -> None:
        start = begun, _, _ = self.compute, self._host, self._stalled
        held = self._held[key] = []
        offloading = key in self._offloading
        if part.at_once:
            self._highest = max(self._highest, self._saved + sum(each.nbytes for each in saved))
        for k, at in part.uses:
            self._reach(start, at * part.seconds, at * part.host)
            self._occupy(saved[k].nbytes)
            if self._actions:
                held.append(copy := _Copy(saved[k], self.compute))
            if offloading:
                if self._host_seconds:
                    start = self._hook(start, saved[k].tensors)
                self._copy_out(key, copy)
        self._reach(start, part.seconds, part.host)
        self._span(Kind.FORWARD, key, begun)

    def _backward(self, part: Part, key: Key, saved: tuple[Saved, ...]) -> None:
        if key not in self._held:
            raise ValueError(f"The order has a backward of microbatch {key[1]} before its forward.")
        start = begun, _, _ = self.compute, self._host, self._stalled
        held, offloading, copied, in_use = self._held[key], key in self._offloading, 0.0, 0
        if offloading and key not in self._released:  # copies to the host may still read its memory
            copied = max((copy.copied for copy in held), default=0.0)
        for k, at in part.uses:
            if not part.at_once:
                self._reach(start, at * part.seconds, at * part.host)
                if in_use:
                    self._wait(copied, key)
                    self._occupy(-in_use)
                    in_use = 0
            if part.frees:
                in_use += saved[k].nbytes
            if offloading:
                copy = held[k]
                if self._host_seconds:
                    start = self._hook(start, saved[k].tensors)
                if not copy.on_device:
                    self._on_demand += saved[k].tensors
                    self._occupy(saved[k].nbytes)
                    self._copy_back(key, copy)
                self._wait(copy.arrival, key)
        self._reach(start, part.seconds, part.host)
        if in_use:
            self._wait(copied, key)
            self._occupy(-in_use)
        self._span(Kind.BACKWARD, key, begun)

    def _hook(self, start: tuple[float, float, float], tensors: int) -> tuple[float, float, float]:
        """Let the host spend its time on saved tensors, and begin to queue this compute as much later."""
        seconds = self._host_seconds * tensors
        self._host += seconds
        return start[0], start[1] + seconds, start[2]

    def _wait(self, time: float, key: Key) -> None:
        """Let compute wait for a copy."""
        begun = self.compute
        if time > begun:
            self.compute = time
            self._stalled += time - begun
            self._span(Kind.STALL, key, begun)

    def _span(self, kind: Kind, key: Key, begun: float) -> None:
        """Record that compute has worked or waited since some time."""
        if self._record and self.compute > begun:
            self._spans.append(Span(kind, key[self._label], begun, self.compute))

    # Copies

    def _copy_out(self, key: Key, copy: _Copy) -> None:
        """Queue a copy to the host."""
        nbytes, begin = copy.saved.nbytes, max(self._d2h, copy.ready)
        self._d2h = copy.copied = self._link.end(begin, nbytes / self._link.d2h, self._h2d, back=False)
        if self._record:
            self._spans.append(Span(Kind.D2H, key[self._label], begin, self._d2h, nbytes))

    def _copy_back(self, key: Key, copy: _Copy) -> None:
        """Queue a copy to the device at the present time of compute."""
        nbytes, begin = copy.saved.nbytes, max(self._h2d, self.compute)
        self._h2d = copy.arrival = self._link.end(begin, nbytes / self._link.h2d, self._d2h, back=True)
        copy.on_device = True
        if self._record:
            self._spans.append(Span(Kind.H2D, key[self._label], begin, self._h2d, nbytes))

    # Actions

    def _act(self, actions: tuple[Action, ...], level: int) -> None:
        """Carry out the actions of an event."""
        for do, layer, microbatch in actions:
            key = layer, microbatch
            if do is Do.OFFLOAD:
                self._offloading.add(key)
                for copy in self._held.get(key, ()):
                    self._copy_out(key, copy)
            elif do is Do.RELEASE:
                self._released.add(key)
                present = [copy for copy in self._held[key] if copy.on_device]
                nbytes = 0
                for copy in present:
                    self._wait(copy.copied, key)
                    copy.on_device = False
                    nbytes += copy.saved.nbytes
                self._occupy(-nbytes)
            else:
                for copy in reversed(self._held[key]):
                    if not copy.on_device:
                        self._occupy(copy.saved.nbytes)
                        self._copy_back(key, copy)
        if self._saved != self._at_border or self._highest != self._at_border:
            self._border(level)  # [guard: simulated peak of an event]

    # Memory

    def _occupy(self, nbytes: int) -> None:
        """Allocate or free the memory of saved tensors."""
        self._saved += nbytes
        if self._saved > self._highest:
            self._highest = self._saved
        if self._saved > self.saved_peak:
            self.saved_peak = self._saved
        if self._record and nbytes:
            self._resident.append((self.compute, self._saved))

    def _border(self, level: int, temporary: int = 0) -> None:
        """End a section of the step, in which so much was allocated for a time above what was there at its borders."""
        other, saved = self._other + level, self._saved
        before = self._at_border
        start, end = before + self._other_there, saved + other
        need = (start if start > end else end) + temporary + self._highest - (before if before > saved else saved)
        if need > self.peak:
            self.peak = need
        if self.needs and need > self.needs[-1]:
            self.needs[-1] = need
        self._other_there, self._at_border, self._highest = other, saved, saved

    # What is recorded

    def _note(self, level: int) -> None:
        self.when.append(self.compute)
        need = self._saved + self._other + level
        self.needs.append(need if self.needs else max(need, self.peak))  # the gap before the first event counts there

    def simulation(self, baseline: float) -> Simulation:
        """Return what was recorded; without offloading the step takes `baseline` seconds."""
        forward_time, forward_stall = self._turn or (0.0, 0.0)
        return Simulation(
            Timeline.build(self._spans, self._resident, source="simulated"),
            step_time=self.compute,
            forward_time=forward_time,
            baseline=baseline,
            forward_stall=forward_stall,
            backward_stall=self._stalled - forward_stall,
            reloaded_on_demand=self._on_demand,
            device_peak_bytes=self.peak,
            bubble_seconds=self._bubble,
            starts=tuple(self.starts),
        )
