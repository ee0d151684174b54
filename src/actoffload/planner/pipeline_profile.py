"""What planning needs of one rank of a pipeline: its moments, its memory at each, and the chunks to choose from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ..schedule.costs import Link
from ..schedule.pipeline import Chunk, Computation, Moment, Step, used_in
from ..schedule.pipeline_times import StageTimes

__all__ = ["Candidate", "RankProfile"]

PHASES = 0, 2, 1, 3
"""Microbatches by remainder, in the order in which they are added: so that those of a part are at equal distances."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk that can be offloaded; moments are numbered over all steps of the rank."""

    chunk: Chunk
    saved: int  # where its forward starts
    use: int  # where a backward first comes to it
    last: int  # where the weight backward starts, or the same
    trimmed: int  # where the input backward ends
    gone: int  # where the last backward ends
    nbytes: int
    start: float  # seconds when its forward starts
    out: float
    out_ready: float
    out_after: float
    back: float
    ahead: float
    again: float
    again_bytes: int

    @property
    def split(self) -> bool:
        """Whether two backwards use it."""
        return self.last != self.use


@dataclass(frozen=True)
class RankProfile:
    """One rank, as it runs without offloading.

    Parameters
    ----------
    order : sequence of Step
        What it computes.
    moments : list of Moment
        All moments, in order.
    when : list of float
        Seconds at which they come.
    needs : list of int
        Bytes on the device from each moment to the next, at most.
    allowed : list of bool
        Whether something can be done then.
    runs : list of bool
        Whether compute follows.
    candidates : list of Candidate
        In order of saving.
    last_forward : float
        Seconds at which the last forward starts.
    link : Link
        How fast the copies are.
    """

    order: Sequence[Step]
    moments: list[Moment]
    when: list[float]
    needs: list[int]
    allowed: list[bool]
    runs: list[bool]
    candidates: list[Candidate]
    last_forward: float
    link: Link

    @staticmethod
    def of(order: Sequence[Step], starts: Sequence[float], times: Sequence[StageTimes], link: Link) -> RankProfile:
        """Return the profile of a rank whose steps start at some times."""
        walk = _Walk(sum(times[stage].cost.other_bytes for stage in {step.stage for step in order}))
        for number, (step, start) in enumerate(zip(order, starts, strict=True)):
            walk.step(number, step, start, times[step.stage])
        uses = used_in(order, {step.stage: bool(times[step.stage].cost.splits) for step in order})
        candidates = []
        for (stage, microbatch), (forward, first, last) in uses.items():
            count = len(times[stage].groups)
            for group, of in enumerate(times[stage].groups):
                saved = walk.first[forward] + group
                use = walk.first[first] + count - 1 - group
                if of.nbytes:
                    candidates.append(
                        Candidate(
                            Chunk(stage, microbatch, group),
                            saved,
                            use,
                            use if first == last else walk.first[last],
                            walk.first[first] + count,
                            walk.first[last] + count,
                            of.nbytes,
                            walk.when[saved],
                            of.out,
                            of.out_ready,
                            of.out_after,
                            of.back,
                            of.back_ahead if first == last else of.input_ahead,
                            of.again,
                            of.again_bytes,
                        )
                    )
        candidates.sort(key=lambda of: of.saved)
        forwards = [k for k, step in enumerate(order) if step.computation is Computation.FORWARD]
        last_forward = starts[forwards[-1]] if forwards else 0.0
        return RankProfile(
            order, walk.moments, walk.when, walk.needs, walk.allowed, walk.runs, candidates, last_forward, link
        )

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes on the device without offloading."""
        return max(self.needs, default=0)

    def kinds(self) -> list[tuple[float, list[int]]]:
        """Return the candidates of each group of each stage, those first that are idle longest, with the seconds."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for k, of in enumerate(self.candidates):
            kinds.setdefault((of.chunk.stage, of.chunk.group), []).append(k)

        def idle(kind: tuple[int, int]) -> float:
            members = (self.candidates[k] for k in kinds[kind])
            return median(self.when[of.use] - of.start - of.out_after - of.ahead for of in members)

        return [(-less, kinds[kind]) for less, kind in sorted((-idle(kind), kind) for kind in kinds)]

    def parts(self, kinds: Iterable[list[int]]) -> list[list[int]]:
        """Return the candidates of some kinds in parts with a fourth of the microbatches each."""
        found = []
        for kind in kinds:
            for phase in PHASES:
                found.append([k for k in kind if self.candidates[k].chunk.microbatch % len(PHASES) == phase])
        return [part for part in found if part]


class _Walk:
    """Moments and memory of a rank without offloading."""

    def __init__(self, other: int) -> None:
        self.other, self.saved = other, 0
        self.moments: list[Moment] = []
        self.when: list[float] = []
        self.needs: list[int] = []
        self.allowed: list[bool] = []
        self.runs: list[bool] = []
        self.first: list[int] = []  # moment of each step

    def step(self, number: int, step: Step, start: float, times: StageTimes) -> None:
        """Add the moments of a step."""
        cost, computation = times.cost, step.computation
        parts = times.parts(computation)
        if computation is Computation.FORWARD:
            self.other += cost.boundary_bytes
        now, count = start, len(times.groups)
        apart = computation is Computation.BACKWARD_WEIGHT and bool(cost.splits)
        self.first.append(len(self.moments))
        for position in range(count):
            part = parts[position] if parts else None
            if part is not None:
                now += part.gap
                if self.needs:
                    self.needs[-1] = max(self.needs[-1], self.saved + self.other + part.gap_temporary)
            before = self.saved + self.other
            if part is not None:
                self.saved, self.other = self.saved + part.saved, self.other + part.kept
            need = max(before, self.saved + self.other) + (part.temporary if part is not None else 0)
            self._add(Moment(number, position), now, need, not (apart and position), part is not None)
            now += part.seconds if part is not None else 0.0
        if computation is Computation.BACKWARD:
            self.other -= cost.boundary_bytes
        elif computation is Computation.BACKWARD_INPUT:
            self.other += times.recomputed
        elif computation is Computation.BACKWARD_WEIGHT:
            self.other -= cost.boundary_bytes + (times.kept_other + times.recomputed if cost.splits else 0)
            self.saved -= cost.nbytes if cost.splits else 0
        self._add(Moment(number, count), now, self.saved + self.other, True, False)

    def _add(self, moment: Moment, when: float, need: int, allowed: bool, runs: bool) -> None:
        self.moments.append(moment)
        self.when.append(max(when, self.when[-1] if self.when else 0.0))
        self.needs.append(need)
        self.allowed.append(allowed)
        self.runs.append(runs)
