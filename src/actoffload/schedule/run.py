"""The run of a pipeline: of each rank the clocks, the memory and the copies of what its layers save.

Each rank has four clocks: compute, host, and one copy queue for each direction.  An operation begins when its queue is
free and what it waits for is done.  The engine on the reference device performs the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from .costs import Link, Part, Piece, StageCost, StageTimes
from .orders import BORDERS, Computation, Step
from .plan import Action, Do, Plan, Steps
from .timeline import Kind, Simulation, Span, Timeline

Message = tuple[int, bool, int]
"""What a stage sends: its number, whether it is of a forward, and the microbatch."""

WEIGHTS = Computation.BACKWARD, Computation.BACKWARD_WEIGHT
"""What computes gradients of weights."""

Key = tuple[int, int]
"""Layer of the rank, and microbatch."""


class CompiledStep(NamedTuple):
    """A step with what is looked up for it."""

    needs: Message | None
    sends: Message | None
    step: Step
    layers: Sequence[int]  # as they are computed


@dataclass(slots=True)
class _Copy:
    """A piece in the run."""

    piece: Piece
    ready: float  # compute has written it, or its first tensor
    copied: float = 0.0  # its copies on the host are complete
    on_device: bool = True
    arrival: float = 0.0  # its copies back are complete


@dataclass(slots=True)
class RankRun:
    """One rank that runs.  The clocks are seconds since the step of the schedule began."""

    steps: Sequence[CompiledStep]
    times: Sequence[StageTimes]  # of all stages
    link: Link
    other: int  # bytes on the device beside saved tensors, without those of `Part.levels`
    actions: Mapping[Any, tuple[Action, ...]]  # those of a plan at each event
    host_seconds: float = 0.0  # of the host for each tensor of an offloaded group, in forward and in backward
    label: int = 1  # what `Span.layer` is: 1 for the microbatch, 0 for the layer
    record: bool = False  # a timeline; it takes about as long as the run
    note: bool = False  # when each event comes, and the bytes that are needed at most until the next one
    allowed: float = inf  # seconds; a run that takes longer is stopped
    compute: float = 0.0
    host: float = 0.0
    d2h: float = 0.0
    h2d: float = 0.0
    bubble: float = 0.0
    stalled: float = 0.0
    on_demand: int = 0  # tensors that were reloaded only when backward used them
    saved: int = 0  # bytes of saved tensors
    saved_peak: int = 0
    peak: int = 0
    starts: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)  # seconds of stalls before each step
    spans: list[Span] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    when: list[float] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    # Memory since the latest border, which is where compute starts or ends and where something was done.
    _at_border: int = 0  # saved bytes there
    _other_there: int = 0
    _highest: int = 0  # saved bytes since
    _held: dict[Key, list[_Copy]] = field(default_factory=dict)
    _offloading: set[Key] = field(default_factory=set)
    _released: set[Key] = field(default_factory=set)
    _with_gradients: set[int] = field(default_factory=set)  # stages
    _running: tuple[Kind, int] | None = None
    _since: float = 0.0  # when compute began, or went on after a stall

    def __post_init__(self) -> None:
        if self.steps:
            step = self.steps[0].step
            parts = self.times[step.stage].parts[step.computation]
            self._other_there = self.other + (parts[0].levels[0] if parts else 0)
        self.peak = self.other

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
                    self.bubble += arrival - self.compute
                    self.compute = arrival
            self.starts.append(self.compute)
            self.stalls.append(self.stalled)
            self._step(step, layers, self.times[step.stage])
            if self.compute > self.allowed:
                break
            if sends is not None:
                arrivals[sends] = self.compute
        return len(self.starts) > begun

    def _step(self, step: Step, layers: Sequence[int], times: StageTimes) -> None:
        """Run a step group by group."""
        actions, (stage, computation, microbatch) = self.actions, step
        forward, (start, end) = computation is Computation.FORWARD, BORDERS[computation]
        parts, level = times.parts[computation], 0
        if forward:
            self.other += times.cost.boundary_bytes + times.cost.output_bytes
        first = computation in WEIGHTS and stage not in self._with_gradients
        if first:
            self._with_gradients.add(stage)
        for position, layer in enumerate(layers):
            part = parts[position] if parts else None
            if part is not None:
                self.compute += part.gap
                level = part.levels[0]
                if part.gap_temporary or self.other + level != self._other_there:
                    self._border(level, part.gap_temporary)
            if actions and (found := actions.get((start, layer, microbatch))):
                self._act(found, level)
            if self.note and (not position or computation is not Computation.BACKWARD_WEIGHT or not times.cost.split):
                self._note(level)
            if part is None:  # an input backward without a split
                continue
            if forward:
                self._forward(part, (layer, microbatch), times.pieces[position])
            else:
                self._backward(part, (layer, microbatch))
            self.other += part.kept + part.gradients if first else part.kept
            level = part.levels[1]
            self._border(level, part.temporary)
        if not forward and (times.cost.boundary_bytes or times.cost.split):
            self._end_backward(computation, times)
            self._at_border = self._highest = self.saved
            self._other_there = self.other + level
            self._border(level)
        if layers:
            if actions and (found := actions.get((end, layers[-1], microbatch))):
                self._act(found, level)
            if self.note:
                self._note(level)

    def _end_backward(self, computation: Computation, times: StageTimes) -> None:
        """Free what a backward frees where it ends."""
        if computation is not Computation.BACKWARD_INPUT:
            self.other -= times.cost.boundary_bytes
        if not times.cost.split or computation is Computation.BACKWARD:
            return
        if computation is Computation.BACKWARD_INPUT:
            self.other += times.cost.between_bytes
        else:  # a full backward frees group by group
            self.other -= times.cost.between_bytes + sum(cost.kept_bytes for cost in times.cost.groups)
            self._occupy(-times.cost.nbytes)

    # Compute

    def _reach(self, start: tuple[float, float, float], seconds: float, host_seconds: float) -> None:
        """Let compute run until a time since its start, without stalls, and never back.

        The host needs `host_seconds` to queue this compute; compute waits for it, which is no stall.
        """
        host, compute = start[1] + host_seconds, start[0] + seconds + self.stalled - start[2]
        if host > self.host:
            self.host = host
        if self.host > compute:
            compute = self.host
        if compute > self.compute:
            self.compute = compute

    def _forward(self, part: Part, key: Key, pieces: tuple[Piece, ...]) -> None:
        start = self._begin(Kind.FORWARD, key)
        held = self._held[key] = []
        offloading = key in self._offloading
        if part.at_once:
            self._highest = max(self._highest, self.saved + sum(piece.nbytes for piece in pieces))
        for piece, use in zip(pieces, part.uses, strict=True):
            self._reach(start, use.seconds, use.host)
            copy = _Copy(piece, self.compute)
            held.append(copy)
            self._occupy(piece.nbytes)
            if offloading:
                if self.host_seconds:
                    start = self._hook(start, piece.tensors)
                self._copy_out(key, copy)
        self._reach(start, part.seconds, part.host)
        self._end()

    def _backward(self, part: Part, key: Key) -> None:
        start = self._begin(Kind.BACKWARD, key)
        held = self._held.pop(key) if part.last else self._held[key]
        offloading, copied, in_use = key in self._offloading, 0.0, 0
        if offloading and key not in self._released:  # copies to the host may still read its memory
            copied = max((copy.copied for copy in held), default=0.0)
        for use in part.uses:
            if not part.at_once:
                self._reach(start, use.seconds, use.host)
                if in_use:
                    self._wait(copied, key)
                    self._occupy(-in_use)
                    in_use = 0
            copy = held[use.piece]
            if part.frees:
                in_use += copy.piece.nbytes
            if offloading:
                if self.host_seconds:
                    start = self._hook(start, copy.piece.tensors)
                if not copy.on_device:
                    self.on_demand += copy.piece.tensors
                    self._occupy(copy.piece.nbytes)
                    self._copy_back(key, copy)
                self._wait(copy.arrival - use.lead, key)
        self._reach(start, part.seconds, part.host)
        if in_use:
            self._wait(copied, key)
            self._occupy(-in_use)
        self._end()

    def _begin(self, kind: Kind, key: Key) -> tuple[float, float, float]:
        """Begin the compute of a group; return the times of compute, host and stalls."""
        if self.record:
            self._running, self._since = (kind, key[self.label]), self.compute
        return self.compute, self.host, self.stalled

    def _hook(self, start: tuple[float, float, float], tensors: int) -> tuple[float, float, float]:
        """Let the host spend its time on saved tensors, and begin to queue this compute as much later."""
        seconds = self.host_seconds * tensors
        self.host += seconds
        return start[0], start[1] + seconds, start[2]

    def _end(self) -> None:
        """End the compute of a group, or of the part of it before a stall."""
        if self._running is not None:
            if self.compute > self._since:
                self.spans.append(Span(*self._running, self._since, self.compute))
            self._running = None

    def _wait(self, time: float, key: Key) -> None:
        """Let compute wait for a copy."""
        start, running = self.compute, self._running
        if time <= start:
            return
        self._end()
        self.compute = self._since = time
        self.stalled += time - start
        if self.record:
            self.spans.append(Span(Kind.STALL, key[self.label], start, time))
        self._running = running

    # Copies

    def _copy_out(self, key: Key, copy: _Copy) -> None:
        """Queue copies to the host."""
        piece = copy.piece
        begin = max(self.d2h, copy.ready)
        done = self.link.end(begin, piece.out, self.h2d, back=False)
        self.d2h = copy.copied = max(done, copy.ready + piece.out_lag)
        if self.record:
            self.spans.append(Span(Kind.D2H, key[self.label], begin, self.d2h, piece.nbytes))

    def _copy_back(self, key: Key, copy: _Copy) -> None:
        """Queue copies to the device at the present time of compute."""
        piece = copy.piece
        begin = max(self.h2d, self.compute)
        self.h2d = copy.arrival = self.link.end(begin, piece.back, self.d2h, back=True)
        copy.on_device = True
        if self.record:
            self.spans.append(Span(Kind.H2D, key[self.label], begin, self.h2d, piece.nbytes))

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
                self._wait(max([copy.copied for copy in present], default=0.0), key)
                for copy in present:
                    copy.on_device = False
                self._occupy(-sum([copy.piece.nbytes for copy in present]))
            else:
                absent = [copy for copy in self._held[key] if not copy.on_device]
                self._occupy(sum([copy.piece.nbytes for copy in absent]))
                for copy in reversed(absent):
                    self._copy_back(key, copy)
        if self.saved != self._at_border or self._highest != self._at_border:
            self._border(level)  # [guard: simulated peak of an event]

    # Memory

    def _occupy(self, nbytes: int) -> None:
        """Allocate or free the memory of saved tensors."""
        self.saved += nbytes
        if self.saved > self._highest:
            self._highest = self.saved
        if self.saved > self.saved_peak:
            self.saved_peak = self.saved
        if self.record and nbytes:
            self.resident.append((self.compute, self.saved))

    def _border(self, level: int, temporary: int = 0) -> None:
        """End a section of the step, in which so much was allocated for a time above what was there at its borders."""
        other, saved = self.other + level, self.saved
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
        need = self.saved + self.other + level
        self.needs.append(need if self.needs else max(need, self.peak))  # the gap before the first event counts there

    def simulation(self, baseline: float) -> Simulation:
        """Return what was recorded; without offloading the step takes `baseline` seconds."""
        backwards = (k for k, each in enumerate(self.steps) if each.step.computation is not Computation.FORWARD)
        turn = next(backwards, None)
        forward_time, forward_stall = (0.0, 0.0) if turn is None else (self.starts[turn], self.stalls[turn])
        return Simulation(
            Timeline.build(self.spans, self.resident, source="simulated"),
            step_time=self.compute,
            forward_time=forward_time,
            baseline=baseline,
            forward_stall=forward_stall,
            backward_stall=self.stalled - forward_stall,
            reloaded_on_demand=self.on_demand,
            device_peak_bytes=self.peak,
            bubble_seconds=self.bubble,
            starts=tuple(self.starts),
        )


class Pipeline:
    """The ranks, given by plans of which only what they compute counts, and the costs of all stages.

    If it is `exact`, as of a model, each saved tensor is copied and freed alone, and spans name the stage.  Otherwise
    those of a group are one piece, which takes as long, and spans name the microbatch.
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
        self.link, self._exact, self._host_seconds = link, exact, host_seconds
        known = {id(cost): self.stage_times(cost) for cost in {id(cost): cost for cost in stages}.values()}
        self.times = [known[id(cost)] for cost in stages]
        ran = [{step.stage for step in plan.computed} for plan in plans]
        self._stages = set[int]().union(*ran)
        self.other = [sum(stages[stage].other_bytes for stage in mine) for mine in ran]
        self.compiled = [
            [self._compile(step, plan.layers.get(step.stage, range(0))) for step in plan.computed] for plan in plans
        ]

    def stage_times(self, cost: StageCost) -> StageTimes:
        """Return the times of a stage."""
        return StageTimes(cost, self.link, exact=self._exact)

    def _compile(self, step: Step, layers: range) -> CompiledStep:
        forward = step.computation is Computation.FORWARD
        found = step, layers if forward else layers[::-1]
        if step.computation is Computation.BACKWARD_WEIGHT:
            return CompiledStep(None, None, *found)
        before = step.stage - 1 if forward else step.stage + 1
        needs = (before, forward, step.microbatch) if before in self._stages else None
        return CompiledStep(needs, (step.stage, forward, step.microbatch), *found)

    def run(
        self, actions: Sequence[Steps], *, record: bool = False, note: bool = False, allowed: float = inf
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
