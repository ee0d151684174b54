"""What one rank may offload, and when that is freed and reloaded: its placements within a limit of memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import inf
from operator import add
from statistics import median_high
from typing import NamedTuple

from ..schedule.orders import Computation, Event
from ..schedule.plan import Action, Do, Plan, Steps, steps_of
from ..schedule.run import LayerRun, Pipeline, RankRun

AT_ONCE = Do.RELEASE, Do.RELOAD, Do.OFFLOAD  # the order at one event
ROUNDING = 1e-9  # relative; of two plans that differ by less the one with fewer copies is as fast
FEW = 2  # numbers of kinds that are tried for a limit, from the fewest that fit


@dataclass(frozen=True, slots=True)
class Knobs:
    """What may be offloaded; None for no limit."""

    fraction: float | None = None  # of the bytes of each microbatch
    delta_bytes: int | None = None  # fewer of each microbatch on each rank than on the one before
    max_inflight: int | None = None  # groups that may be copied to the host at a time
    host_limit: int | None = None  # bytes of host memory on each rank
    whole: bool = False  # every group is run in the last of its ways


class Spot(NamedTuple):
    """Where what a layer saves for a microbatch is saved and used; events are numbered over all steps of the rank."""

    layer: int
    microbatch: int
    saved: int  # where its forward starts
    use: int  # where a backward first comes to it


class Spots:
    """The events of a rank, and all that can be offloaded, whatever its groups cost."""

    def __init__(self, rank: Plan) -> None:
        self.events = list[Event]()  # all, in order
        self.runs = list[int]()  # number of groups that are computed before
        first = list[int]()
        for step in rank.computed:
            events, split = rank.events_of(step), step.stage in rank.splits
            first.append(len(self.events))
            positions = range(len(events))
            if step.computation is Computation.BACKWARD_WEIGHT and split:  # its groups are not told apart
                positions = positions[:: max(len(events) - 1, 1)]
            self.events += [events[position] for position in positions]
            each = split or step.computation is not Computation.BACKWARD_INPUT
            before = self.runs[-1] if self.runs else 0
            self.runs += [before + each * position for position in positions]
        self.all = list[Spot]()  # in order of saving
        for (stage, microbatch), (forward, first_use, _) in rank.uses.items():
            layers = rank.layers.get(stage, range(0))
            for position, layer in enumerate(layers):
                saved, use = first[forward] + position, first[first_use] + len(layers) - 1 - position
                if self.runs[saved + 1] < self.runs[use]:  # what is used at once stays
                    self.all.append(Spot(layer, microbatch, saved, use))
        self.all.sort(key=lambda spot: spot.saved)
        kinds: dict[int, list[int]] = {}
        for k, spot in enumerate(self.all):
            kinds.setdefault(spot.layer, []).append(k)
        self.kinds = [kinds[layer] for layer in sorted(kinds)]  # positions in `all`, for each layer


class Profile:
    """One rank: how it runs without offloading, and what it may offload.

    Lists have an entry for each event, or for each of the spots.
    """

    def __init__(self, spots: Spots, run: RankRun, rank: int, knobs: Knobs, pipeline: Pipeline) -> None:
        self.spots, self.rank, self._knobs, self._pipeline = spots, rank, knobs, pipeline
        self.when = list(accumulate(run.when, max))  # seconds at which the events come
        self.needs = run.needs  # bytes on the device from each event to the next, at most
        self.peak_bytes = max(run.needs, default=0)
        self.layers: list[LayerRun] = [pipeline.layers[rank][spot.layer] for spot in spots.all]
        idle = [(median_high(map(self._idle, kind)), kind) for kind in spots.kinds if self.layers[kind[0]].nbytes]
        part = 1.0 if knobs.fraction is None else knobs.fraction
        room = part * sum(self.layers[kind[0]].nbytes for _, kind in idle) - rank * (knobs.delta_bytes or 0)
        host = inf if knobs.host_limit is None else knobs.host_limit
        # Kinds of groups that may be offloaded, those first that are idle longest, and those for which there is time.
        self.kinds, self._free = list[list[int]](), list[list[int]]()
        for seconds, kind in sorted(idle, key=lambda each: -each[0]):
            nbytes = self.layers[kind[0]].nbytes
            if nbytes <= room and nbytes * len(kind) <= host:
                room, host = room - nbytes, host - nbytes * len(kind)
                self.kinds.append(kind)
                self._free += [kind] if seconds > 0 else []

    def _idle(self, k: int) -> float:
        """Return for how many seconds a group is neither used nor copied."""
        spot, layer = self.spots.all[k], self.layers[k]
        return self.when[spot.use] - self.when[spot.saved] - layer.ready - layer.out - layer.ahead

    @property
    def free(self) -> Placement:
        """The placement of all for which there is time."""
        return self.place(chain.from_iterable(self._free))

    def smallest(self) -> Placement:
        """Return the placement with the smallest peak that can be had at any cost."""
        return self.place(chain.from_iterable(self.kinds), 0)

    def within(self, limit: float, free: float, allowed: float = inf, few: int = FEW) -> tuple[Placement, float] | None:
        """Return the placement within a limit that takes the least time, and that time; None if there is none.

        Of those that take at most `free` seconds it is the one of the fewest kinds; `few` numbers of these are tried.
        """
        if self.peak_bytes <= limit:
            return (nothing := self.place(())), self.seconds(nothing)
        found = None
        largest = sorted(self.kinds, key=lambda kind: -self.layers[kind[0]].nbytes)
        for order in (self.kinds,) if largest == self.kinds else (self.kinds, largest):
            numbers = range(1, len(order) + 1)
            least = bisect_left(numbers, True, key=lambda number: self.leanest(order[:number]) <= limit)
            for number in numbers[least : least + few]:
                placement = self.place(chain.from_iterable(order[:number]), limit)
                if placement.peak_bytes > limit:
                    continue
                took = self.seconds(placement, allowed)
                if took < allowed:
                    found, allowed = (placement, took), took * (1 - ROUNDING)
                if took <= free:
                    return found
        return found

    def seconds(self, placement: Placement, allowed: float = inf) -> float:
        """Return the time of a step in which this rank alone offloads, or any time above the one that is allowed."""
        actions: list[Steps] = [{} for _ in self._pipeline.plans]
        actions[self.rank] = placement.steps()
        return max(run.compute for run in self._pipeline.run(actions, allowed=allowed))

    def leanest(self, kinds: Sequence[list[int]] | None = None) -> int:
        """Return a bound of the smallest peak with some kinds, or with all."""
        chosen = chain.from_iterable(self.kinds if kinds is None else kinds)
        return max(self.needs_with({k: self.spots.all[k].saved + 1 for k in chosen}), default=0)

    def needs_with(self, releases: Mapping[int, int]) -> list[int]:
        """Return the bytes from each event to the next with releases of spots, and reloads as late as can be."""
        change = [0] * (len(self.needs) + 1)
        for k, release in releases.items():
            nbytes = self.layers[k].nbytes
            change[release] -= nbytes
            change[max(self.spots.all[k].use, release)] += nbytes
        return list(map(add, self.needs, accumulate(change)))

    # Where to release and reload groups

    def place(self, chosen: Iterable[int], limit: float = inf) -> Placement:
        """Return the placement of some spots.

        A group is released at the first event where its copy is expected to be done, and earlier where memory would
        exceed the limit.  It is reloaded as late as the link allows, and later where memory would exceed the limit.
        What would only be reloaded at once is kept, as are groups whose forward starts while `max_inflight` others are
        copied.  The peak may exceed the limit if no placement of these groups fits.
        """
        order = sorted(chosen)
        latest = self._latest_reloads(order)
        releases = self._releases(order, latest, limit)
        self._force(releases, limit)
        return self._finish(releases, latest, limit)

    def _latest_reloads(self, chosen: Sequence[int]) -> dict[int, int]:
        """Return the last event at which the reload of each group can start without a stall."""
        when, spots, latest, free = self.when, self.spots.all, dict[int, int](), inf
        for use, k in sorted(((spots[k].use, k) for k in chosen), reverse=True):
            free = min(when[use] - self.layers[k].ahead, free - self.layers[k].back)
            latest[k] = min(bisect_right(when, free) - 1, use)
        return latest

    def _releases(self, chosen: Sequence[int], latest: Mapping[int, int], limit: float) -> dict[int, int]:
        """Return the first event at which the copies of each group are done; where a limit may force it, any group."""
        max_inflight, when = self._knobs.max_inflight, self.when
        found, ends, queue = dict[int, int](), list[float](), 0.0
        for k in chosen:
            spot, layer = self.spots.all[k], self.layers[k]
            start = when[spot.saved]
            if max_inflight is not None:
                ends = [end for end in ends if end > start]
                if len(ends) >= max_inflight:
                    continue
            done = max(queue, start + layer.ready) + layer.out
            m = min(bisect_left(when, done, spot.saved + 1), spot.use)
            if limit == inf and m >= latest[k]:
                continue  # used too soon
            found[k], queue = m, done
            ends.append(done)
        return found

    def _force(self, releases: dict[int, int], limit: float) -> None:
        """Release groups earlier where memory would exceed the limit: those first that are copied first."""
        spots, needs = self.spots.all, self.needs_with(releases)
        waiting = sorted(releases)
        for m, need in enumerate(needs):  # those behind m change in this loop
            if need <= limit:  # [guard: planned release]
                continue
            for k in waiting:
                spot, release = spots[k], releases[k]
                if spot.saved >= m:
                    break
                if m < release:
                    nbytes, stop = self.layers[k].nbytes, min(release, spot.use)
                    needs[m:stop] = [each - nbytes for each in needs[m:stop]]
                    releases[k] = m
                    if needs[m] <= limit:
                        break
            waiting = [k for k in waiting if releases[k] > m]

    def _finish(self, releases: Mapping[int, int], latest: Mapping[int, int], limit: float) -> Placement:
        """Return the placement with its reloads, no later than they must be and no earlier than memory allows."""
        spots, placement = self.spots.all, Placement(self, self.needs_with(releases))
        needs, placed = placement.needs, placement.placed
        before = 0
        for k in sorted(releases, key=lambda k: spots[k].use):
            nbytes, use = self.layers[k].nbytes, spots[k].use
            reload, earliest = use, max(latest[k], releases[k], before)
            while reload > earliest and needs[reload - 1] + nbytes <= limit:  # [guard: planned reload]
                reload -= 1
            placement.add(nbytes, reload, use)
            before = reload
            placed[k] = releases[k], reload
        runs = self.spots.runs
        for k, (release, reload) in list(placed.items()):
            nbytes = self.layers[k].nbytes
            for_nothing = runs[release] == runs[reload] and max(needs[release:reload], default=0) + nbytes <= limit
            if release == reload or for_nothing:  # [guard: planned group that is kept]
                del placed[k]
                placement.add(nbytes, release, reload)
        return placement


@dataclass(slots=True)
class Placement:
    """Where groups are released and reloaded, and the memory that this needs."""

    profile: Profile
    needs: list[int]  # bytes on the device from each event to the next, at most
    # Of each offloaded spot the numbers of the events of its release and its reload.
    placed: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes on the device."""
        return max(self.needs, default=0)

    def steps(self) -> Steps:
        """Return what a plan does at each event: releases, then reloads in order of their use, then offloads."""
        events, spots, calls = self.profile.spots.events, self.profile.spots.all, list[tuple[int, int, int, int]]()
        for k, (release, reload) in self.placed.items():
            calls += [(event, kind, spots[k].use, k) for kind, event in enumerate((release, reload, spots[k].saved))]
        return steps_of(
            (events[place], Action(AT_ONCE[kind], spots[k].layer, spots[k].microbatch))
            for place, kind, _, k in sorted(calls)
        )

    def add(self, nbytes: int, start: int, stop: int) -> None:
        """Count bytes from one event to another."""
        self.needs[start:stop] = [need + nbytes for need in self.needs[start:stop]]
