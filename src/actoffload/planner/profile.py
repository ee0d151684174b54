"""What planning needs of each group, in one number for each purpose: times, copies, and memory of each section."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..schedule.costs import LayerCost, Link, copies_back, copies_out

__all__ = ["Alone", "Profile"]


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
        movable, left = list[int](), math.inf if host_limit is None else host_limit
        for k in range(len(costs) - 1):
            if 0 < nbytes[k] <= left and (among is None or k in among):
                movable.append(k)
                left -= nbytes[k]
        other = [cost.other_bytes for cost in costs]
        ahead = [other[0][0], *(of[1] for of in other[:-1])]  # where the gap before a forward begins
        behind = [*(of[3] for of in other[1:]), other[-1][1]]  # where the gap before a backward begins
        in_forward = [
            max(max(border, of[0]) + cost.gap_forward_temporary, need)
            for border, of, cost, need in zip(ahead, other, costs, forward, strict=True)
        ]
        before_backward = [
            max(border, of[2]) + cost.gap_backward_temporary
            for border, of, cost in zip(behind, other, costs, strict=True)
        ]
        before = (0, *accumulate(resident))
        starts, backward = _backward_starts(costs)
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
            early=EARLY * backward,
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


def _backward_starts(costs: Sequence[LayerCost]) -> tuple[list[float], float]:
    """Return when the backward of each group starts without any offloading, and the seconds of the whole backward."""
    count = len(costs)
    starts, compute, host = [0.0] * count, 0.0, 0.0
    for cost in costs:
        host += cost.host_forward
        compute = max(compute + cost.gap_forward + cost.forward, host)
    begin = compute
    for k in reversed(range(count)):
        cost = costs[k]
        starts[k] = compute + cost.gap_backward
        host += cost.host_backward
        compute = max(starts[k] + cost.backward, host)
    return starts, compute - begin
