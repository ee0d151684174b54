"""Place releases and reloads on a rank: when chunks that are to be offloaded are freed and reloaded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from statistics import median

from ..schedule.costs import Link
from ..schedule.pipeline import Chunk, Computation, Moment, Step, Transfer, used_in
from ..schedule.pipeline_plan import Actions, Call, actions_at
from ..schedule.run import RankRun
from ..schedule.stage_times import GroupTimes, StageTimes

__all__ = ["Candidate", "RankPlacement", "RankProfile", "place_rank"]

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
    start: float  # seconds when its forward starts
    ahead: float  # seconds by which its copies must start before it is used
    times: GroupTimes

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk."""
        return self.times.nbytes

    @property
    def split(self) -> bool:
        """Whether two backwards use it."""
        return self.last != self.use


@dataclass(frozen=True)
class RankProfile:
    """One rank, as it runs without offloading."""

    moments: list[Moment]  # all, in order
    when: list[float]  # seconds at which they come
    needs: list[int]  # bytes on the device from each moment to the next, at most
    allowed: list[bool]  # whether something can be done then
    runs: list[bool]  # whether compute follows
    candidates: list[Candidate]  # in order of saving
    last_forward: float  # seconds at which the last forward starts
    link: Link

    @staticmethod
    def of(order: Sequence[Step], rank: RankRun, times: Sequence[StageTimes], link: Link) -> RankProfile:
        """Return the profile of a rank as it was run and recorded without offloading."""
        levels = rank.levels
        moments, needs = [level.moment for level in levels], [level.need for level in levels]
        runs = [level.runs for level in levels]
        when = list(accumulate((level.when for level in levels), max))
        first = {moment.step: k for k, moment in reversed(list(enumerate(moments)))}
        allowed = [
            moment.position in (0, len(times[order[moment.step].stage].groups))
            or order[moment.step].computation is not Computation.BACKWARD_WEIGHT
            or not times[order[moment.step].stage].cost.splits
            for moment in moments
        ]
        uses = used_in(order, {step.stage: bool(times[step.stage].cost.splits) for step in order})
        candidates = []
        for (stage, microbatch), (forward, input_, last) in uses.items():
            count, split = len(times[stage].groups), input_ != last
            for group, cost in enumerate(times[stage].groups):
                if cost.nbytes:
                    saved, use = first[forward] + group, first[input_] + count - 1 - group
                    candidates.append(
                        Candidate(
                            Chunk(stage, microbatch, group),
                            saved=saved,
                            use=use,
                            last=first[last] if split else use,
                            trimmed=first[input_] + count,
                            gone=first[last] + count,
                            start=when[saved],
                            ahead=cost.input_ahead if split else cost.back_ahead,
                            times=cost,
                        )
                    )
        candidates.sort(key=lambda candidate: candidate.saved)
        forwards = [k for k, step in enumerate(order) if step.computation is Computation.FORWARD]
        last_forward = rank.starts[forwards[-1]] if forwards else 0.0
        return RankProfile(moments, when, needs, allowed, runs, candidates, last_forward, link)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes on the device without offloading."""
        return max(self.needs, default=0)

    def kinds(self) -> list[tuple[float, list[int]]]:
        """Return the candidates of each group of each stage, those first that are idle longest, with the seconds."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for k, candidate in enumerate(self.candidates):
            kinds.setdefault((candidate.chunk.stage, candidate.chunk.group), []).append(k)

        def idle(kind: tuple[int, int]) -> float:
            members = (self.candidates[k] for k in kinds[kind])
            return median(
                self.when[candidate.use] - candidate.start - candidate.times.out_after - candidate.ahead
                for candidate in members
            )

        return [(-less, kinds[kind]) for less, kind in sorted((-idle(kind), kind) for kind in kinds)]

    def parts(self, kinds: Iterable[list[int]]) -> list[list[int]]:
        """Return the candidates of some kinds in parts with a fourth of the microbatches each."""
        found = []
        for kind in kinds:
            for phase in PHASES:
                found.append([k for k in kind if self.candidates[k].chunk.microbatch % len(PHASES) == phase])
        return [part for part in found if part]


