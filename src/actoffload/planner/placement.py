"""Place releases and reloads: the plan that offloads given groups within a limit, with its time and its peak."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from ..schedule.plan import Action, Do, Event, Plan, When
from .profile import Profile

__all__ = ["Placement", "place"]

RELEASE_MARGIN = 0.05
"""Part of the time of a copy by which it is expected to be late, so that its release is planned behind that."""


@dataclass(slots=True)
class Placement:
    """Where groups are released and reloaded, and what that costs.

    Parameters
    ----------
    groups : int
        Number of groups.
    seconds : float
        Time of the step; infinite if it exceeds what was allowed.
    peak_bytes : int
        Peak of device memory; not complete if `seconds` is infinite.
    released, reloaded : dict of int to int
        For each offloaded group, the group at whose event it is released, with ``~k`` for the BACKWARD_START of ``k``
        instead of its FORWARD_END; and the group at whose BACKWARD_START it is reloaded.
    """

    groups: int
    seconds: float = 0.0
    peak_bytes: int = 0
    released: dict[int, int] = field(default_factory=dict)
    reloaded: dict[int, int] = field(default_factory=dict)

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
    limit.  It is reloaded as late as the link allows, and later where memory would exceed the limit.

    Parameters
    ----------
    profile : Profile
        The costs.
    offloaded : collection of int
        Positions of the groups to offload.  The last of them are kept if there is no time to copy them and no need.
    limit : float
        Bytes of device memory.  The peak may exceed it if no placement of these groups fits.
    host_seconds : float
        As in `simulate`.
    allowed : float
        Seconds that the step may take.
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
