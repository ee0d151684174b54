"""Place releases and reloads: the plan that offloads given groups within a limit, with its time and its peak."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ..schedule.costs import LayerCost, Link, backward_starts, copies_back, copies_out
from ..schedule.plan import Action, Do, Event, Plan, When

__all__ = ["Alone", "Placement", "Profile", "place"]

RELOAD_MARGIN = 0.05
"""Part of the time of a copy by which it is planned to be done earlier than needed."""

EARLY = 0.02
"""Part of the backward, at most one group of it, by which every reload is planned earlier than needed."""


class Alone(NamedTuple):
    """What a profile needs of one group, whatever the others are; names as in `Profile`."""

    nbytes: int
    resident: int
    copy_out: float
    out_after: float
    copy_back: float
    back_ahead: float
    in_forward: int  # without the gap before it
    in_backward: int

    @staticmethod
    def of(cost: LayerCost, link: Link) -> Alone:
        """Return the numbers of a group with some cost."""
        nbytes = cost.nbytes
        resident = nbytes + cost.kept_bytes
        forward_start, forward_end, backward_start, backward_end = cost.other_bytes
        return Alone(
            nbytes,
            resident,
            *copies_out(cost, link),
            *copies_back(cost, link),
            max(forward_start, resident + forward_end) + cost.forward_temporary,
            max(resident + backward_start, backward_end) + cost.backward_temporary,
        )


@dataclass(frozen=True)
class Profile:
    """The costs of all groups, for plans in which copies of a group are released, and reloaded, all at once.

    Then a group needs only these numbers, and what they give equals what `simulate` gives, but for rounding, for the
    host's delays inside a group, and for bandwidth that both directions share.  Lists have one entry for each group.
    """

    costs: Sequence[LayerCost]
    nbytes: Sequence[int]
    resident: Sequence[int]  # bytes on the device between forward and backward, also those that cannot be offloaded
    movable: Sequence[int]  # groups that can be offloaded
    copy_out: Sequence[float]  # seconds of the copies to the host
    out_after: Sequence[float]  # seconds from the start of forward until the copies are done, if the queue is free
    copy_back: Sequence[float]
    back_ahead: Sequence[float]  # seconds by which the copies must start before backward does, without a stall
    in_forward: Sequence[int]  # bytes needed on top of the resident ones, in the gap and in the forward
    before_backward: Sequence[int]  # in the gap
    in_backward: Sequence[int]  # on top of the resident bytes of the other groups
    before: Sequence[int]  # bytes of all earlier groups; one entry more
    until: Sequence[int]  # bytes needed from the gap to the end of a backward, if all earlier groups are resident
    starts: Sequence[float]  # when backward of a group starts if nothing is offloaded
    early: float  # seconds by which a reload is begun before it has to be

    @staticmethod
    def of(
        costs: Sequence[LayerCost],
        link: Link,
        among: Collection[int] | None = None,
        known: Mapping[int, Alone] | None = None,
        host_limit: int | None = None,
    ) -> Profile:
        """Return the profile of groups, given in execution order, of which those `among`, or all, may be offloaded.

        `known` has what is known of each, by the identity of its cost.  Only the first groups that save no more than
        `host_limit` bytes together may be offloaded, and smaller ones behind them.
        """
        found = [Alone.of(cost, link) if known is None else known[id(cost)] for cost in costs]
        nbytes, resident, copy_out, out_after, copy_back, back_ahead, forward, in_backward = zip(*found, strict=True)
        movable, left = list[int](), inf if host_limit is None else host_limit
        for k in range(len(costs) - 1):
            if 0 < nbytes[k] <= left and (among is None or k in among):
                movable.append(k)
                left -= nbytes[k]
        other = [cost.other_bytes for cost in costs]
        ahead = [other[0][0], *(levels[1] for levels in other[:-1])]  # where the gap before a forward begins
        behind = [*(levels[3] for levels in other[1:]), other[-1][1]]  # where the gap before a backward begins
        in_forward = [
            max(max(border, levels[0]) + cost.gap_forward_temporary, need)
            for border, levels, cost, need in zip(ahead, other, costs, forward, strict=True)
        ]
        before_backward = [
            max(border, levels[2]) + cost.gap_backward_temporary
            for border, levels, cost in zip(behind, other, costs, strict=True)
        ]
        before = (0, *accumulate(resident))
        starts, begin, end = backward_starts(costs)
        until = [max(before[k + 1] + before_backward[k], before[k] + in_backward[k]) for k in range(len(costs))]
        return Profile(
            costs=costs,
            nbytes=nbytes,
            resident=resident,
            movable=movable,
            copy_out=copy_out,
            out_after=out_after,
            copy_back=copy_back,
            back_ahead=back_ahead,
            in_forward=in_forward,
            before_backward=before_backward,
            in_backward=in_backward,
            before=before,
            until=until,
            starts=starts,
            early=EARLY * (end - begin),
        )

    def latest_reloads(self, offloaded: Iterable[int]) -> dict[int, int]:
        """Return the group at whose BACKWARD_START each offloaded group is reloaded at the latest without a stall."""
        costs, last = self.costs, len(self.costs) - 1
        latest, free, event = dict[int, int](), float("inf"), 1
        for k in sorted(offloaded):
            margin = min(self.early, costs[k].backward) + RELOAD_MARGIN * self.copy_back[k]
            free = min(self.starts[k] - self.back_ahead[k] - margin, free - (1 + RELOAD_MARGIN) * self.copy_back[k])
            event = max(event, k + 1)
            while event < last and self.starts[event] > free:
                event += 1
            latest[k] = event
        return latest

    @cached_property
    def leanest(self) -> list[int]:
        """Smallest possible peak by the number of `movable` groups that are offloaded, from 0 to all.

        These plans release each group after its forward and reload it before its backward.
        """
        before, count = self.before, len(self.costs)
        may = set(self.movable)
        stays = [self.resident[k] - (self.nbytes[k] if k in may else 0) for k in range(count)]
        fixed = [0, *accumulate(stays)]
        need = list(map(max, self.in_forward, self.in_backward))
        # By group: if all that can be offloaded up to it is, and if nothing before it is.
        offloaded = [fixed[k] + max(need[k], stays[k] + self.before_backward[k]) for k in range(count)]
        kept = [before[k] + max(need[k], self.resident[k] + self.before_backward[k]) for k in range(count)]
        most_offloaded = [0, *accumulate(offloaded, max)]
        most_kept = list(accumulate(reversed(kept), max))[::-1]
        firsts = [*self.movable, count - 1]  # the first group that could be offloaded and is not, or the last one
        return [max(most_offloaded[k], most_kept[k] - (before[k] - fixed[k])) for k in firsts]


RELEASE_MARGIN = 0.05
"""Part of the time of a copy by which it is expected to be late, so that its release is planned behind that."""


@dataclass(slots=True)
class Placement:
    """Where groups are released and reloaded, and what that costs."""

    groups: int  # number
    seconds: float = 0.0  # of the step; infinite if it exceeds what was allowed
    peak_bytes: int = 0  # of device memory; not complete if `seconds` is infinite
    # Of each offloaded group, the group at whose FORWARD_END it is released; ``~k`` for the BACKWARD_START of ``k``.
    released: dict[int, int] = field(default_factory=dict)
    reloaded: dict[int, int] = field(default_factory=dict)  # and the group at whose BACKWARD_START it is reloaded

    def plan(self) -> Plan:
        """Return the plan."""
        return Plan.of(self.groups, self._calls())

    def _calls(self) -> Iterator[tuple[Event, Action]]:
        for k, at in self.released.items():
            when = Event(When.FORWARD_END, at) if at >= 0 else Event(When.BACKWARD_START, ~at)
            yield Event(When.FORWARD_START, k), Action(Do.OFFLOAD, k)
            yield when, Action(Do.RELEASE, k)
        for k, at in self.reloaded.items():
            yield Event(When.BACKWARD_START, at), Action(Do.RELOAD, k)


def place(
    profile: Profile,
    offloaded: Collection[int],
    limit: float = inf,
    *,
    host_seconds: float = 0.0,
    allowed: float = inf,
) -> Placement:
    """Return where to release and reload the groups that are offloaded.

    A group is released at the first FORWARD_END where its copy is done, and earlier where memory would exceed the
    limit.  It is reloaded as late as the link allows, and later where memory would exceed the limit.  The last of the
    groups are kept if there is no time to copy them and no need.  The peak may exceed the limit if no placement of
    these groups fits.  `host_seconds` is as in `simulate`; the step may take `allowed` seconds.
    """
    run = _Run(profile, frozenset(offloaded), limit, host_seconds, Placement(len(profile.costs)))
    for k in range(len(profile.costs)):
        run.forward(k)
        if run.compute > allowed:
            break
    else:
        run.backward(allowed)
    run.placement.seconds = run.compute if run.compute <= allowed else inf
    return run.placement


@dataclass(slots=True)
class _Run:
    """The clocks and the resident bytes in one step."""

    profile: Profile
    offloaded: frozenset[int]
    limit: float
    host_seconds: float
    placement: Placement
    compute: float = 0.0
    host: float = 0.0
    d2h: float = 0.0
    h2d: float = 0.0
    resident: int = 0
    latest: dict[int, int] = field(init=False)  # events of the reloads
    unreleased: deque[tuple[int, float]] = field(default_factory=deque)  # and when the copies are done

    def __post_init__(self) -> None:
        self.latest = self.profile.latest_reloads(self.offloaded)

    def _need(self, nbytes: int) -> None:
        if self.resident + nbytes > self.placement.peak_bytes:
            self.placement.peak_bytes = self.resident + nbytes

    def forward(self, k: int) -> None:
        profile, cost = self.profile, self.profile.costs[k]
        self._need(profile.in_forward[k])
        start = self.compute + cost.gap_forward
        self.host += cost.host_forward
        self.resident += profile.resident[k]
        if k in self.offloaded:
            self.host += self.host_seconds * len(cost.saved)
            done = max(self.d2h + profile.copy_out[k], start + profile.out_after[k])
            self.d2h = done
            self.unreleased.append((k, done))
        self.compute = max(start + cost.forward, self.host)
        last = k + 1 == len(profile.costs)
        self._release(k, profile.before_backward[k] if last else profile.in_forward[k + 1])

    def _release(self, at: int, need: int) -> None:
        """Release groups at an event: what is copied, and as many as the bytes need that come next."""
        while self.unreleased:
            k, done = self.unreleased[0]
            late = done + RELEASE_MARGIN * self.profile.copy_out[k]
            reload_due = at < 0 and self.latest[k] >= ~at
            # [guard: planned release]
            if k == ~at or (self.resident + need <= self.limit and (late > self.compute or reload_due)):
                break
            self.unreleased.popleft()
            self.compute = max(self.compute, done)
            self.resident -= self.profile.nbytes[k]
            self.placement.released[k] = at

    def backward(self, allowed: float) -> None:
        profile, placement = self.profile, self.placement
        reloads = deque(sorted(self.offloaded, reverse=True))
        needs: dict[int, float] = {}  # when backward of a group can start without a stall
        for k in reversed(range(len(profile.costs))):
            cost = profile.costs[k]
            self._need(profile.before_backward[k])
            self.compute += cost.gap_backward
            absent = k in placement.released and k not in placement.reloaded
            need = max(profile.in_backward[k], profile.before_backward[k - 1] if k else 0)
            self._release(~k, need - profile.resident[k] + (profile.nbytes[k] if absent else 0))
            while reloads and (reloads[0] == k or self._fits(reloads[0], k)):
                group = reloads.popleft()
                if group not in placement.released:  # never short of memory, and no time to copy it: kept
                    self.unreleased.pop()  # [guard: planned group that is kept]
                    continue
                self.h2d = max(self.h2d, self.compute)
                needs[group] = self.h2d + profile.back_ahead[group]
                self.h2d += profile.copy_back[group]
                self.resident += profile.nbytes[group]
                placement.reloaded[group] = k
            self.resident -= profile.resident[k]
            self._need(profile.in_backward[k])
            self.host += cost.host_backward + (self.host_seconds * len(cost.saved) if k in placement.reloaded else 0.0)
            self.compute = max(max(self.compute, needs.get(k, 0.0)) + cost.backward, self.host)
            if self.compute > allowed:
                return

    def _fits(self, group: int, at: int) -> bool:
        """Return whether it is time to reload a group, and every backward until its own has enough memory then."""
        profile = self.profile
        if at > self.latest[group]:  # [guard: planned reload]
            return False
        here = profile.in_backward[at] + profile.before[at]
        gap = profile.before_backward[group] + profile.before[group + 1]
        until = max(here, gap, *profile.until[group + 1 : at])
        return self.resident + profile.nbytes[group] - profile.before[at + 1] + until <= self.limit