@dataclass(slots=True)
class RankPlacement:
    """Where chunks are released and reloaded, and the memory that this needs."""

    profile: RankProfile
    needs: list[int]  # bytes on the device from each moment to the next, at most
    # Of each offloaded candidate the numbers of the moments of its release, its reload, and its second reload or -1.
    placed: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes on the device."""
        return max(self.needs, default=0)

    def transfers(self) -> dict[Chunk, Transfer]:
        """Return what a plan needs."""
        moments, candidates = self.profile.moments, self.profile.candidates
        return {
            candidates[k].chunk: Transfer(moments[release], moments[reload], moments[again] if again >= 0 else None)
            for k, (release, reload, again) in sorted(self.placed.items())
        }

    def actions(self) -> Actions:
        """Return what is done at each moment, as the plan with these `transfers` has it."""
        moments, calls = self.profile.moments, list[Call]()
        for k, (release, reload, again) in self.placed.items():
            candidate = self.profile.candidates[k]
            use, chunk = moments[candidate.use], candidate.chunk
            calls += (
                (moments[candidate.saved], 2, use, chunk),
                (moments[release], 0, use, chunk),
                (moments[reload], 1, use, chunk),
            )
            if again >= 0:
                calls += (
                    (moments[candidate.trimmed], 0, use, chunk),
                    (moments[again], 1, moments[candidate.last], chunk),
                )
        return actions_at(calls)

    def add(self, nbytes: int, start: int, stop: int) -> None:
        """Count bytes from one moment to another."""
        needs = self.needs
        for m in range(start, stop):
            needs[m] += nbytes

    def remove(self, k: int) -> None:
        """Keep a chunk on the device after all."""
        candidate = self.profile.candidates[k]
        release, reload, again = self.placed.pop(k)
        self.add(candidate.nbytes, release, reload)
        if candidate.split:
            self.add(candidate.nbytes - candidate.times.again_bytes, candidate.trimmed, candidate.gone)
        if again >= 0:
            self.add(candidate.times.again_bytes, candidate.trimmed, again)


def place_rank(
    profile: RankProfile,
    chosen: Collection[int],
    again: Collection[int] = (),
    limit: float = inf,
    *,
    margin: float = 0.05,
    max_inflight: int | None = None,
) -> RankPlacement:
    """Return where to release and reload chosen chunks.

    A chunk is released at the first moment where its copy is expected to be done, and earlier where memory would exceed
    the limit.  It is reloaded as late as the link allows, and later where memory would exceed the limit.  What would
    only be reloaded at once is kept.  The peak may exceed the limit if no placement of these chunks fits.

    Parameters
    ----------
    profile : RankProfile
        The rank.
    chosen, again : collection of int
        Positions of the candidates to offload, and of those of them that are freed between their two backwards.
    limit : float
        Bytes of device memory.
    margin : float
        Part of the time of each copy by which it is expected to be late.
    max_inflight : int, optional
        Largest number of chunks that are copied to the host at a time; a chunk whose forward starts then is kept.
    """
    run = _Run(profile, margin, limit, RankPlacement(profile, []))
    latest = run.latest_reloads(chosen, again)
    releases = run.releases(sorted(chosen), latest, max_inflight)
    if limit < inf:
        run.force(releases)
    run.finish(releases, latest)
    return run.placement


@dataclass(slots=True)
class _Run:
    """One call of `place_rank`: its methods are called in their order."""

    profile: RankProfile
    margin: float
    limit: float
    placement: RankPlacement
    first_reload: float = inf  # seconds at which it has to start

    def latest_reloads(self, chosen: Collection[int], again: Collection[int]) -> dict[tuple[int, bool], int]:
        """Return the last moment at which the first and the second reload of each chunk can start without a stall."""
        profile, margin, free = self.profile, self.margin, inf
        when, candidates = profile.when, profile.candidates
        calls = [(candidates[k].use, k, False) for k in chosen]
        calls += [(candidates[k].last, k, True) for k in again if candidates[k].split]
        latest = {}
        for use, k, second in sorted(calls, reverse=True):
            candidate = candidates[k]
            seconds, ahead = (
                (candidate.times.again, candidate.times.again) if second else (candidate.times.back, candidate.ahead)
            )
            if when[use] <= profile.last_forward:
                slow = self._slow()
                seconds, ahead = seconds * slow, ahead + seconds * (slow - 1)
            free = min(when[use] - ahead - margin * seconds, free - (1 + margin) * seconds)
            m = min(bisect_right(when, free) - 1, use)
            latest[k, second] = self._before(m) if m >= 0 else -1
            self.first_reload = min(self.first_reload, free)
        return latest

    def _slow(self) -> float:
        """Return how many times longer copies take while both directions are busy."""
        link = self.profile.link
        both = link.d2h + link.h2d
        return max(both / link.both, 1.0) if link.both is not None and both < inf else 1.0

    def _before(self, m: int) -> int:
        while not self.profile.allowed[m]:
            m -= 1
        return m

    def _behind(self, m: int) -> int:
        while not self.profile.allowed[m]:
            m += 1
        return m

    def releases(
        self, chosen: list[int], latest: dict[tuple[int, bool], int], max_inflight: int | None
    ) -> dict[int, int]:
        """Return the first moment at which the copies of each chunk are done; where a limit may force it, any chunk."""
        profile, margin, queue, slow = self.profile, self.margin, 0.0, self._slow()
        when, found, ends = profile.when, dict[int, int](), list[float]()
        for k in chosen:
            candidate = profile.candidates[k]
            ends = [end for end in ends if end > candidate.start] if max_inflight is not None else ends
            if max_inflight is not None and len(ends) >= max_inflight:
                continue
            factor = slow if candidate.start >= self.first_reload else 1.0
            done = max(
                max(queue, candidate.start + candidate.times.out_ready) + candidate.times.out * factor,
                candidate.start + candidate.times.out_after,
            )
            m = bisect_left(when, done + margin * candidate.times.out * factor, candidate.saved + 1)
            m = self._behind(m) if m < candidate.use else candidate.use
            if self.limit == inf and m >= latest[k, False]:
                continue  # used too soon
            found[k], queue = m, done
            ends.append(done)
        return found

    def force(self, releases: dict[int, int]) -> None:
        """Release chunks earlier where memory would exceed the limit: those first that are copied first."""
        candidates, needs = self.profile.candidates, self._needs(releases)
        waiting = sorted(releases, key=lambda k: candidates[k].saved)
        for m, need in enumerate(needs):
            need = needs[m]
            if need <= self.limit or not self.profile.allowed[m]:
                continue
            for k in waiting:
                candidate = candidates[k]
                if candidate.saved < m < releases[k]:
                    for at in range(m, min(releases[k], candidate.use)):
                        needs[at] -= candidate.nbytes
                    releases[k] = m
                    if needs[m] <= self.limit:
                        break
            waiting = [k for k in waiting if releases[k] > m]

    def _needs(self, releases: dict[int, int]) -> list[int]:
        """Return the bytes from each moment to the next if all reloads are as late as can be."""
        change = [0] * (len(self.profile.needs) + 1)
        for k, release in releases.items():
            candidate = self.profile.candidates[k]
            change[release] -= candidate.nbytes
            change[max(candidate.use, release)] += candidate.nbytes
            self._trimmed(change, candidate)
        return [need + less for need, less in zip(self.profile.needs, accumulate(change), strict=False)]

    @staticmethod
    def _trimmed(change: list[int], candidate: Candidate) -> None:
        if candidate.split:
            change[candidate.trimmed] -= candidate.nbytes - candidate.times.again_bytes
            change[candidate.gone] += candidate.nbytes - candidate.times.again_bytes

    def finish(self, releases: dict[int, int], latest: dict[tuple[int, bool], int]) -> None:
        """Place the reloads, no later than they must be and no earlier than memory allows."""
        profile, limit, placed = self.profile, self.limit, self.placement.placed
        used = {k: m for k, m in releases.items() if m < profile.candidates[k].use}
        needs = self.placement.needs = self._needs(used)
        before = 0
        for k in sorted(used, key=lambda k: profile.candidates[k].use):
            candidate, reload = profile.candidates[k], profile.candidates[k].use
            earliest = max(latest[k, False], used[k], before)
            if limit == inf:
                reload = earliest
            else:
                while reload > earliest and needs[reload - 1] + candidate.nbytes <= limit:
                    reload -= 1
                reload = self._behind(reload)
            for m in range(reload, candidate.use):
                needs[m] += candidate.nbytes
            before = reload
            placed[k] = used[k], reload, -1
        for k, (release, reload, _) in list(placed.items()):
            if not any(profile.runs[release:reload]):  # released for nothing
                reload = max(release, reload)
                placed[k] = release, reload, -1
                self.placement.remove(k)
            else:
                self._again(k, latest)

    def _again(self, k: int, latest: dict[tuple[int, bool], int]) -> None:
        """Free a chunk between its two backwards, if there is time."""
        candidate, m = self.profile.candidates[k], latest.get((k, True), -1)
        if m > candidate.trimmed and self.profile.moments[m].step > self.profile.moments[candidate.trimmed].step:
            release, reload, _ = self.placement.placed[k]
            self.placement.placed[k] = release, reload, m
            self.placement.add(-candidate.times.again_bytes, candidate.trimmed, m)
